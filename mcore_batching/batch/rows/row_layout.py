"""Layout of a packed row: offsets of the padded samples, values placed at them, and the slices of
context-parallel ranks.

    samples of 3 and 2 tokens, each padded to a multiple of 2, the row to a multiple of 8
    padded_offsets([3, 2], 2, 8)                        (0, 4, 6, 8)
    Row((0, 4, 6, 8)).lay_out([abc, de], .)             a b c . d e . .
    Row((0, 4, 6, 8)).later(of that, 1)                 b c . 0 e 0 . 0

Each segment is cut by itself into 2·cp equal chunks; rank r holds chunks r and 2·cp−1−r, so that
causal attention costs every rank the same:

    row of two segments                     0 1 2 3 | 4 5 6 7 8 9 10 11
    Row((0, 4, 12), 2, 0).local(row)        0     3   4 5           10 11
    Row((0, 4, 12), 2, 1).local(row)          1 2         6 7 8 9

A sample without tokens takes one alignment unit, since attention kernels break on empty segments.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mcore_batching.batch.errors import BatchError
from mcore_batching.planning.errors import named
from mcore_batching.planning.integers import at_least, round_up


def padded_offsets(
    total_lengths: Sequence[int], sample_alignment_tokens: int, row_alignment_tokens: int
) -> tuple[int, ...]:
    """Offsets of the padded samples in a row, whose own padding is one more segment; a `BatchError`
    if it is too long for int32 offsets."""
    offsets = [0]
    for length in total_lengths:
        offsets.append(offsets[-1] + round_up(max(length, 1), sample_alignment_tokens))
    end = round_up(offsets[-1], row_alignment_tokens)
    if end >= 2**31:
        raise BatchError(
            f"a row may have at most {2**31 - 1} tokens, got {end}; pack fewer samples, or lower "
            "row_alignment_tokens"
        )
    return (*offsets, end) if end > offsets[-1] else tuple(offsets)


def require_alignment(
    sample_alignment_tokens: int, row_alignment_tokens: int, context_parallel_size: int
) -> None:
    """Refuse alignments by which a segment of a row cannot be cut over context-parallel ranks."""
    at_least("sample_alignment_tokens", sample_alignment_tokens, 1, BatchError)
    at_least("row_alignment_tokens", row_alignment_tokens, 1, BatchError)
    at_least("context_parallel_size", context_parallel_size, 1, BatchError)
    if context_parallel_size == 1:
        return
    # Each rank takes a chunk of a sample from the front and one from the back.
    multiple = 2 * context_parallel_size
    # A row alignment that divides the samples' adds no padding, so it need not be cut.
    pads_row = sample_alignment_tokens % row_alignment_tokens
    for name, alignment, is_cut in (
        ("sample_alignment_tokens", sample_alignment_tokens, True),
        ("row_alignment_tokens", row_alignment_tokens, pads_row),
    ):
        if is_cut and alignment % multiple:
            raise BatchError(
                f"{named(name)} must be a multiple of {multiple} (2 * context_parallel_size), got "
                f"{alignment}; set it to {math.lcm(alignment, multiple)}"
            )


@dataclasses.dataclass(frozen=True)
class Row:
    """A full row, by the offsets of its segments ``[segments + 1]``, at the start of each of which
    its sample lies, and the context-parallel rank that holds a part of it."""

    offsets: tuple[int, ...]
    context_parallel_size: int = 1
    context_parallel_rank: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of the full row, padding included."""
        return self.offsets[-1]

    def lay_out(
        self, pieces: Sequence[Tensor], pad_value: float, *, padding: Tensor | None = None
    ) -> Tensor:
        """``[tokens of the row, ...]`` with each sample's piece, ``[rows, ...]`` of at most one row
        per token, at its offset. The rest is `pad_value`, or `padding` of the result's shape."""
        # A piece made of an empty list has no trailing shape: take that of one with rows.
        like = next((piece for piece in pieces if piece.shape[0]), pieces[0])
        # A copy: the caller's tensor may be a view in which rows share memory.
        if padding is not None:
            full = padding.contiguous().clone()
        else:
            full = like.new_full((self.num_tokens, *like.shape[1:]), pad_value)
        for start, piece in zip(self.offsets, pieces, strict=False):
            if piece.shape[0]:
                full[start : start + piece.shape[0]] = piece
        return full

    def later(self, full: Tensor, depth: int) -> Tensor:
        """At each position of ``[..., tokens of the row]`` the value ``depth`` positions on, 0
        beyond the end of its segment."""
        offsets = torch.tensor(self.offsets, device="cpu")
        ends = offsets[1:].repeat_interleave(offsets.diff()).to(full.device)
        at = torch.arange(depth, depth + self.num_tokens, device=full.device)
        values = full.index_select(-1, at.clamp(max=self.num_tokens - 1))
        return values.masked_fill(at >= ends, 0)

    def local(self, full: Tensor, dim: int = 0) -> Tensor:
        """The part of a full row, with its tokens on `dim`, that this rank holds; of one rank the
        row itself."""
        held = self.chunks()
        if self.context_parallel_size == 1:
            return full
        # Narrow, not index_select: its indices would have to be copied to the row's device.
        return torch.cat([full.narrow(dim, first, end - first) for _, first, end in held], dim)

    def positions(self) -> Tensor:
        """Positions of the tokens that this rank holds, int64, on the host, ascending."""
        return self.local(torch.arange(self.num_tokens, device="cpu"))

    def chunks(self) -> list[tuple[int, int, int]]:
        """Positions at which the segment starts, and at which the chunk starts and ends, of each
        chunk that this rank holds; of one rank each segment is one."""
        size, rank = self.context_parallel_size, self.context_parallel_rank
        if not 0 <= rank < size:
            raise BatchError(f"expected a rank below context_parallel_size={size}, got {rank}")
        segments = itertools.pairwise(self.offsets)
        if size == 1:
            return [(start, start, end) for start, end in segments]
        held = []
        for start, end in segments:
            chunk, rest = divmod(end - start, 2 * size)
            if rest:
                raise BatchError(
                    f"{end - start} tokens cannot be cut into {2 * size} equal chunks "
                    f"(2 * context_parallel_size); pad them to {(chunk + 1) * 2 * size}"
                )
            for place in (rank, 2 * size - 1 - rank):
                held.append((start, start + place * chunk, start + (place + 1) * chunk))
        return held
