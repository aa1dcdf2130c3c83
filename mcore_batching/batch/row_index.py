"""`RowIndex`: which token of which sample stands at each position of a packed row.

    samples of 3 and 2 tokens, each padded to a multiple of 4, the row to one of 16
    padded_offsets([3, 2], 4, 16)     (0, 4, 8, 16)         the row's own padding is a segment

    Slice(offsets, 2, rank)           row                   rank 0 of 2       rank 1 of 2
    segment                           0 0 0 0 1 1 1 1 2 ..  0 0 1 1 2 2 2 2   0 0 1 1 2 2 2 2
    within                            0 1 2 3 0 1 2 3 0 ..  0 3 0 3 0 1 6 7   1 2 1 2 2 3 4 5

Under context parallelism each segment is cut by itself into 2·cp equal chunks; rank r holds chunks
r and 2·cp−1−r, so that causal attention costs every rank the same. A sample without tokens takes
one alignment unit, since attention kernels break on empty segments.

Every layout of a row is arithmetic on these two: the place of each position's token in a flat field
is the start of its sample there plus its place within the sample. Nothing loops over samples.
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
    """Lengths of samples in flat fields, and where they start; on the host.

    Attributes:
        counts: rows of each sample.
        lengths: the same, int64 ``[samples]``.
        starts: place of each sample's first row, int64 ``[samples]``.
        end: rows of all samples; the place that stands for padding.
    """

    def __init__(self, counts: Sequence[int]) -> None:
        self.counts = list(counts)
        self.lengths = torch.tensor(self.counts, dtype=torch.int64, device="cpu")
        self.starts = self.lengths.cumsum(0) - self.lengths
        self.end = sum(self.counts)

    @functools.cached_property
    def samples(self) -> Tensor:
        """The sample of each row, int64 ``[rows]``."""
        return torch.repeat_interleave(self.lengths, output_size=self.end)

    def places(self, samples: Tensor) -> Tensor:
        """Places of the rows of some samples, one behind the other, and that of padding."""
        lengths = self.lengths.index_select(0, samples)
        ends = lengths.cumsum(0)
        count = int(ends[-1]) if len(ends) else 0
        moved = self.starts.index_select(0, samples) - ends + lengths
        places = torch.arange(count + 1, device="cpu")
        places[:count] += moved.repeat_interleave(lengths, output_size=count)
        places[count] = self.end
        return places


def predicted_within(totals: Span, responses: Span) -> Tensor:
    """Place in its sample at which each response token is predicted, int64 ``[R]``; -1 for the
    first of a sample without a prompt, which nothing predicts."""
    # Response token j of a sample with p prompt tokens is predicted at place p − 1 + j.
    first = totals.lengths - responses.lengths - 1 - responses.starts
    return torch.arange(responses.end, device="cpu") + first.index_select(0, responses.samples)


class Slice:
    """Positions of a context-parallel rank's slice of a row, by segment. Tensors are on the host.

    Attributes:
        offsets: of the full row's segments ``[segments + 1]``.
        num_local: tokens of the slice, T_local.
        segment: int64 ``[T_local]``, in which segment each position lies.
        within: int64 ``[T_local]``, which place of that segment it is.

    Raises:
        BatchError: the rank is none of the size's, or a segment cannot be cut.
    """

    def __init__(self, offsets: Sequence[int], size: int = 1, rank: int = 0) -> None:
        self.offsets = tuple(offsets)
        require_cut(self.offsets, size, rank)
        self.size, self.rank = size, rank
        self._starts = torch.tensor(self.offsets, device="cpu")
        self._lengths = self._starts.diff()
        self._local_starts = self._starts if size == 1 else self._starts // size
        local = self._local_starts.diff()
        self.num_local = self.offsets[-1] // size
        self.segment = torch.repeat_interleave(local, output_size=self.num_local)
        self.within = torch.arange(self.num_local, device="cpu")
        self.within -= self._local_starts.index_select(0, self.segment)
        if size > 1:
            chunk = local.index_select(0, self.segment) // 2
            # Rank r holds chunks r and 2·size − 1 − r, one behind the other.
            skipped = torch.where(self.within < chunk, rank, 2 * (size - 1) - rank)
            self.within += skipped * chunk

    @property
    def positions(self) -> Tensor:
        """Positions of the full row that this rank holds, int64 ``[T_local]``, ascending."""
        return self.full(self.segment, self.within)

    def full(self, segment: Tensor, within: Tensor) -> Tensor:
        """Positions of the full row of the tokens ``within`` a ``segment``."""
        return self._starts.index_select(0, segment) + within

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
            held -= torch.where(is_first, self.rank, 2 * (self.size - 1) - self.rank) * chunk
        return held.masked_fill_(~is_held, -1)


class RowIndex(Slice):
    """Where a row's values stand in flat fields of its samples.

    Args:
        totals: tokens of each sample.
        responses: response tokens of each sample.
        hosts: for each sample the one in whose segment it lies; its own place if it has one.
        sample_alignment_tokens: each segment is padded to a multiple of this.
        row_alignment_tokens: the row is padded to a multiple of this.
        size: context-parallel ranks that share the row.
        rank: this one of them.

    Raises:
        BatchError: the row is too long, or cannot be cut; two samples train the same token.
    """

    def __init__(
        self,
        totals: Span,
        responses: Span,
        hosts: Sequence[int],
        *,
        sample_alignment_tokens: int = 1,
        row_alignment_tokens: int = 1,
        size: int = 1,
        rank: int = 0,
    ) -> None:
        # A sample in another's segment is not laid out: the row holds its tokens once.
        own = [i for i, host in enumerate(hosts) if host == i]
        self.lengths = [totals.counts[i] for i in own]
        offsets = padded_offsets(self.lengths, sample_alignment_tokens, row_alignment_tokens)
        super().__init__(offsets, size, rank)
        self._own = None if len(own) == len(hosts) else torch.tensor(own, device="cpu")
        self.hosts = tuple(hosts)
        self._totals, self.responses = totals, responses
        self._spans: dict[Span, tuple[Tensor, Tensor]] = {}
        samples = responses.samples
        self.predicted_within = predicted_within(totals, responses)
        self.predicted_segment = samples
        if self._own is not None:
            number = {host: place for place, host in enumerate(own)}
            segments = torch.tensor([number[host] for host in hosts], device="cpu")
            self.predicted_segment = segments.index_select(0, samples)
            self._require_unique()

    def places(self, span: Span, later: int = 0) -> Tensor:
        """Places of the values ``later`` tokens on in a field with these rows, int64 ``[T_local]``;
        ``span.end`` where the sample has none."""
        base, left = self._of_span(span)
        return (base + later).masked_fill_(left <= later, span.end)

    def is_real(self, samples: Tensor | None = None) -> Tensor:
        """Bool ``[T_local]``: True for tokens, of the ``samples`` for which that is True."""
        if samples is not None:
            return self.within < self._of_positions(self._totals.lengths * samples)
        return self._of_span(self._totals)[1] > 0

    def counted(self, later: int) -> Tensor:
        """Place in its sample of the token ``later`` places on, int64 ``[T_local]``; 0 if none."""
        return (self.within + later).masked_fill_(self._of_span(self._totals)[1] <= later, 0)

    def is_beyond(self, later: int) -> Tensor:
        """Bool ``[T_local]``: True where the place ``later`` tokens on is not of the segment."""
        return self.within + later >= self._lengths.index_select(0, self.segment)

    def _of_span(self, span: Span) -> tuple[Tensor, Tensor]:
        """At each position the place of its own value, and how many the sample has from there."""
        if span not in self._spans:
            base = self._of_positions(span.starts).add_(self.within)
            self._spans[span] = base, self._of_positions(span.lengths).sub_(self.within)
        return self._spans[span]

    def predicting(self, later: int = 0) -> tuple[Tensor, Tensor]:
        """Response tokens that are predicted ``later`` places behind a position of this slice.

        Returns:
            int64 ``[held]`` places among the row's response tokens, ascending; those positions.
        """
        places = self.local(self.predicted_segment, self.predicted_within - later)
        held = (places >= 0).nonzero().squeeze(1)
        return held, places.index_select(0, held)

    def _of_positions(self, values: Tensor) -> Tensor:
        own = values if self._own is None else values[self._own]
        # The row's own padding is a segment without a sample.
        missing = len(self._lengths) - len(own)
        return (pad(own, (0, missing)) if missing else own).index_select(0, self.segment)

    def _require_unique(self) -> None:
        # Gradients of tokens that are predicted at the same position would overwrite each other.
        positions = self.full(self.predicted_segment, self.predicted_within)
        count = torch.bincount(positions[self.predicted_within >= 0], minlength=self.offsets[-1])
        twice = (count > 1).nonzero()
        if twice.numel():
            raise BatchError(
                f"two samples train the token predicted at position {int(twice[0])}; end a "
                "response before the next one of its host begins, or set hosts to None"
            )


def require_cut(offsets: Sequence[int], size: int, rank: int) -> None:
    """Refuse a rank that is none of the size's, and segments that cannot be cut for it."""
    if not 0 <= rank < size:
        raise BatchError(f"expected a rank below context_parallel_size={size}, got {rank}")
    for start, end in itertools.pairwise(offsets) if size > 1 else ():
        chunk, rest = divmod(end - start, 2 * size)
        if rest:
            raise BatchError(
                f"{end - start} tokens cannot be cut into {2 * size} equal chunks "
                f"(2 * context_parallel_size); pad them to {(chunk + 1) * 2 * size}"
            )


def held_chunks(offsets: Sequence[int], size: int, rank: int) -> list[tuple[int, int, int]]:
    """Positions at which the segment starts, and at which the chunk starts and ends, of each chunk
    that a rank holds; of one rank each segment is one."""
    require_cut(offsets, size, rank)
    if size == 1:
        return [(start, start, end) for start, end in itertools.pairwise(offsets)]
    held = []
    for start, end in itertools.pairwise(offsets):
        chunk = (end - start) // (2 * size)
        for place in (rank, 2 * size - 1 - rank):
            held.append((start, start + place * chunk, start + (place + 1) * chunk))
    return held
