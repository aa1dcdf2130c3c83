"""Whole responses from the slices of a packed row that context-parallel ranks hold.

row of one sample, prompt p, response a b c; cp 2     p a b c
rank 0 has positions 0 and 3                          log p(a), .
rank 1 has positions 1 and 2                          log p(b), log p(c)
gather_response, on both ranks                        [log p(a), log p(b), log p(c)]
owned_response_mask                                   [1 0 0] on rank 0, [0 1 1] on rank 1
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.nn.functional import all_reduce

from mcore_batching.batch.errors import BatchError
from mcore_batching.batch.row import PackedMicroBatch


def gather_response(
    local_stream: Tensor,
    micro_batch: PackedMicroBatch,
    *,
    group: dist.ProcessGroup | None = None,
) -> list[Tensor]:
    """Values of each sample's response tokens, whole on every context-parallel rank.

    A collective over ``group`` (an all-reduce), and another one in backward, which sums the ranks'
    gradients: if one rank runs backward through the result, all must. A loss that every rank
    computes in full is counted once per rank: divide it by the group's size, or use `token_mean`.

    Args:
        local_stream: ``[T_local, ...]``, at each position of this rank's slice the value of the
            next token.
        micro_batch: the row.
        group: the context-parallel group, ranks in the order of their slices; None without context
            parallelism.

    Returns:
        ``[response_length, ...]`` for each sample, of the stream's type, 0.0 where nothing predicts
        the token; attached to the graph even if every response is empty.

    Raises:
        BatchError: the stream is not as long as the slice, or ``group`` has another size than the
            row was cut for.
    """
    expected = micro_batch.tokens.shape[1]
    if not local_stream.dim() or local_stream.shape[0] != expected:
        raise BatchError(
            f"expected local_stream of shape [{expected}, ...], one value per token of the slice, "
            f"got {list(local_stream.shape)}"
        )
    positions = micro_batch.responses.owned_positions.to(local_stream.device)
    return gather_own_values(local_stream.index_select(0, positions), micro_batch, group=group)


def gather_own_values(
    own_values: Tensor, micro_batch: PackedMicroBatch, *, group: dist.ProcessGroup | None
) -> list[Tensor]:
    """`gather_response` of ``[owned, ...]`` values at ``micro_batch.responses.owned_positions``."""
    size = 1 if group is None else group.size()
    if size != micro_batch.context_parallel_size:
        raise BatchError(
            f"expected the {micro_batch.context_parallel_size} ranks that share the row, got "
            f"{size}; set group to the context-parallel group"
        )
    responses = micro_batch.responses
    flat = own_values.new_zeros((responses.owned.numel(), *own_values.shape[1:]))
    # Zeros where another rank predicts the token, so the sum over ranks is the whole response.
    flat = flat.index_copy(0, responses.owned_indices.to(own_values.device), own_values)
    # Without response tokens no rank of the row calls: all have the same lengths.
    if group is not None and size > 1 and flat.numel():
        flat = all_reduce(flat, group=group)  # type: ignore[no-untyped-call]
    return list(torch.split(flat, micro_batch.response_lengths))


def owned_response_mask(micro_batch: PackedMicroBatch) -> list[Tensor]:
    """Mask of the response tokens that this context-parallel rank predicts: bool
    ``[response_length]`` for each sample. A token is True on one rank, on none if it has no
    predecessor."""
    return list(torch.split(micro_batch.responses.owned, micro_batch.response_lengths))
