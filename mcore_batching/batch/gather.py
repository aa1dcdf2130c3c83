"""Whole responses from the slices of a packed row that context-parallel ranks hold.

row of one sample, prompt p, response a b c; cp 2     p a b c
rank 0 has positions 0 and 3                          log p(a), .
rank 1 has positions 1 and 2                          log p(b), log p(c)
gather_response, on both ranks                        [log p(a), log p(b), log p(c)]
row.responses.owned                                   1 0 0 on rank 0, 0 1 1 on rank 1
"""

from __future__ import annotations

from collections.abc import Sequence

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
    own = local_stream.index_select(0, positions)
    return per_sample(gather_own_values(own, micro_batch, group=group), micro_batch)


class _PerSample(list[Tensor]):
    """Values of each sample's response tokens: views of one flat tensor."""

    def __init__(self, flat: Tensor, lengths: list[int]) -> None:
        super().__init__(flat.split_with_sizes(lengths))
        self.flat, self.lengths, self.views = flat, lengths, [*self]


def per_sample(flat: Tensor, micro_batch: PackedMicroBatch) -> list[Tensor]:
    """``[R, ...]`` values of a row's response tokens as one view for each sample."""
    return _PerSample(flat, micro_batch.response_lengths)


def flat_values(values: Sequence[Tensor], lengths: list[int]) -> Tensor | None:
    """The ``[R]`` values that `per_sample` made these views of, for samples of these response
    lengths; None if they are others."""
    if type(values) is not _PerSample or values.flat.dim() != 1 or values.lengths != lengths:
        return None
    # A list may have been changed since.
    is_as_made = [*map(id, values)] == [*map(id, values.views)]
    return values.flat if is_as_made else None


def gather_own_values(
    own_values: Tensor, micro_batch: PackedMicroBatch, *, group: dist.ProcessGroup | None
) -> Tensor:
    """Whole responses ``[R, ...]``, sample after sample, from this rank's ``[owned, ...]`` values
    at ``micro_batch.responses.owned_positions``. Collective and errors as of `gather_response`."""
    size = 1 if group is None else group.size()
    if size != micro_batch.context_parallel_size:
        raise BatchError(
            f"expected the {micro_batch.context_parallel_size} ranks that share the row, got "
            f"{size}; set group to the context-parallel group"
        )
    responses = micro_batch.responses
    flat, count = own_values, responses.owned.numel()
    # Zeros where another rank predicts the token, so the sum over ranks is the whole response.
    if len(own_values) < count:
        flat = own_values.new_zeros((count, *own_values.shape[1:]))
        flat = flat.index_copy(0, responses.owned_indices.to(own_values.device), own_values)
    # Without response tokens no rank of the row calls: all have the same lengths.
    if group is not None and size > 1 and flat.numel():
        flat = all_reduce(flat, group=group)  # type: ignore[no-untyped-call]
    return flat
