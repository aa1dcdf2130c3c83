"""Target sizes of the slots of each rank.

A pipeline idles in proportion to the size of its full slots: its first micro-batches must be small
and may grow only as fast as the backward passes behind them allow, its last must shrink. So a rank
has a plateau as high as its work asks for, or as its longest sample. The higher that is the fewer
slots reach it, and what is left of them holds next to nothing:

    usual   0.25 0.42 0.69 1.00 1.00 1.00 1.00 0.92 0.85 0.73 0.5     times the plateau
    long    0.05 0.05 0.05 0.08 0.14 0.23 0.38 0.63 1.00 0.86 0.5     one sample is the plateau

(PP4, 11 slots). Under the interleaved schedule groups of slots take the place of slots, of a
pipeline of two stages. On one stage, and forward alone, order matters little: targets are even.
Where ranks run in lockstep all have the same targets, fitted to the clock.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate, repeat
from operator import mul
from typing import NamedTuple

from mcore_batching.planning.clock import Clock
from mcore_batching.planning.costs.cost import ordered_sum
from mcore_batching.planning.problem import Problem

STEEPER = 0.25
"""Before a long sample the first slot is a quarter of the usual: whatever precedes it delays it.
With the usual one steps end 0.4 % later, one in ten by more than 1 %."""
LOWEST = 0.5, 1.25
"""Last slot over the plateau: 1.25 · stages / slots (groups), at most 0.5, as a linear program has
it. Both halved or doubled, steps end 0.16 or 0.27 % later."""
FADED, SMALLER = 0.02, 0.4
"""Last slot over the plateau of a fall that fades, and the first slots before it over the usual: a
stage slower than the others idles for as long as both pass these. Without, steps on uneven stages
end 0.6 % later."""
SHARED_OVER = 1.12
"""A long sample shares a rank with a longer one in a slot whose target is up to 12 % smaller: fewer
ranks have to wait for one. Without, steps end 0.3 % later, of long samples on 8 stages 2 %."""
HALVINGS = 14
"""Steps of a bisection: to 1/16,384 of its range."""
FIT_STEPS, FIRST_STEP = 40, 0.15
"""Steps of fitting, the first by 0.15 of a mean slot, the tenth by half as much. Without, steps in
lockstep end 1.5 % later."""
ROUNDED, TINY = 1.0 + 1e-7, 1e-9
"""Samples that just fill a slot up are held by it; keeps divisors above zero."""


class StepShape(NamedTuple):
    """The shape of a step, decided before samples are assigned."""

    num_slots: int
    """Number of slots."""
    first_size: float
    """Size of the first slot (group of slots) over the plateau; from 1 on all slots are even."""
    gentle: bool = False
    """True for a rise along a line, and a fall over twice as many slots."""
    fades: bool = False
    """True for a fall to next to nothing and smaller first slots, for stages that wait for a slower
    one; tried where stages differ."""


class Targets:
    """Targets of ranks, for one shape of a step.

    Args:
        problem: gives the schedule and the costs.
        shape: of the step.
        least: cost of a micro-batch of one small sample.
    """

    def __init__(self, problem: Problem, shape: StepShape, least: float) -> None:
        schedule, ratio = problem.schedule, problem.cost_model.backward_ratio
        self.count = shape.num_slots
        self._least, self._fixed = least, problem.cost_model.per_micro_batch
        self._group = problem.dims.slots_per_group
        self._forward_only = problem.forward_only
        self.even = shape.first_size >= 1.0 or not schedule.alternates
        if self.even:
            return
        # Groups pass like slots through two stages: their forward and their backward passes.
        self._stages = stages = problem.dims.pipeline_parallel if self._group == 1 else 2
        # A step run backwards is one with forward and backward exchanged.
        self._mirrored = ratio < 1.0
        self._growth = (1.0 if shape.gentle else max(ratio, 1.0 / ratio)) / (stages - 1)
        self._units = -(-self.count // self._group)
        span = (4 if shape.gentle else 2) * stages
        self._decay = (span - 1.4) / (span + 1.4)
        powers = accumulate(repeat(self._decay, self._units), mul, initial=1.0)
        self._first = shape.first_size
        self._lowest = min(LOWEST[0], LOWEST[1] * stages / self._units)
        self._falls = list(powers)
        """What units before the last lack of the plateau, over what the last lacks."""
        if shape.fades:
            self._first, self._lowest = SMALLER * self._first, 0.0
            self._falls = [1.0 - FADED / max(power, FADED) for power in self._falls]
        rise = self._rise(self._first)
        units = self._rise_and_fall(rise, self._units - 1, 1.0 - self._lowest)
        self.usual = self._of_slots(units)
        """Sizes of slots over the plateau where no sample is long [slots]."""
        self._usual_sum = ordered_sum(self.usual)

    def _rise(self, first: float) -> list[float]:
        """Sizes of units up to the plateau: each adds to the first what the backward passes of the
        last `stages - 1` let by."""
        sizes: list[float] = []
        for unit in range(self._units):
            before = sizes[max(0, unit + 1 - self._stages) :]
            size = first + self._growth * ordered_sum(before)
            if size >= 1.0:
                return sizes + [1.0] * (self._units - unit)
            sizes.append(size)
        return sizes

    def _rise_and_fall(self, rise: Sequence[float], last: int, lacking: float) -> list[float]:
        """Sizes of units that rise, and fall until unit `last` lacks `lacking` of the plateau."""
        sizes = [
            up if up < (down := 1.0 - lacking * fall) else down
            for up, fall in zip(rise, self._falls[last::-1], strict=False)
        ]
        return sizes + [0.0] * (self._units - 1 - last)

    def _of_slots(self, units: list[float]) -> list[float]:
        return [size for size in units for _ in range(self._group)][: self.count]

    def plateau(self, work: float) -> float:
        """The largest size of a rank with this work and no long sample."""
        return work / self.count if self.even else work / self._usual_sum * max(self.usual)

    def of_rank(self, work: float, longest: float) -> tuple[list[float], bool]:
        """Targets of a rank [slots], in cost.

        Args:
            work: of the rank, overhead of its micro-batches included.
            longest: cost of the micro-batch of its longest sample.

        Returns:
            the targets, which add up to `work`; True if the longest sample makes the plateau.
        """
        is_long = self.plateau(work) < longest
        if self.even:
            return self._even(work, longest if is_long else 0.0), is_long
        if is_long:
            sizes = self._around(work, longest)
        else:
            scale, least = work / self._usual_sum, self._least
            sizes = [max(least, scale * size) for size in self.usual]
        return sizes[::-1] if self._mirrored else sizes, is_long

    def _even(self, work: float, longest: float) -> list[float]:
        """All as large, except one in the middle like the longest. Forward alone its whole group
        is: at each chunk of the interleaved schedule the others of the group wait for it."""
        many = 1 if longest else 0
        group = min(self._group, self.count)
        if longest and self._forward_only:
            fits = work - group * longest >= self._least * (self.count - group)
            many = group if fits else 1
        first = self.count // 2 // max(1, many) * many
        sizes = [(work - many * longest) / max(1, self.count - many)] * self.count
        sizes[first : first + many] = [longest] * many
        return sizes

    def _around(self, work: float, longest: float) -> list[float]:
        """Targets with one as large as the longest sample."""
        sizes = self._of_slots(self._units_around(work, longest))
        at, others = sizes.index(max(sizes)), self.count - 1
        rest = work - longest - others * self._least
        if rest < 0.0:
            # Small samples are enough for some of the others alone, just before it.
            spare = work - longest - others * self._fixed
            real = max(0, math.ceil(spare / max(self._least - self._fixed, TINY) - 0.001))
            at = min(max(at, real), others)
            sizes = [self._fixed] * self.count
            sizes[at - min(real, at) : at] = [self._least] * min(real, at)
        else:
            over = ordered_sum(sizes) - sizes[at] - others * self._least
            kept = min(1.0, rest / over) if over > 0.0 else 1.0
            sizes = [self._least + kept * (size - self._least) for size in sizes]
        sizes[at] = longest
        return sizes

    def _units_around(self, work: float, longest: float) -> list[float]:
        """Sizes of units up to the longest sample that hold the work, or hardly more: a steep rise
        and as late a fall as it takes, then a rise as gentle as it takes."""

        def reaching(rise: Sequence[float], last: int, lacking: float) -> list[float]:
            sizes = self._rise_and_fall(rise, last, lacking)
            scale, least = longest / max(*sizes, TINY), self._least
            # A comparison: faster than `max`.
            return [scaled if (scaled := size * scale) > least else least for size in sizes]

        def is_short(rise: Sequence[float], last: int, lacking: float) -> bool:
            sizes = reaching(rise, last, lacking)
            missing = self._units * self._group - self.count
            return ordered_sum(sizes) * self._group - missing * sizes[-1] < work

        steep = self._rise(STEEPER * self._first)
        first = min(self._stages, self._units)
        falls = range(first, max(first, self._units - 1))
        last = first + bisect_left(falls, True, key=lambda unit: not is_short(steep, unit, 1.0))
        # If the last unit lacks 1 / decay, the one before it lacks all, as when that was the last.
        least, most = 1.0 / self._decay if last > first else 1.0, 1.0
        if is_short(steep, last, most):
            # Nothing left except the usual last slot, larger than this.
            least, most = most, min(most, 1.0 - self._lowest)
        if is_short(steep, last, most):
            gentlest = _bisected(
                lambda steeper: is_short(self._rise(steeper * self._first), last, most),
                STEEPER,
                1.0,
            )
            return reaching(self._rise(gentlest * self._first), last, most)
        lacking = _bisected(lambda lacking: is_short(steep, last, lacking), least, most)
        return reaching(steep, last, lacking)


def all_targets(
    targets: Targets, works: Sequence[float], alone: Sequence[float]
) -> list[list[float]]:
    """Targets of all ranks [ranks][slots]. Long samples share ranks: a plateau costs a rank time,
    not the number of slots that reach it.

    Args:
        targets: of the shape.
        works: of each rank, as in `Targets.of_rank`.
        alone: costs of micro-batches of one sample each, of all samples, descending.
    """
    left = list(reversed(alone))
    made = []
    for work in works:
        longest = left[-1] if left else 0.0
        sizes, is_long = targets.of_rank(max(work, longest), longest)
        made.append(sizes)
        if not is_long:
            left = []  # those that are left are as short
            continue
        usual = targets.plateau(work)
        for size in sorted(sizes, reverse=True):
            # A slot holds what is a thousandth over its target, too: that delays nothing.
            place = bisect_right(left, size * SHARED_OVER) - 1
            if size < usual or place < 0 or left[place] <= usual:
                break
            del left[place]
    return made


def lockstep_targets(
    targets: Targets, work: float, problem: Problem, order: Sequence[int]
) -> list[float]:
    """Targets of every rank [slots] where all run a slot together: each slot within what the
    costliest samples and the cap allow, then fitted to the clock unless they are even.

    Args:
        targets: of the shape.
        work: of each rank.
        problem: of all ranks.
        order: its samples, costliest first.
    """
    fixed, ranks = problem.cost_model.per_micro_batch, problem.dims.data_parallel
    alone = [problem.costs[sample] + fixed for sample in order]
    until = list(accumulate(problem.costs[sample] / ranks for sample in order))
    filled = _filled_up(problem, order)
    top = alone[0] if alone else 0.0
    sizes, _ = targets.of_rank(max(work, top), top)
    by_size = sorted(range(targets.count), key=lambda slot: (-sizes[slot], slot))
    bounds = [(0.0, math.inf)] * targets.count

    def scaled(scale: float) -> list[float]:
        within, assigned = list(sizes), 0.0
        for slot in by_size:
            # The costliest sample that the larger slots do not hold.
            at = bisect_right(until, assigned)
            within[slot] = scale * sizes[slot]
            if at < len(order):
                # The rank with the cheapest of the next samples fills up least.
                most = filled[min(at + ranks, len(order)) - 1]
                bounds[slot] = alone[at], max(alone[at], most)
                within[slot] = _within(within[slot], bounds[slot])
                assigned += (min(within[slot], most) - fixed) * ROUNDED
        return within

    # Up to 8 times as large, to make up for slots that the cap keeps small.
    made = scaled(_bisected(lambda scale: ordered_sum(scaled(scale)) < work, 0.0, 8.0))
    return made if targets.even else _fitted(made, bounds, problem)


def _filled_up(problem: Problem, order: Sequence[int]) -> list[float]:
    """Cost of each sample's micro-batch if the rest of the cap is filled with cheaper samples, at
    their mean cost per token [samples of the order]."""
    filled: list[float] = []
    cost = tokens = 0.0
    for sample in reversed(order):
        room = max(0.0, problem.capacity - problem.tokens[sample])
        more = room * cost / tokens if tokens else 0.0
        filled.append(problem.cost([sample]) + more)
        cost += problem.costs[sample]
        tokens += problem.tokens[sample]
    return filled[::-1]


def _fitted(
    sizes: list[float], bounds: Sequence[tuple[float, float]], problem: Problem
) -> list[float]:
    """Sizes within bounds, of the same sum, with which the pipeline ends sooner.

    The end is the largest of many sums of weights times sizes, one for each path through the
    pipeline, so it falls along the weights of the critical path (a subgradient method).
    """
    work = ordered_sum(sizes)
    ratios = over_mean_stage(problem, range(problem.num_samples))
    best, soonest = sizes, math.inf
    for number in range(FIT_STEPS):
        clock = Clock([size * ratio for size in sizes for ratio in ratios], problem.schedule)
        if clock.end < soonest:
            best, soonest = sizes, clock.end
        of_places = iter(clock.weights())
        weights = [ordered_sum(ratio * next(of_places) for ratio in ratios) for _ in sizes]
        mean = ordered_sum(weights) / len(weights)
        steepest = max(abs(weight - mean) for weight in weights)
        if not steepest:
            break
        step = FIRST_STEP * work / len(sizes) / (1 + number / 10) / steepest
        moved = [size - step * (weight - mean) for size, weight in zip(sizes, weights, strict=True)]
        sizes = _adding_up(moved, bounds, work)
    return best


def over_mean_stage(problem: Problem, samples: Sequence[int]) -> list[float]:
    """Cost of a micro-batch of all samples on each kind of stage over that on the mean one."""
    mean = problem.cost(samples)
    return [cost / mean if mean else 1.0 for cost in problem.slot_costs([samples])]


def _adding_up(
    sizes: Sequence[float], bounds: Sequence[tuple[float, float]], work: float
) -> list[float]:
    """Sizes within bounds that add up to the work, by as much more for each."""

    def shifted(by: float) -> list[float]:
        return [_within(size + by, of) for size, of in zip(sizes, bounds, strict=True)]

    return shifted(_bisected(lambda by: ordered_sum(shifted(by)) < work, -work, work))


def _within(size: float, bounds: tuple[float, float]) -> float:
    least, most = bounds
    return max(least, min(most, size))


def _bisected(is_short: Callable[[float], bool], low: float, high: float) -> float:
    """About the least number that is not short."""
    for _ in range(HALVINGS):
        middle = (low + high) / 2.0
        low, high = (middle, high) if is_short(middle) else (low, middle)
    return high
