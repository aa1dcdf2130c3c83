"""`RowIndex`: which token of which sample stands at each position of packed rows.

    samples of 3 and 2 tokens, each padded to a multiple of 4, the row to one of 16
    padded_offsets([3, 2], 4, 16)     (0, 4, 8, 16)         the row's own padding is a segment

    Slice(offsets, 2, rank)           row                   rank 0 of 2       rank 1 of 2
    segment                           0 0 0 0 1 1 1 1 2 ..  0 0 1 1 2 2 2 2   0 0 1 1 2 2 2 2
    within                            0 1 2 3 0 1 2 3 0 ..  0 3 0 3 0 1 6 7   1 2 1 2 2 3 4 5

Under context parallelism each segment is cut by itself into 2·cp equal chunks; rank r holds chunks
r and 2·cp−1−r, so that causal attention costs every rank the same. A sample without tokens takes
one alignment unit, since attention kernels break on empty segments.

Every layout of a row is arithmetic on these two: the place of each position's token in a flat field
is the start of its sample there plus its place within the sample. Nothing loops over samples, and
rows one behind the other are indexed as one long row.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from mcore_batching.batch.errors import BatchError
from mcore_batching.planning.errors import named
from mcore_batching.planning.integers import at_least, round_up


def padded_offsets(
    total_lengths: Sequence[int], sample_alignment_tokens: int, row_alignment_tokens: int
) -> tuple[int, ...]:
    """Offsets of the padded samples in a row, whose own padding is one more segment; a `BatchError`
    if it is too long for int32 offsets."""
    padded = (round_up(max(length, 1), sample_alignment_tokens) for length in total_lengths)
    offsets = [*itertools.accumulate(padded, initial=0)]
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


class Span:
    """Where samples' rows lie in a flat field; on the host.

    Attributes:
        lengths: rows of each sample, int64 ``[samples]``.
        starts: place of each sample's first row in the field, int64 ``[samples]``.
        end: the field's place that stands for padding.
        firsts: rows of the samples before each one, int64 ``[samples]``.
        counts: `lengths` as Python ints.
        total: rows of all these samples.
    """

    def __init__(self, lengths: Tensor, starts: Tensor | None = None, end: int = -1) -> None:
        self.lengths = lengths
        self.firsts = lengths.cumsum(0) - lengths
        self.counts: list[int] = lengths.tolist()
        self.total = sum(self.counts)
        # Without starts: these samples are all of the field's.
        self.starts, self.end = (self.firsts, self.total) if starts is None else (starts, end)

    @classmethod
    def of(cls, counts: Sequence[int]) -> Span:
        """The span of a field whole, of samples with these numbers of rows."""
        return cls(torch.tensor(counts, dtype=torch.int64, device="cpu"))

    def taken(self, samples: Tensor) -> Span:
        """The span of some of the samples, in this order."""
        lengths, starts = (each.index_select(0, samples) for each in (self.lengths, self.starts))
        return Span(lengths, starts, self.end)

    @functools.cached_property
    def samples(self) -> Tensor:
        """The sample of each row, int64 ``[total]``."""
        return torch.repeat_interleave(self.lengths, output_size=self.total)

    @functools.cached_property
    def places(self) -> Tensor:
        """Places of all samples' rows, and that of padding, int64 ``[total + 1]``."""
        places = torch.arange(self.total + 1, device="cpu")
        places[:-1] += (self.starts - self.firsts).index_select(0, self.samples)
        places[-1] = self.end
        return places


def predicted_within(totals: Span, responses: Span) -> Tensor:
    """Place in its sample at which each response token is predicted, int64 ``[R]``; -1 for the
    first of a sample without a prompt, which nothing predicts."""
    # Response token j of a sample with p prompt tokens is predicted at place p − 1 + j.
    first = totals.lengths - responses.lengths - 1 - responses.firsts
    return torch.arange(responses.total, device="cpu") + first.index_select(0, responses.samples)


class Slice:
    """Positions of a context-parallel rank's slice of a row, by segment. Tensors are on the host.

    Attributes:
        offsets: of the full row's segments ``[segments + 1]``.
        size: ranks that share the row.
        rank: this one of them.
        num_local: tokens of the slice, T_local.

    Raises:
        BatchError: the rank is none of the size's, or a segment cannot be cut.
    """

    def __init__(self, offsets: Sequence[int], size: int = 1, rank: int = 0) -> None:
        self.offsets, self.size, self.rank = tuple(offsets), size, rank
        if not 0 <= rank < size:
            raise BatchError(f"expected a rank below context_parallel_size={size}, got {rank}")
        for start, end in itertools.pairwise(self.offsets) if size > 1 else ():
            chunk, rest = divmod(end - start, 2 * size)
            if rest:
                raise BatchError(
                    f"{end - start} tokens cannot be cut into {2 * size} equal chunks "
                    f"(2 * context_parallel_size); pad them to {(chunk + 1) * 2 * size}"
                )
        self.num_local = self.offsets[-1] // size
        self._starts = torch.tensor(self.offsets, device="cpu")
        self._lengths = self._starts.diff()
        self._local_starts = self._starts if size == 1 else self._starts // size

    @functools.cached_property
    def segment(self) -> Tensor:
        """The segment of each position, int64 ``[T_local]``."""
        return torch.repeat_interleave(self._local_starts.diff(), output_size=self.num_local)

    @functools.cached_property
    def within(self) -> Tensor:
        """Place of each position in its segment, int64 ``[T_local]``."""
        within = torch.arange(self.num_local, device="cpu")
        within -= self._local_starts.index_select(0, self.segment)
        if self.size > 1:
            chunk = (self._lengths // (2 * self.size)).index_select(0, self.segment)
            # Rank r holds chunks r and 2·size − 1 − r, one behind the other.
            within += torch.where(within < chunk, self.rank, self._skipped_by_second) * chunk
        return within

    @property
    def _skipped_by_second(self) -> int:
        """Chunks of other ranks before the second chunk of this one."""
        return 2 * (self.size - 1) - self.rank

    @property
    def chunks(self) -> list[tuple[int, int, int]]:
        """Positions at which the segment starts, and at which the chunk starts and ends, of each
        chunk of this slice; of one rank each segment is one."""
        held, size = [], self.size
        for start, end in itertools.pairwise(self.offsets):
            chunk = (end - start) // (2 * size) if size > 1 else end - start
            for place in (self.rank, 2 * size - 1 - self.rank)[: 2 if size > 1 else 1]:
                held.append((start, start + place * chunk, start + (place + 1) * chunk))
        return held

    @property
    def positions(self) -> Tensor:
        """Positions of the full row that this rank holds, int64 ``[T_local]``, ascending."""
        return self._starts.index_select(0, self.segment) + self.within

    def local(self, segment: Tensor, within: Tensor) -> Tensor:
        """Places in the slice of the tokens ``within`` a ``segment``: int64, -1 where another rank
        holds them, or where ``within`` is negative."""
        held = self._local_starts.index_select(0, segment) + within
        is_held = within >= 0
        if self.size > 1:
            chunk = self._lengths.index_select(0, segment) // (2 * self.size)
            number = within.div(chunk.clamp(min=1), rounding_mode="floor")
            is_first = number == self.rank
            is_held &= is_first | (number == 2 * self.size - 1 - self.rank)
            held -= torch.where(is_first, self.rank, self._skipped_by_second) * chunk
        return held.masked_fill_(~is_held, -1)


class RowIndex(Slice):
    """Where the values of packed rows stand in flat fields of their samples.

    Args:
        totals: tokens of each sample.
        responses: response tokens of each sample.
        offsets: of the segments, of all rows one behind the other.
        segments: the sample laid out in each segment; the number of samples for a row's padding.
        hosts: for each sample the one in whose segment it lies; its own place if it has one.
        size: context-parallel ranks that share the rows.
        rank: this one of them.

    Raises:
        BatchError: a segment cannot be cut.
    """

    def __init__(
        self,
        totals: Span,
        responses: Span,
        offsets: Sequence[int],
        segments: Sequence[int],
        hosts: Sequence[int],
        size: int = 1,
        rank: int = 0,
    ) -> None:
        super().__init__(offsets, size, rank)
        self._totals = totals
        self._segments = torch.tensor(segments, dtype=torch.int64, device="cpu")
        number = {sample: place for place, sample in enumerate(segments)}
        own = torch.tensor([number[host] for host in hosts], dtype=torch.int64, device="cpu")
        self._predicted_segment = own.index_select(0, responses.samples)
        self._predicted_within = predicted_within(totals, responses)
        self._spans: dict[Span, tuple[Tensor, Tensor]] = {}
        self._held: dict[int, tuple[Tensor, Tensor]] = {}

    def places(self, span: Span, later: int = 0) -> Tensor:
        """Places of the values ``later`` tokens on in a field with these rows, int64 ``[T_local]``;
        ``span.end`` where the sample has none."""
        base, left = self._of_span(span)
        return (base + later).masked_fill_(left <= later, span.end)

    def is_real(self, is_padding: Tensor | None = None) -> Tensor:
        """Bool ``[T_local]``: True for tokens, but for those of samples that are ``is_padding``."""
        is_token = self._of_span(self._totals)[1] > 0
        return is_token if is_padding is None else is_token & ~self._of_positions(is_padding)

    def counted(self, later: int) -> Tensor:
        """Place in its sample of the token ``later`` places on, int64 ``[T_local]``; 0 if none."""
        return (self.within + later).masked_fill_(self._of_span(self._totals)[1] <= later, 0)

    def is_beyond(self, later: int) -> Tensor:
        """Bool ``[T_local]``: True where the place ``later`` tokens on is not of the segment."""
        return self.within + later >= self._lengths.index_select(0, self.segment)

    def predicting(self, later: int = 0) -> tuple[Tensor, Tensor]:
        """Response tokens that are predicted ``later`` places behind a position of this slice.

        Returns:
            int64 ``[held]`` places among the rows' response tokens, ascending; those positions.
        """
        if later not in self._held:
            places = self.local(self._predicted_segment, self._predicted_within - later)
            held = (places >= 0).nonzero().squeeze(1)
            self._held[later] = held, places.index_select(0, held)
        return self._held[later]

    def _of_span(self, span: Span) -> tuple[Tensor, Tensor]:
        """At each position the place of its own value, and how many the sample has from there."""
        if span not in self._spans:
            base = self._of_positions(span.starts).add_(self.within)
            self._spans[span] = base, self._of_positions(span.lengths).sub_(self.within)
        return self._spans[span]

    def _of_positions(self, values: Tensor) -> Tensor:
        # The rows' own padding is of no sample.
        of_segments = pad(values, (0, 1)).index_select(0, self._segments)
        return of_segments.index_select(0, self.segment)
