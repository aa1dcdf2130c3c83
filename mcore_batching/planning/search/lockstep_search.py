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
    Profile,
    Shape,
    fill_slots,
    line,
    staircase,
    steps_of_counts,
)

# Margins above its share of the step to which a slot's micro-batches may be filled, and rise and
# fall in stages (in groups of slots, under the interleaved schedule); the first of each for every
# number of slots. One margin alone ends steps 0.02 % to 0.13 % later on average, up to 1 % in the
# worst of ten.
MARGINS = (1.02, 1.0, 1.05)
TAPERS = ((1, 1), (2, 2), (1, 2), (0, 0), (1, 3))

STEPS_MADE = 16
"""Of so many shapes, the best, steps are made, two of each; of others only where tokens in flight
are bounded. With 3, steps end up to 1.4 % later."""

Row = list[tuple[float, list[int]]]
"""The micro-batches of one slot, one per rank at most: cost of the samples, and these."""


class LockstepShapes:
    """The family of shapes for ranks in lockstep.

    Args:
        objective: of the step.
    """

    # A shape is judged by a step made of it, so nothing is kept for making more.
    kept_after_judging = 0.0
    kept_for_moves = 0.0
    shapes_that_judge = 1

    def __init__(self, objective: Objective) -> None:
        self._objective = objective
        problem = objective.problem
        self._folded = folded_ranks(problem)
        self._cheapest_first = sorted(
            range(problem.num_samples), key=lambda i: (problem.costs[i], problem.tokens[i], i)
        )
        self._made: dict[Shape, tuple[float, list[Row]]] = {}

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
        dims = self._objective.problem.dims
        stages = dims.pipeline_parallel
        unit = 1 if dims.virtual_pipeline > 1 else stages
        return [
            Shape(count, min(rise * unit, count), min(fall * unit, count), margin=margin)
            for rise, fall in (TAPERS if stages > 1 else ((0, 0),))
            for margin in MARGINS
        ]

    def _sizes(self, shape: Shape, count: int) -> Profile:
        """Relative sizes of so many slots of a shape."""
        dims = self._objective.problem.dims
        if dims.virtual_pipeline > 1:
            return staircase(count, dims.group_size, shape.rise, shape.fall)
        return line(count, min(shape.rise, count), min(shape.fall, count))

    def last_resort(self) -> list[Shape]:
        """Shapes that are only come to if nothing before them keeps to a bound on tokens in
        flight: even ones, the smallest micro-batches first."""
        if self._objective.max_inflight_tokens is None:
            return []
        return [Shape(count, margin=MARGINS[0]) for count in reversed(self.counts())]

    def judge(self, shape: Shape, *, quick: bool = False) -> float | None:
        """End of a step of a shape, of another number of slots if samples fit no better."""
        del quick
        if shape not in self._made:
            problem = self._objective.problem
            share = shape.margin * ordered_sum(problem.costs) / problem.dims.data_parallel
            sizes = self._sizes(shape, shape.num_slots)
            whole = ordered_sum(sizes)
            limits = [share * size / whole for size in sorted(sizes, reverse=True)]
            rows = self._evened(self._rows(limits))
            rows = _arranged(rows, self._sizes(shape, len(rows)))
            fixed = problem.cost_model.per_micro_batch
            end = self._objective.end_of([fixed + max(row)[0] if row else fixed for row in rows])
            self._made[shape] = end, rows
        return self._made[shape][0]

    def steps(self, shape: Shape, number: int) -> Iterator[Candidate]:
        """Steps of one shape: that which it was judged by, and of ranks that fill slots of the same
        relative sizes by themselves.

        Args:
            shape: the shape.
            number: shapes before it.
        """
        objective = self._objective
        if number >= STEPS_MADE and objective.max_inflight_tokens is None:
            return
        self.judge(shape)
        yield objective.candidate(self._onto_ranks(self._made[shape][1]))
        sizes = self._sizes(shape, shape.num_slots)
        ranks = []
        for samples in self._folded:
            slots = fill_slots(samples, sizes, objective, overhead=False)
            if slots is None:
                return
            ranks.append(slots)
        yield objective.candidate(ranks)

    def _rows(self, limits: Sequence[float]) -> list[Row]:
        """Slots of micro-batches, costliest slot first; the last may have fewer than one per rank.

        Args:
            limits: cost up to which a slot's micro-batches are filled, unless its costliest sample
                costs more [slots], descending; the last goes for all further slots.
        """
        problem = self._objective.problem
        self._objective.effort -= 4 * problem.num_samples
        ranks, tokens = problem.dims.data_parallel, problem.tokens
        left = self._cheapest_first[:]
        costs = [problem.costs[sample] for sample in left]
        sizes = [tokens[sample] for sample in left]
        rows: list[Row] = []
        while left:
            level = max(costs[-1], limits[min(len(rows), len(limits) - 1)])
            seeds = list(zip(costs[-ranks:], left[-ranks:], strict=True))
            del costs[-ranks:], sizes[-ranks:], left[-ranks:]
            row: Row = []
            for cost, seed in seeds:
                samples, room = [seed], problem.capacity - tokens[seed]
                most = 1 if seed in problem.oversize else problem.max_samples
                while len(samples) < most:
                    best = min(bisect_right(costs, level - cost), bisect_right(sizes, room)) - 1
                    while best >= 0 and sizes[best] > room:
                        best -= 1  # where costs do not grow with tokens
                    if best < 0:
                        break
                    cost += costs.pop(best)
                    room -= sizes.pop(best)
                    samples.append(left.pop(best))
                row.append((cost, samples))
            rows.append(row)
        return rows

    def _evened(self, rows: list[Row]) -> list[Row]:
        """As many slots as the schedule runs, every one full if there are samples enough."""
        problem = self._objective.problem
        ranks = problem.dims.data_parallel
        bins = [each for row in rows for each in row]
        count = problem.dims.round_up_num_microbatches(-(-len(bins) // ranks))
        if len(bins) < count * ranks:
            split = split_until(
                [sorted(samples) for _, samples in bins], count * ranks, self._weight
            )
            bins = sorted((-self._weight(samples), samples) for samples in split)
            bins = [(-weight, samples) for weight, samples in bins]
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
            lightest = sorted(range(len(ranks)), key=loads.__getitem__)
            heaviest = sorted(row, key=lambda each: -each[0])
            for rank, (weight, samples) in zip(lightest, heaviest, strict=False):
                ranks[rank].append(samples)
                loads[rank] += weight
            for rank in lightest[len(row) :]:
                ranks[rank].append([])
        return [_last_is_real(slots) for slots in ranks]

    def _weight(self, samples: Sequence[int]) -> float:
        return ordered_sum(self._objective.problem.costs[sample] for sample in samples)


def _arranged(rows: list[Row], sizes: Profile) -> list[Row]:
    """Slots, given costliest first, where a profile has its larger and smaller ones, of equals the
    costliest in the middle."""
    arranged, count = rows[:], len(rows)
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
