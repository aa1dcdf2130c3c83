"""Shapes for ranks that run by themselves, each in its own pipeline.

A rank's samples are laid out to a profile (`profiles`). Ranks are evened out by the end of their
simulated step instead of by their sums, since the rank that holds a very long sample waits for it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence

from mcore_batching.planning.cost import ordered_sum
from mcore_batching.planning.placement import by_folds
from mcore_batching.planning.problem import Problem
from mcore_batching.planning.search.objective import Candidate, Objective, Slots
from mcore_batching.planning.search.profiles import (
    MOST_SLOTS_PER_STAGE,
    Profile,
    Shape,
    fill_slots,
    profile_of,
    shapes_of,
    spread,
    steps_of_counts,
)

ROUNDS_IN_VAIN = 3
"""Times in a row that samples are dealt to ranks anew, by the ends of the time before, without the
step ending clearly sooner."""
ALL_WAYS = (0, 1, 2)
"""Ways to fill a shape: halves of the way from its rise to a rise up to the costliest sample; under
the interleaved schedule orders of its slots. A few very long samples make steps end up to 4 %
sooner in the best of these orders than in the first."""
CLEARLY_SOONER = 0.995
EVEN_ENOUGH = 1.0001
DAMPING = 0.7
"""Share of a rank's lateness that the next round takes off its work. Nothing hangs on the value:
from 0.4 to 1.0 ends of steps differ by less than 0.03 %."""
SWAPS = 3
"""Times that samples are swapped to bring a step closer to its shape. Judges do without: they would
see fewer shapes."""
SHAPES_OF_FOLDED_RANKS = 2
"""Shapes, best first, that are also tried with as many samples on each rank."""

Rises = dict[int, tuple[Profile, float]]
"""By rise the sizes of a shape, and their sum."""


class PipelineShapes:
    """The family of shapes for ranks that run by themselves.

    Args:
        objective: of the step.
    """

    # Judging is cheap, since three ranks stand for all: a fifth of the effort goes a long way. More
    # than half is kept for moving single samples.
    kept_after_judging = 0.8
    kept_for_moves = 0.55
    shapes_that_judge = 2
    """Shapes of every number of slots that are judged, before all are of the best numbers."""

    def __init__(self, objective: Objective) -> None:
        problem = objective.problem
        ranks = problem.dims.data_parallel
        self._objective = objective
        self._order = by_cost(range(problem.num_samples), problem.costs)
        self._head_start = [0.0] * ranks
        """Work that ranks are taken to have when samples are dealt, as it evened out the last
        shape."""
        self._even = _deal(self._order, problem.costs, self._head_start)
        self._folded = folded_ranks(problem)
        self._profiles: dict[Shape, Rises] = {}
        self._ways: dict[tuple[int, int], Sequence[int]] = {}
        """Those that did best, of a judge and a number of slots."""
        # Ranks have their costliest samples in descending order.
        self._judges = [
            self._even[rank] for rank in sorted({ranks // 6, ranks // 2, ranks * 5 // 6})
        ]

    def counts(self) -> list[int]:
        """Numbers of slots to try."""
        return counts_to_try(max(self._even, key=len), self._objective)

    def shapes(self, count: int) -> list[Shape]:
        """Shapes of so many slots, the one that judges the number first."""
        return shapes_of(count, self._objective.problem.dims)

    def last_resort(self) -> list[Shape]:
        """Shapes that are only come to if nothing before them keeps to a bound on tokens in
        flight."""
        if self._objective.max_inflight_tokens is None:
            return []
        return [Shape(count) for count in reversed(self.counts())]

    def judge(self, shape: Shape, *, quick: bool = False) -> float | None:
        """Mean end of three ranks, each with the same work, or the end of the rank with the
        costliest sample and hardly anything beside it if that is later; infinite if one holds more
        tokens in flight than it may, None if its samples do not fit into the shape.

        Args:
            shape: the shape.
            quick: ask one of the three alone.
        """
        ends = []
        middle = len(self._judges) // 2
        for rank in [middle] if quick else range(len(self._judges)):
            tried = rank, shape.num_slots
            filled = self._fill(self._judges[rank], shape, self._ways.get(tried, ALL_WAYS))
            if filled is None:
                return None
            self._ways[tried] = (filled[3],)
            ends.append(math.inf if filled[0] else filled[1])
        return max(ordered_sum(ends) / len(ends), self._least(shape.num_slots))

    def _least(self, count: int) -> float:
        """End of a rank of the costliest sample and, in each other slot, the cheapest."""
        problem = self._objective.problem
        costs = [problem.cost_model.per_micro_batch + min(problem.costs, default=0.0)] * count
        costs[count // 2] = problem.cost_model.per_micro_batch + max(problem.costs, default=0.0)
        return self._objective.end_of(costs)

    def _fill(
        self, samples: Sequence[int], shape: Shape, ways: Sequence[int], *, swaps: int = 0
    ) -> tuple[bool, float, Slots, int] | None:
        """A rank that holds these samples, costliest first, filled in the best of some ways.

        Args:
            samples: the rank's.
            shape: of the slots.
            ways: those that are tried.
            swaps: as in `fill_slots`.

        Returns:
            True if too many tokens are in flight, the end, the slots, and the way; None if the
            samples do not fit.
        """
        objective = self._objective
        best: tuple[bool, float, Slots, int] | None = None
        for slots, way in self._in_ways(samples, shape, ways, swaps):
            if not (fits := objective.fits_in_memory(slots)):
                slots = spread(slots, objective)
                fits = objective.fits_in_memory(slots)
            end = objective.end_of(objective.slot_costs(slots))
            if best is None or (not fits, end) < best[:2]:
                best = not fits, end, slots, way
        return best

    def _in_ways(
        self, samples: Sequence[int], shape: Shape, ways: Sequence[int], swaps: int
    ) -> Iterator[tuple[Slots, int]]:
        """Slots of these samples, and the way in which they were filled, where they fit."""
        objective = self._objective
        profiles = self._profiles.setdefault(shape, {})
        interleaved = objective.problem.dims.virtual_pipeline > 1
        steep = shape.rise if interleaved else self._steep_rise(samples, shape, profiles)
        rises = {shape.rise + (steep - shape.rise) * way // 2: way for way in reversed(ways)}
        for rise, way in sorted(rises.items()):
            sizes, _ = self._profile(shape, rise, profiles)
            slots = fill_slots(samples, sizes, objective, overhead=not shape.fall, swaps=swaps)
            if slots is None:
                continue
            if not interleaved:
                yield slots, way
                continue
            costs = objective.slot_costs(slots)
            for each in ways:
                # A placeholder, cheapest of all, may come first but not last.
                order = slot_order(costs, sizes, each if each != 1 or all(slots) else 2)
                yield [slots[slot] for slot in order], each

    def _profile(self, shape: Shape, rise: int, profiles: Rises) -> tuple[Profile, float]:
        """Sizes of a shape with another rise, and their sum."""
        found = profiles.get(rise)
        if found is None:
            sizes = profile_of(shape._replace(rise=rise), self._objective.problem.dims)
            found = profiles[rise] = sizes, ordered_sum(sizes)
        return found

    def _steep_rise(self, samples: Sequence[int], shape: Shape, profiles: Rises) -> int:
        """The least rise with which a full slot is as large as the costliest sample."""
        problem = self._objective.problem
        if problem.dims.pipeline_parallel == 1 or not samples:
            return shape.rise
        fixed, total = problem.cost_model.per_micro_batch, 0.0
        for sample in samples:
            total += problem.costs[sample]
        total += fixed * shape.num_slots
        peak = problem.costs[samples[0]] + fixed
        # Sizes add up to less the longer they rise.
        least, most = shape.rise, max(shape.rise, shape.num_slots - 1)
        while least < most:
            rise = (least + most) // 2
            if peak * self._profile(shape, rise, profiles)[1] > total:
                least = rise + 1
            else:
                most = rise
        return least

    def steps(self, shape: Shape, number: int) -> Iterator[Candidate]:
        """Steps of one shape: of rounds that each deal less to the ranks that ended late in the
        last, from the best deal of the shape before; then of as many samples on each rank.

        Args:
            shape: the shape.
            number: shapes before it.
        """
        objective = self._objective
        problem = objective.problem
        ways: list[Sequence[int]] = [ALL_WAYS] * problem.dims.data_parallel
        passes = 1.0 if problem.forward_only else 1.0 + problem.cost_model.backward_ratio
        # What evened out one shape is not far off for another.
        head_start = self._head_start
        best, in_vain = math.inf, 0
        while in_vain < ROUNDS_IN_VAIN:
            last: Candidate | None = None
            ranks = _deal(self._order, problem.costs, head_start)
            for last in self._filled(ranks, shape, ways):
                yield last
            if last is None:
                if head_start is not self._head_start or not any(head_start):
                    break
                head_start = self._head_start = [0.0] * len(head_start)
                continue
            in_vain = 0 if last.end < CLEARLY_SOONER * best else in_vain + 1
            if last.end < best:
                best, self._head_start = last.end, head_start
            mean = ordered_sum(last.ends) / len(last.ends)
            if last.end <= EVEN_ENOUGH * mean:
                break
            late = [DAMPING * (end - mean) / passes for end in last.ends]
            head_start = [before + more for before, more in zip(head_start, late, strict=True)]
            least = min(head_start)
            head_start = [each - least for each in head_start]
        if number < SHAPES_OF_FOLDED_RANKS:
            ways = [ALL_WAYS] * problem.dims.data_parallel
            yield from self._filled(self._folded, shape, ways)

    def _filled(
        self, ranks: Sequence[Sequence[int]], shape: Shape, ways: list[Sequence[int]]
    ) -> Iterator[Candidate]:
        """The step of ranks that hold these samples, costliest first; nothing if some do not
        fit. The best way replaces those that each rank tries."""
        filled, ends = [], []
        for rank, samples in enumerate(ranks):
            made = self._fill(samples, shape, ways[rank], swaps=SWAPS)
            if made is None:
                return
            ways[rank] = (made[3],)
            ends.append(made[1])
            filled.append(made[2])
        yield Candidate(filled, ends)


def slot_order(costs: Sequence[float], sizes: Profile, way: int) -> list[int]:
    """Slots in one of three orders: as they are; those that are to be equally large by what they
    cost, the costliest in the middle; all by what they cost, cheapest first.

    Args:
        costs: of each slot [slots].
        sizes: how large each is to be, relative to others [slots].
        way: which order, as numbered in `ALL_WAYS`.
    """
    order = list(range(len(costs)))
    if way:
        order.sort(key=costs.__getitem__)
    if way == 1:
        alike: dict[float, list[int]] = {}
        for slot in order:
            alike.setdefault(sizes[slot], []).append(slot)
        for slots in alike.values():
            for place, slot in zip(sorted(slots), slots[::2] + slots[1::2][::-1], strict=True):
                order[place] = slot
    return order


def by_cost(samples: Sequence[int], costs: Sequence[float]) -> list[int]:
    """The samples, costliest first, ties in index order."""
    return sorted(samples, key=lambda sample: (-costs[sample], sample))


def folded_ranks(problem: Problem) -> list[list[int]]:
    """Samples of each rank, costliest first: as many on each, and as even as that goes."""
    ranks = problem.dims.data_parallel
    dealt = by_folds(problem.costs, ranks, max(1, -(-problem.num_samples // ranks)))
    return [by_cost(samples, problem.costs) for samples in dealt]


def _deal(
    order: Sequence[int], costs: Sequence[float], head_start: Sequence[float]
) -> list[list[int]]:
    """One of the costliest samples to each rank, whatever its head start, so that a rank keeps it
    from round to round; the others, costliest first, to the rank with the least work, ties to the
    lowest rank."""
    dealt = [[sample] for sample in order[: len(head_start)]]
    dealt += [[] for _ in range(len(head_start) - len(dealt))]
    lightest = [
        (load + ordered_sum(costs[sample] for sample in samples), rank, samples.append)
        for rank, (load, samples) in enumerate(zip(head_start, dealt, strict=True))
    ]
    heapq.heapify(lightest)
    for sample in order[len(head_start) :]:
        load, rank, take = lightest[0]
        take(sample)
        heapq.heapreplace(lightest, (load + costs[sample], rank, take))
    return dealt


def counts_to_try(samples: Sequence[int], objective: Objective) -> list[int]:
    """Numbers of slots to try for one rank, from the fewest that can hold its samples."""
    problem = objective.problem
    dims = problem.dims
    count = dims.round_up_num_microbatches(problem.subset(samples).fewest_rows)
    if dims.pipeline_parallel == 1 and objective.max_inflight_tokens is None:
        # No bubble to shrink: further micro-batches only cost more.
        return [dims.round_up_num_microbatches(count + extra) for extra in range(3)]
    useful = len(samples)
    if objective.max_inflight_tokens is None:
        useful = min(useful, MOST_SLOTS_PER_STAGE * dims.pipeline_parallel)
    return steps_of_counts(count, max(useful, count), dims)
