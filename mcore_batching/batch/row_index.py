"""`RowIndex`: which token of which sample stands at each position of packed rows.

    samples of 3 and 2 tokens, each padded to a multiple of 4, the row to one of 16
    padded_offsets([3, 2], 4, 16)     (0, 4, 8, 16)         the row's own padding is a segment

    Slice(offsets, 2, rank)           row                   rank 0 of 2       rank 1 of 2
    segment                           0 0 0 0 1 1 1 1 2 ..  0 0 1 1 2 2 2 2   0 0 1 1 2 2 2 2
    within                            0 1 2 3 0 1 2 3 0 ..  0 3 0 3 0 1 6 7   1 2 1 2 2 3 4 5

Under context parallelism each segment is cut by itself into 2·cp equal chunks; rank r holds chunks
r and 2·cp−1−r, so that causal attention costs every rank the same. A sample without tokens takes
one alignment unit, since attention kernels break on empty segments.

Samples that begin alike make a row of nodes (`planning.forest`), each with the tokens of one
sample from some place on. A sample that only begins another is no segment of its own. Where samples
branch, the row is one segment for all but attention, and nodes are not padded.

    nodes            a b c | d e f | d g h i      of samples 0, 0, 1
    place in sample  0 1 2   3 4 5   3 4 5 6

Every layout of a row is arithmetic on these: the place of each position's token in a flat field is
the start of its sample there plus its place within the sample. Loops run over nodes, never over
tokens, and rows one behind the other are indexed as one long row.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from array import array
from collections.abc import Sequence
from itertools import accumulate, chain, pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from mcore_batching.batch.errors import BatchError
from mcore_batching.planning.forest import Forest
from mcore_batching.planning.integers import round_up


def padded_offsets(
    total_lengths: Sequence[int], sample_alignment_tokens: int, row_alignment_tokens: int
) -> tuple[int, ...]:
    """Offsets of the padded samples in a row, its own padding as one more segment; a `BatchError`
    if it is too long for int32 offsets."""
    unit = sample_alignment_tokens
    offsets = [*accumulate([-(-n // unit) * unit or unit for n in total_lengths], initial=0)]
    end = round_up(offsets[-1], row_alignment_tokens)
    if end >= 2**31:
        raise BatchError(
            f"a row may have at most {2**31 - 1} tokens, got {end}; pack fewer samples, or lower "
            "row_alignment_tokens"
        )
    return (*offsets, end) if end > offsets[-1] else tuple(offsets)


def integers(values: Sequence[int]) -> Tensor:
    """Integers as an int64 tensor on the host, in a fifth of the time that `torch.tensor` takes."""
    if not len(values):
        return torch.zeros(0, dtype=torch.int64, device="cpu")
    return torch.frombuffer(array("q", values), dtype=torch.int64)


class Span:
    """Places of samples' rows in a flat field; on the host.

    Attributes:
        counts, lengths: rows of each sample, as a list and as int64 ``[samples]``.
        starts: place of each sample's first row in the field, int64 ``[samples]``.
        end: the field's place that stands for padding.
        firsts: rows of the samples before each one, int64 ``[samples]``.
        total: rows of all these samples.
    """

    def __init__(self, counts: list[int], starts: Tensor | None = None, end: int = -1) -> None:
        self.counts, self.lengths, self.total = counts, integers(counts), sum(counts)
        self.firsts = self.lengths.cumsum(0) - self.lengths
        # Without starts: these samples are all of the field's.
        self.starts, self.end = (self.firsts, self.total) if starts is None else (starts, end)

    @functools.cached_property
    def samples(self) -> Tensor:
        """The sample of each row, int64 ``[total]``."""
        return torch.repeat_interleave(self.lengths, output_size=self.total)

    @functools.cached_property
    def within(self) -> Tensor:
        """Place of each row in its sample, int64 ``[total]``."""
        rows = torch.arange(self.total, device="cpu")
        return rows - self.firsts.index_select(0, self.samples)

    @functools.cached_property
    def places(self) -> Tensor:
        """Places of all samples' rows, and that of padding, int64 ``[total + 1]``."""
        moved = (self.starts - self.firsts).index_select(0, self.samples)
        return pad(torch.arange(self.total, device="cpu") + moved, (0, 1), value=self.end)


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
        self.offsets, self.size, self.rank = offsets, size, rank
        if not 0 <= rank < size:
            raise BatchError(f"expected a rank below context_parallel_size={size}, got {rank}")
        self.num_local = offsets[-1] // size
        self._segments = Span([end - start for start, end in pairwise(offsets)])
        for length in self._segments.counts if size > 1 else ():
            chunk, rest = divmod(length, 2 * size)
            if rest:
                raise BatchError(
                    f"{length} tokens cannot be cut into {2 * size} equal chunks "
                    f"(2 * context_parallel_size); pad them to {(chunk + 1) * 2 * size}"
                )

    @property
    def chunks(self) -> list[tuple[int, int, int]]:
        """Positions at which the segment starts, and at which the chunk starts and ends, of each
        chunk of this slice; of one rank each segment is one."""
        held = [(start, start, end) for start, end in pairwise(self.offsets) if self.size == 1]
        for start, end in pairwise(self.offsets) if self.size > 1 else ():
            chunk = (end - start) // (2 * self.size)
            for first in (start + self.rank * chunk, end - (self.rank + 1) * chunk):
                held.append((start, first, first + chunk))
        return held

    @functools.cached_property
    def positions(self) -> Tensor:
        """Positions of the full row that this rank holds, int64 ``[T_local]``, ascending."""
        if self.size == 1:
            return torch.arange(self.num_local, device="cpu")
        firsts, ends = zip(*((first, end) for _, first, end in self.chunks), strict=True)
        return Span([*map(operator.sub, ends, firsts)], integers(firsts)).places[:-1]

    @functools.cached_property
    def segment(self) -> Tensor:
        """The segment of each position, int64 ``[T_local]``."""
        lengths = self._segments.lengths
        own = lengths if self.size == 1 else lengths // self.size
        return torch.repeat_interleave(own, output_size=self.num_local)

    @functools.cached_property
    def within(self) -> Tensor:
        """Place of each position in its segment, int64 ``[T_local]``."""
        return self.positions - self._segments.firsts.index_select(0, self.segment)

    def local(self, positions: Tensor) -> Tensor:
        """Places in the slice of positions of the full row: int64, -1 where another rank holds
        them, or where a position is -1."""
        return positions if self.size == 1 else self._places.index_select(0, positions + 1)

    @functools.cached_property
    def _places(self) -> Tensor:
        """Place in the slice of each position of the full row, behind a -1."""
        places = torch.full((self.offsets[-1] + 1,), -1, dtype=torch.int64, device="cpu")
        places[self.positions + 1] = torch.arange(self.num_local, device="cpu")
        return places


@dataclasses.dataclass(frozen=True)
class Nodes:
    """Stretches of samples, one behind the other, that make up a row.

    Attributes:
        samples: place of the sample that has a node's tokens [nodes]; the number of samples for a
            row's padding.
        starts: place in that sample of a node's first token [nodes].
        parents: the node before each one [nodes]; -1 if it begins a sample.
        offsets: positions of the full row at which nodes start, and at which the last one ends
            [nodes + 1]; padding of a node's own is part of it.
        paths: the nodes of each sample, from its first token on; none for one without tokens.
        segments: offsets of what context parallelism cuts by itself, and positions count in: the
            nodes, or the row if it has branches.
    """

    samples: tuple[int, ...]
    starts: tuple[int, ...]
    parents: tuple[int, ...]
    offsets: tuple[int, ...]
    paths: tuple[tuple[int, ...], ...]
    segments: tuple[int, ...]

    @property
    def has_branches(self) -> bool:
        """True if a node has a parent."""
        return self.segments != self.offsets

    @property
    def is_shared(self) -> bool:
        """True if samples have tokens in common."""
        # Each node is on a path, but for the row's own padding.
        padding = self.samples.count(len(self.paths))
        return sum(map(len, self.paths)) > len(self.samples) - padding

    @classmethod
    def of(
        cls,
        total_lengths: Sequence[int],
        samples: Sequence[int],
        forest: Forest | None,
        sample_alignment_tokens: int,
        row_alignment_tokens: int,
    ) -> Nodes:
        """The nodes of a row of some samples, numbered as they are in the row.

        Args:
            total_lengths: tokens of each sample of which these are some.
            samples: those of the row, whole trees.
            forest: of all samples; None: they have nothing in common.
            sample_alignment_tokens: each sample is padded to a multiple of this, or the row if it
                has branches.
            row_alignment_tokens: the row is padded to a multiple of this.

        Raises:
            BatchError: the row is too long.
        """
        alignments = sample_alignment_tokens, row_alignment_tokens
        owners, lengths = [*range(len(samples))], [total_lengths[sample] for sample in samples]
        starts, parents = [0] * len(samples), [-1] * len(samples)
        paths: list[tuple[int, ...]] = [(own,) for own in owners]
        if forest is not None:
            of_samples = [forest.path(sample) for sample in samples]
            number = {node: own for own, node in enumerate(sorted({*chain(*of_samples)}))}
            nodes = [forest.nodes[node] for node in number]
            place = {sample: own for own, sample in enumerate(samples)}
            owners, starts = [place[node.sample] for node in nodes], [node.start for node in nodes]
            parents = [number.get(node.parent, -1) for node in nodes]
            lengths = [node.end - node.start for node in nodes]
            paths = [tuple([number[node] for node in path]) for path in of_samples]
        has_branches = max(parents, default=-1) >= 0
        if has_branches:
            offsets = (*accumulate(lengths, initial=0),)
            end = padded_offsets([offsets[-1]], *alignments)[-1]
            offsets += (end,) if end > offsets[-1] else ()
        else:
            # A sample without tokens, of which a forest has no node, takes an alignment unit.
            for own in [own for own, path in enumerate(paths) if not path]:
                paths[own] = (len(owners),)
                owners, starts, parents = [*owners, own], [*starts, 0], [*parents, -1]
                lengths.append(0)
            offsets = padded_offsets(lengths, *alignments)
        if len(offsets) - 1 > len(owners):  # the row's own padding
            owners, starts, parents = [*owners, len(samples)], [*starts, 0], [*parents, -1]
        segments = (0, offsets[-1]) if has_branches else offsets
        return cls(tuple(owners), tuple(starts), tuple(parents), offsets, tuple(paths), segments)


class RowIndex(Slice):
    """Places of the values of packed rows, one behind the other, in flat fields of their samples.

    Args:
        totals: tokens of each sample.
        responses: response tokens of each sample.
        rows: the nodes of each row.
        size: context-parallel ranks that share the rows.
        rank: this one of them.

    Raises:
        BatchError: a segment cannot be cut.
    """

    def __init__(
        self, totals: Span, responses: Span, rows: Sequence[Nodes], size: int = 1, rank: int = 0
    ) -> None:
        self._totals, self._responses = totals, responses
        self._has_branches = any(row.has_branches for row in rows)
        samples, starts, path, counts = list[int](), list[int](), list[int](), list[int]()
        offsets, segments, sample = [0], [0], 0
        for row in rows:
            node, start, padding = len(samples), offsets[-1], len(row.paths)
            # Place 0 stands for no sample, of which the row's own padding is.
            samples += [0 if i == padding else sample + i + 1 for i in row.samples]
            sample += padding
            path += [node + each for nodes in row.paths for each in nodes]
            offsets += [start + offset for offset in row.offsets[1:]]
            if self._has_branches:
                starts += row.starts
                counts += map(len, row.paths)
                segments += [start + offset for offset in row.segments[1:]]
        super().__init__(segments if self._has_branches else offsets, size, rank)
        self._samples, self._path, self._offsets = map(integers, (samples, path, offsets))
        # Of branches: places in their samples at which nodes start, and the nodes of each sample.
        self._first, self._counts = integers(starts), integers(counts)
        self._spans: dict[Span, tuple[Tensor, Tensor]] = {}
        self._predicting: dict[int, tuple[Tensor, Tensor]] = {}

    def places(self, span: Span, later: int = 0) -> Tensor:
        """Places of the values ``later`` tokens on in a field with these rows, int64 ``[T_local]``;
        ``span.end`` where the sample has none."""
        base, left = self._of_span(span)
        return (base + later if later else base).masked_fill(left <= later, span.end)

    def is_absent(self, later: int = 0) -> Tensor:
        """Bool ``[T_local]``: True where the sample has no token ``later`` places on."""
        return self._of_span(self._totals)[1] <= later

    def is_padding(self, is_fabricated: Tensor) -> Tensor:
        """Bool ``[T_local]``: True for padding, and for all tokens of ``is_fabricated`` samples."""
        return self.is_absent() | self._of_positions(is_fabricated)

    def counted(self, later: int) -> Tensor:
        """Place in its sample of the token ``later`` places on, int64 ``[T_local]``; 0 if none."""
        return (self._depth + later if later else self._depth).masked_fill(self.is_absent(later), 0)

    def is_beyond(self, later: int) -> Tensor:
        """Bool ``[T_local]``: True where the place ``later`` tokens on is neither of the sample nor
        of its node's padding."""
        node, within = self._node
        is_outside = within + later >= self._offsets.diff().index_select(0, node)
        return is_outside & self.is_absent(later)

    def predicting(self, later: int = 0) -> tuple[Tensor, Tensor]:
        """Response tokens that are predicted ``later`` places behind a position of this slice.

        Returns:
            int64 ``[held]`` places among the rows' response tokens, ascending; those positions,
            some of them several times where samples share tokens.
        """
        if later not in self._predicting:
            totals, responses = self._totals, self._responses
            # Response token j of a sample with p prompt tokens is predicted at place p - 1 + j.
            first = totals.lengths - responses.lengths - 1 - later
            within = first.index_select(0, responses.samples) + responses.within
            node = self._path.index_select(0, self._on_path(within))
            starts = self._offsets[:-1] - self._first if self._has_branches else self._offsets
            at = starts.index_select(0, node) + within
            if self.size == 1 and bool((first >= 0).all()):  # as in most rows
                self._predicting[later] = torch.arange(len(at), device="cpu"), at
            else:
                places = self.local(at.masked_fill_(within < 0, -1))
                held = (places >= 0).nonzero().squeeze(1)
                self._predicting[later] = held, places.index_select(0, held)
        return self._predicting[later]

    def _on_path(self, within: Tensor) -> Tensor:
        """Place among all samples' paths of the node that has a place within the sample of each
        response token, int64 ``[R]``."""
        if not self._has_branches:  # of each sample one node
            return self._responses.samples
        # Sorted by sample and by start: the last node that starts at or before the place.
        scale = int(self._totals.lengths.max()) + 1
        starts = self._first.index_select(0, self._path)
        of_path = torch.repeat_interleave(self._counts) * scale + starts
        wanted = self._responses.samples * scale + within.clamp(min=0)
        return torch.searchsorted(of_path, wanted, right=True) - 1

    @functools.cached_property
    def _node(self) -> tuple[Tensor, Tensor]:
        """The node of each position, and its place within it; both int64 ``[T_local]``."""
        if not self._has_branches:
            return self.segment, self.within
        of_row = torch.repeat_interleave(self._offsets.diff(), output_size=self.offsets[-1])
        node = of_row.index_select(0, self.positions)
        return node, self.positions - self._offsets.index_select(0, node)

    @functools.cached_property
    def _depth(self) -> Tensor:
        """Place of each position in its sample, int64 ``[T_local]``."""
        node, within = self._node
        return within + self._first.index_select(0, node) if self._has_branches else within

    def _of_span(self, span: Span) -> tuple[Tensor, Tensor]:
        """At each position the place of its own value, and how many the sample has from there."""
        if span not in self._spans:
            base = self._of_positions(span.starts).add_(self._depth)
            self._spans[span] = base, self._of_positions(span.lengths).sub_(self._depth)
        return self._spans[span]

    def _of_positions(self, values: Tensor) -> Tensor:
        of_nodes = pad(values, (1, 0)).index_select(0, self._samples)
        return of_nodes.index_select(0, self._node[0])
