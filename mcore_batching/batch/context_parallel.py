"""Values of whole responses from a packed row that context-parallel ranks share.

The model gives each rank one value a token of its slice, for instance the log-probability of the
next token. `gather_response` makes of it one tensor a sample, with a value for every response
token, the same on all ranks.

Guarantees
- Every response token is predicted on exactly one rank; the first token of a response that is the
  whole sample is predicted on none: its value is 0.0 and carries no gradient.
- Gathering is differentiable, and its backward is the exact adjoint: incoming gradients are summed
  over the ranks. So the sum of what all ranks compute from the result is differentiated rightly,
  whether each takes its own positions or all positions interact.
- One collective a micro-batch forward, one backward; none if there is no response token at all.
- The result hangs on the graph even if every response is empty.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_batching.batch.packed import PackedMicroBatch


def gather_response(
    local_stream: Tensor,
    micro_batch: PackedMicroBatch,
    *,
    group: dist.ProcessGroup | None = None,
) -> list[Tensor]:
    """Each sample's values of its response tokens, from what the positions before them hold.

    A collective over ``group``. If one rank goes backward through the result, all must. A loss
    that every rank computes in full counts once a rank: divide it by the ranks, or let each rank
    sum its own positions (`owned_response_mask`).

    Args:
        local_stream: ``[T_local, ...]``, at each position of this rank's slice a value that
            belongs to the next token.
        micro_batch: the row that the slice is of.
        group: the context-parallel group, ranks in the order of their slices; None without
            context parallelism.

    Returns:
        ``[response_length, ...]`` for each sample, of the stream's type.

    Raises:
        ValueError: the stream is not as long as the slice, or the group is not of the size for
            which the row was cut.
    """
    expected = micro_batch.tokens.shape[1]
    if not local_stream.dim() or local_stream.shape[0] != expected:
        raise ValueError(
            f"expected local_stream of shape [{expected}, ...], one value a token of this rank's "
            f"slice, got {list(local_stream.shape)}"
        )
    size = 1 if group is None else group.size()
    if size != micro_batch.context_parallel_size:
        raise ValueError(
            f"expected a group of {micro_batch.context_parallel_size} ranks, since the row was "
            f"packed with that context_parallel_size, got "
            f"{'no group' if group is None else f'one of {size}'}; pass the context-parallel group"
        )
    responses, device = micro_batch.responses, local_stream.device
    own_values = local_stream.index_select(0, responses.owned_positions.to(device))
    flat = local_stream.new_zeros((responses.owned.numel(), *local_stream.shape[1:]))
    flat = flat.index_copy(0, responses.owned_indices.to(device), own_values)
    if group is not None and size > 1 and flat.numel():
        flat = cast(Any, _SumOverGroup).apply(flat, group)
    return list(torch.split(flat, micro_batch.response_lengths))


def owned_response_mask(micro_batch: PackedMicroBatch) -> list[Tensor]:
    """Which response tokens are predicted at positions of this context-parallel rank's slice.

    Returns:
        bool ``[response_length]`` for each sample, on the tokens' device. Over all ranks each token
        is True exactly once, but for one without a predecessor, which is True nowhere.
    """
    return list(torch.split(micro_batch.responses.owned, micro_batch.response_lengths))


class _SumOverGroup(torch.autograd.Function):
    """Sum over a group of ranks; backward, the sum of the ranks' incoming gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None
