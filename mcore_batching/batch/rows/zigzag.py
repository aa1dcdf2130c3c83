"""Slices of a packed row for context-parallel ranks.

A sequence is cut into 2·cp equal chunks; rank r holds chunks r and 2·cp−1−r, so that causal
attention costs every rank the same. Each segment of a packed row is cut by itself:

    row of two segments                     0 1 2 3 | 4 5 6 7 8 9 10 11      cu_seqlens [0, 4, 12]
    slice_packed(row, cu_seqlens, 2, 0)     0     3   4 5           10 11
    slice_packed(row, cu_seqlens, 2, 1)       1 2         6 7 8 9

With cp 1 the row is its own slice. A `BatchError` names a segment that does not divide.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from mcore_batching.batch.errors import BatchError


def packed_positions(
    cu_seqlens_padded: Sequence[int], context_parallel_size: int, rank: int
) -> Tensor:
    """Positions, in the full row, of the tokens that a context-parallel rank holds: int64, on the
    host, ascending.

        packed_positions([0, 4, 12], 2, rank=0)    [0 3 4 5 10 11]
    """
    held = _held_chunks(cu_seqlens_padded, context_parallel_size, rank)
    return torch.cat([torch.arange(first, end, device="cpu") for first, end in held])


def slice_packed(
    x: Tensor,
    cu_seqlens_padded: Sequence[int],
    context_parallel_size: int,
    rank: int,
    dim: int = 0,
) -> Tensor:
    """A context-parallel rank's slice, at its `packed_positions`, of a packed row with its tokens
    on dimension ``dim``; ``x`` itself where there is one rank."""
    held = _held_chunks(cu_seqlens_padded, context_parallel_size, rank)
    if context_parallel_size == 1:
        return x
    # Narrow, not index_select: its indices would have to be copied to the row's device.
    return torch.cat([x.narrow(dim, first, end - first) for first, end in held], dim)


def locate(
    positions: Tensor, cu_seqlens_padded: Sequence[int], context_parallel_size: int
) -> tuple[Tensor, Tensor]:
    """The rank that holds each position of a packed row, and the place in that rank's slice.

        locate([0 1 2 11], [0, 4, 12], 2)    ranks [0 1 1 0], places [0 0 1 5]

    Inverse of `packed_positions`, which on each rank gives the position of each place. All are
    int64 ``[n]`` on the host.
    """
    if context_parallel_size == 1:
        return torch.zeros_like(positions), positions
    offsets = torch.tensor(cu_seqlens_padded, device="cpu")
    segment = torch.searchsorted(offsets[1:], positions, right=True)
    start = offsets[segment]
    chunk = (offsets[segment + 1] - start) // (2 * context_parallel_size)
    place = (positions - start) // chunk
    # Rank r holds chunks r and 2·cp−1−r.
    rank = torch.minimum(place, 2 * context_parallel_size - 1 - place)
    in_second = (place >= context_parallel_size).long()
    local = start // context_parallel_size + in_second * chunk + (positions - start) % chunk
    return rank, local


def _held_chunks(
    cu_seqlens_padded: Sequence[int], context_parallel_size: int, rank: int
) -> list[tuple[int, int]]:
    """Start and end, in the full row, of each chunk that a rank holds."""
    if not 0 <= rank < context_parallel_size:
        raise BatchError(
            f"expected a rank below context_parallel_size={context_parallel_size}, got {rank}"
        )
    if context_parallel_size == 1:
        return [(0, cu_seqlens_padded[-1])]
    num_chunks = 2 * context_parallel_size
    held = []
    for start, end in itertools.pairwise(cu_seqlens_padded):
        chunk, rest = divmod(end - start, num_chunks)
        if rest:
            raise BatchError(
                f"{end - start} tokens cannot be cut into {num_chunks} equal chunks "
                f"(2 * context_parallel_size); pad them to {(chunk + 1) * num_chunks}"
            )
        for place in (rank, num_chunks - 1 - rank):
            held.append((start + place * chunk, start + (place + 1) * chunk))
    return held
