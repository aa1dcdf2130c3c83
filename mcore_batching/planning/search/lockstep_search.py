"""Shapes for expert parallelism, where every slot waits for its slowest rank.

Micro-batches are made slot by slot: the costliest samples left open one slot's micro-batches, one
on each rank, and smaller samples fill all of them up to the costliest, or to the slot's share of
the step where that is more. A slot then loses only the little that no sample fits into.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

from mcore_batching.planning.cost import ordered_sum
from mcore_batching.planning.placement import split_until
from mcore_batching.planning.search.objective import Candidate, Objective, Slots
from mcore_batching.planning.search.pipeline_search import folded_ranks
from mcore_batching.planning.search.profiles import (
    MOST_SLOTS_PER_STAGE,
    Shape,
    fill_slots,
    line,
    steps_of_counts,
)

# Margins above its share of the step to which a slot's micro-batches may be filled, and rise and
# fall in stages; the first of each for every number of slots. One margin alone ends steps 0.02 % to
# 0.13 % later on average, up to 1 % in the worst of ten.
MARGINS = (1.02, 1.0, 1.05)
TAPERS = ((1, 1), (2, 2), (1, 2), (0, 0), (1, 3))

Row = list[list[int]]
"""The micro-batches of one slot, one per rank at most."""


class LockstepShapes:
    """The family of shapes for ranks in lockstep.

    Args:
        objective: of the step.
    """

    # A shape is judged by the steps made of it, so nothing is kept for making them.
    kept_after_judging = 0.0
    kept_for_moves = 0.0
    shapes_that_judge = 1

    def __init__(self, objective: Objective) -> None:
        self._objective = objective
        self._folded = folded_ranks(objective.problem)
        self._made: dict[Shape, list[Candidate]] = {}

    def counts(self) -> list[int]:
        """Numbers of slots to try, from the fewest that can hold the samples."""
        problem = self._objective.problem
        dims = problem.dims
        count = dims.round_up_num_microbatches(-(-problem.fewest_rows // dims.data_parallel))
        samples_per_rank = -(-problem.num_samples // dims.data_parallel)
        useful = min(samples_per_rank, count + 4)
        if dims.pipeline_parallel > 1:
            useful = min(samples_per_rank, MOST_SLOTS_PER_STAGE * dims.pipeline_parallel)
        if self._objective.max_inflight_tokens is not None:
            useful = samples_per_rank
        return steps_of_counts(count, max(useful, count), dims)

    def shapes(self, count: int) -> list[Shape]:
        """Shapes of so many slots, the one that judges the number first."""
        stages = self._objective.problem.dims.pipeline_parallel
        return [
            Shape(count, min(rise * stages, count), min(fall * stages, count), margin=margin)
            for rise, fall in (TAPERS if stages > 1 else ((0, 0),))
            for margin in MARGINS
        ]

    def last_resort(self) -> list[Shape]:
        """Shapes that are only come to if nothing before them keeps to a bound on tokens in
        flight: even ones, the smallest micro-batches first."""
        if self._objective.max_inflight_tokens is None:
            return []
        return [Shape(count, margin=MARGINS[0]) for count in reversed(self.counts())]

    def judge(self, shape: Shape, *, quick: bool = False) -> float | None:
        """End of the best step of a shape."""
        del quick
        if shape in self._made:
            return self._made[shape][0].end
        made = [self._objective.candidate(self._laid_out(shape))]
        if shape.margin == MARGINS[0]:
            made += map(self._objective.candidate, self._rank_by_rank(shape))
        self._made[shape] = sorted(made, key=lambda candidate: candidate.end)
        return self._made[shape][0].end

    def steps(self, shape: Shape, number: int) -> list[Candidate]:
        """Steps of one shape, best first: those that it was judged by.

        Args:
            shape: the shape.
            number: shapes before it.
        """
        del number
        if shape not in self._made:
            self.judge(shape)
        return self._made[shape]

    def _laid_out(self, shape: Shape) -> list[Slots]:
        """A step of about this shape; of another number of slots if samples fit no better."""
        problem = self._objective.problem
        share = shape.margin * ordered_sum(problem.costs) / problem.dims.data_parallel
        sizes = line(shape.num_slots, shape.rise, shape.fall)
        whole = ordered_sum(sizes)
        limits = [share * size / whole for size in sorted(sizes, reverse=True)]
        rows = self._evened(self._rows(limits))
        return self._onto_ranks(_arranged(rows, shape.rise, shape.fall))

    def _rank_by_rank(self, shape: Shape) -> Iterator[list[Slots]]:
        """The step of ranks that fill slots of the same relative sizes by themselves; nothing if
        the samples of some do not fit."""
        sizes = line(shape.num_slots, shape.rise, shape.fall)
        ranks = []
        for samples in self._folded:
            slots = fill_slots(samples, sizes, self._objective, overhead=False)
            if slots is None:
                return
            ranks.append(slots)
        yield ranks

    def _rows(self, limits: Sequence[float]) -> list[Row]:
        """Slots of micro-batches, costliest slot first; the last may have fewer than one per rank.

        Args:
            limits: cost up to which a slot's micro-batches are filled, unless its costliest sample
                costs more [slots], descending; the last goes for all further slots.
        """
        problem = self._objective.problem
        self._objective.effort -= 4 * problem.num_samples
        costs, tokens, ranks = problem.costs, problem.tokens, problem.dims.data_parallel
        left = sorted((cost, sample) for sample, cost in enumerate(costs))
        rows: list[Row] = []
        while left:
            seeds = [left.pop() for _ in range(min(ranks, len(left)))]
            level = max(seeds[0][0], limits[min(len(rows), len(limits) - 1)])
            row = [[sample] for _, sample in seeds]
            by_seed = sorted(zip(row, seeds, strict=True), key=lambda each: each[1])
            for samples, (cost, seed) in by_seed:
                held = tokens[seed]
                most = 1 if seed in problem.oversize else problem.max_samples
                while left and len(samples) < most:
                    best = bisect_right(left, (level - cost, len(costs))) - 1
                    while best >= 0 and held + tokens[left[best][1]] > problem.capacity:
                        best -= 1
                    if best < 0:
                        break
                    more, sample = left.pop(best)
                    samples.append(sample)
                    cost += more
                    held += tokens[sample]
            rows.append(row)
        return rows

    def _evened(self, rows: list[Row]) -> list[Row]:
        """As many slots as the schedule runs, every one full if there are samples enough."""
        problem = self._objective.problem
        ranks = problem.dims.data_parallel
        bins = [sorted(samples) for row in rows for samples in row]
        count = problem.dims.round_up_num_microbatches(-(-len(bins) // ranks))
        if len(bins) < count * ranks:
            bins = split_until(bins, count * ranks, self._weight)
            bins.sort(key=lambda samples: (-self._weight(samples), samples))
        return [bins[first : first + ranks] for first in range(0, count * ranks, ranks)]

    def _onto_ranks(self, rows: list[Row]) -> list[Slots]:
        """Each slot's micro-batches dealt out, the costliest to the rank with the least work so
        far.

        Slots with too few micro-batches leave placeholders, on the ranks with the most work; a
        placeholder is moved before a rank's last real micro-batch.
        """
        ranks: list[Slots] = [[] for _ in range(self._objective.problem.dims.data_parallel)]
        loads = [0.0] * len(ranks)
        for row in rows:
            lightest = sorted(range(len(ranks)), key=lambda rank: (loads[rank], rank))
            weights = [self._weight(samples) for samples in row]
            heaviest = sorted(range(len(row)), key=lambda index: (-weights[index], index))
            for place, rank in enumerate(lightest):
                if place < len(row):
                    ranks[rank].append(row[heaviest[place]])
                    loads[rank] += weights[heaviest[place]]
                else:
                    ranks[rank].append([])
        return [_last_is_real(slots) for slots in ranks]

    def _weight(self, samples: Sequence[int]) -> float:
        return ordered_sum(self._objective.problem.costs[sample] for sample in samples)


def _arranged(rows: list[Row], rise: int, fall: int) -> list[Row]:
    """Slots, given costliest first, where a profile has its larger and smaller ones."""
    count = len(rows)
    sizes = line(count, min(rise, count), min(fall, count))
    arranged = rows[:]
    places = sorted(range(count), key=lambda place: (-sizes[place], place))
    for place, row in zip(places, rows, strict=True):
        arranged[place] = row
    return arranged


def _last_is_real(slots: Slots) -> Slots:
    if slots[-1] or not any(slots):
        return slots
    last = max(number for number, samples in enumerate(slots) if samples)
    slots[last], slots[-1] = slots[-1], slots[last]
    return slots
