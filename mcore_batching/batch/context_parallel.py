"""Whole responses from the slices of a packed row that context-parallel ranks hold.

The model gives each rank one value per token of its slice, for instance the log-probability of the
next token. `gather_response` turns them into one tensor per sample with a value for every response
token, the same on all ranks:

    row of one sample, prompt p, response a b c; cp 2     p a b c
    rank 0 has positions 0 and 3                          log p(a), .
    rank 1 has positions 1 and 2                          log p(b), log p(c)
    gather_response, on both ranks                        [log p(a), log p(b), log p(c)]
    owned_response_mask                                   [1 0 0] on rank 0, [0 1 1] on rank 1

The first token of a response that is the whole sample is predicted on no rank: its value is 0.0 and
carries no gradient.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_batching.batch.errors import BatchError
from mcore_batching.batch.packed import PackedMicroBatch
from mcore_batching.planning.errors import Argument


def gather_response(
    local_stream: Tensor,
    micro_batch: PackedMicroBatch,
    *,
    group: dist.ProcessGroup | None = None,
) -> list[Tensor]:
    """Each sample's values of its response tokens, from the positions that predict them.

    A collective over ``group``, one per call; none if the row has no response token. So is its
    backward, which sums the incoming gradients over the ranks, the exact adjoint: if one rank goes
    backward through the result, all must. A loss that every rank computes in full therefore counts
    as often as there are ranks: divide it by their number, or sum by `token_mean`, by which each
    rank counts its own positions.

    Args:
        local_stream: ``[T_local, ...]``, at each position of this rank's slice a value that
            belongs to the next token.
        micro_batch: the row of which it is a slice.
        group: the context-parallel group, ranks in the order of their slices; None without
            context parallelism.

    Returns:
        ``[response_length, ...]`` for each sample, of the stream's type; attached to the graph even
        if every response is empty.

    Raises:
        BatchError: the stream is not as long as the slice, or the group is not of the size for
            which the row was cut.
    """
    expected = micro_batch.tokens.shape[1]
    if not local_stream.dim() or local_stream.shape[0] != expected:
        raise BatchError(
            f"expected local_stream of shape [{expected}, ...], one value per token of this rank's "
            f"slice, got {list(local_stream.shape)}"
        )
    positions = micro_batch.responses.owned_positions.to(local_stream.device)
    return gather_own_values(local_stream.index_select(0, positions), micro_batch, group=group)


def gather_own_values(
    own_values: Tensor, micro_batch: PackedMicroBatch, *, group: dist.ProcessGroup | None
) -> list[Tensor]:
    """Each sample's values of its response tokens, from those that this rank predicts.

    The rest of `gather_response`, whose notes on collectives hold here too.

    Args:
        own_values: ``[owned, ...]``, one for each of ``micro_batch.responses.owned_positions``.
        micro_batch: the row.
        group: as for `gather_response`.

    Returns:
        as `gather_response`.

    Raises:
        BatchError: the group is not of the size for which the row was cut.
    """
    size = 1 if group is None else group.size()
    if size != micro_batch.context_parallel_size:
        raise BatchError(
            f"expected a group of {micro_batch.context_parallel_size} ranks, the row's "
            f"context_parallel_size, got {'no group' if group is None else f'one of {size}'}; set ",
            Argument("group"),
            " to the context-parallel group",
        )
    responses = micro_batch.responses
    flat = own_values.new_zeros((responses.owned.numel(), *own_values.shape[1:]))
    flat = flat.index_copy(0, responses.owned_indices.to(own_values.device), own_values)
    if group is not None and size > 1 and flat.numel():
        flat = cast(Any, _SumOverGroup).apply(flat, group)
    return list(torch.split(flat, micro_batch.response_lengths))


def owned_response_mask(micro_batch: PackedMicroBatch) -> list[Tensor]:
    """Mask of the response tokens that this context-parallel rank predicts.

    Returns:
        bool ``[response_length]`` for each sample, on the tokens' device. Each token is True on
        exactly one rank, one without a predecessor on none.
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
