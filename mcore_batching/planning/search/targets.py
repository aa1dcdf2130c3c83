"""Target sizes of the slots of each rank.

A pipeline idles in proportion to the size of its full slots: its first micro-batches must be small
and may grow only as fast as the backward passes behind them allow, its last must shrink. So a rank
has a plateau as high as its work asks for, or as its longest sample. The higher that is the fewer
slots reach it, and what is left of them holds next to nothing:

    usual   0.45 0.75 1.00 1.00 1.00 1.00 0.95 0.92 0.85 0.73 0.45    times the plateau
    long    0.01 0.06 0.09 0.16 0.26 0.43 0.71 1.00 0.65 0.45 0.01    one sample is the plateau

(PP4, 11 slots). Under the interleaved schedule groups of slots take the place of slots, of a
pipeline of two stages. On one stage, and forward alone, order matters little: targets are even.
Where ranks run in lockstep all have the same targets.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import repeat

from mcore_batching.planning.clock import Clock
from mcore_batching.planning.costs.cost import ordered_sum
from mcore_batching.planning.problem import Problem

ENDS = 0.5, 1.25
"""First and last slot over the plateau: 1.25 · stages / slots (groups), at most 0.5, as a linear
program has the last. Both halved or doubled, steps end 0.16 or 0.27 % later."""
FADED, SMALLER = 0.02, 0.4
"""Where stages differ the last slot is 0.02 of the plateau and the first 0.4 of the usual: a stage
slower than the others idles for as long as both pass these. Without, steps on uneven stages end
0.9 % later."""
STEEP = 0.25
"""Before a long sample the first slot is a quarter of the usual, since whatever precedes it delays
it. With an eighth steps of long samples end 0.2 % later."""
SHARED_OVER = 1.2, 1.05
"""A long sample shares a rank with a longer one in a slot whose target is up to a sixth smaller:
fewer ranks have to wait for one. Where stages differ up to a twentieth, as every stage waits for
the slowest. With a twentieth everywhere steps of long samples on 8 stages end 1 % later."""
HALVINGS = 10
"""The common end of all ranks is found within a thousandth of what it may be."""


@functools.lru_cache(maxsize=4096)
def rise_and_fall(
    slots: int,
    group: int,
    stages: int,
    growth: float,
    first: float,
    last: float,
    *,
    falls_late: bool,
) -> tuple[list[float], float]:
    """Sizes of slots over the largest [slots], and their sum.

    Args:
        slots: number of slots.
        group: slots of the same size, one after the other.
        stages: of the pipeline.
        growth: each size is `first` and this times the last `stages - 1` sizes together: what their
            backward passes let by.
        first: the first size over the plateau.
        last: the last size over the plateau.
        falls_late: False for a fall over as many slots as a linear program has it, True for a
            shorter one, each size a multiple of the next.
    """
    units = -(-slots // group)
    sizes: list[float] = []
    while len(sizes) < units and (not sizes or sizes[-1] < 1.0):
        sizes.append(min(1.0, first + growth * ordered_sum(sizes[1 - stages :])))
    sizes += repeat(1.0, units - len(sizes))
    decay = (2 * stages - 1.4) / (2 * stages + 1.4)
    power = 1.0
    for unit in reversed(range(units)):
        fall = last / max(power, last) if falls_late else 1.0 - (1.0 - last) * power
        sizes[unit] = min(sizes[unit], fall)
        power *= decay
    most = max(sizes)
    sizes = [size / most for size in sizes for _ in range(group)][:slots]
    return sizes, ordered_sum(sizes)


class Targets:
    """Targets of ranks, for one number of slots.

    Args:
        problem: gives the schedule and the costs.
        count: number of slots.
        least: cost of a micro-batch of one small sample.
    """

    def __init__(self, problem: Problem, count: int, least: float) -> None:
        self._schedule, ratio = problem.schedule, problem.cost_model.backward_ratio
        self.count, self._least = count, least
        self._fixed = problem.cost_model.per_micro_batch
        self._group = problem.dims.slots_per_group
        self.in_groups = self._group > 1
        """True under the interleaved schedule."""
        self._forward_only = problem.forward_only
        # Groups pass like slots through two stages: their forward and their backward passes.
        self._stages = problem.dims.pipeline_parallel if self._group == 1 else 2
        self._growth = ratio / max(1, self._stages - 1)
        self._is_uneven = bool(self._schedule.which_cost)
        self._shared_over = SHARED_OVER[self._is_uneven]
        self._cost_ratios = problem.cost_ratios
        self.even = not self._schedule.alternates
        """True on one stage and forward alone, where order matters little."""
        self.usual, self._usual_sum = self.shape(count)
        """Sizes of slots over the plateau where no sample is long [slots], and their sum."""
        self._ends: dict[int, float] = {}
        """For each number of slots, the end of those that rise to a long sample over its cost."""

    @functools.cached_property
    def usual_end(self) -> float:
        """End of the step over the plateau."""
        return self.end(self.usual)

    def end(self, sizes: Sequence[float]) -> float:
        """End of the step of a rank, if samples could be cut to targets [slots]."""
        costs = [size * ratio for size in sizes for ratio in self._cost_ratios]
        return Clock(costs, self._schedule).end

    def shape(self, slots: int, steeper: float = 1.0) -> tuple[list[float], float]:
        """Sizes of so many slots over the plateau, and their sum; the first is `steeper` times the
        usual."""
        if self.even:
            return [1.0] * slots, float(slots)
        units, late = -(-slots // self._group), self._is_uneven
        last = min(ENDS[0], ENDS[1] * self._stages / units)
        first = steeper * last * (SMALLER if late else 1.0)
        last = FADED if late else last
        sizes = slots, self._group, self._stages, self._growth, first, last
        return rise_and_fall(*sizes, falls_late=late)

    def plateau(self, work: float) -> float:
        """The largest size of a rank with this work and no long sample."""
        return work / self._usual_sum

    def of_rank(self, work: float, longest: float) -> list[float]:
        """Cost that each of a rank's micro-batches is to have [slots], its work together.

        Args:
            work: of the rank, overhead of its micro-batches included.
            longest: cost of the micro-batch of its longest sample.
        """
        plateau = self.plateau(work)
        if longest <= plateau:
            return [max(self._least, plateau * size) for size in self.usual]
        return (self._even if self.even else self._around)(work, longest)

    def work_until(self, end: float, longest: float) -> float:
        """About the most work with which a rank of this longest sample ends in time."""
        fewest, most = longest + (self.count - 1) * self._least, longest * self._usual_sum
        # No longer sample than the usual plateau: the end is in proportion to the work.
        if end >= longest * self.usual_end or fewest >= most:
            return max(fewest, end / self.usual_end * self._usual_sum)
        # The more slots rise to the longest sample, the later the rank ends.
        slots = range(1, self.count + 1)
        fits = bisect_right(slots, end, key=functools.partial(self._end_held, longest))
        if fits == 0:
            return fewest
        before, end_before = self._held(longest, fits), self._end_held(longest, fits)
        after, end_after = most, longest * self.usual_end
        if fits < self.count:
            after, end_after = self._held(longest, fits + 1), self._end_held(longest, fits + 1)
        return before + (end - end_before) / (end_after - end_before) * (after - before)

    def _held(self, longest: float, slots: int) -> float:
        """Work of targets that rise to the longest sample in so many slots."""
        return longest * self.shape(slots, STEEP)[1] + (self.count - slots) * self._least

    def _end_held(self, longest: float, slots: int) -> float:
        """About the end of a rank with the work of `_held`."""
        # One simulation serves all ranks: one for each took two thirds of the time in which 65,536
        # samples on 512 ranks are planned.
        if slots not in self._ends:
            # In all the rank's slots: passes of another number would have to be made first.
            self._ends[slots] = self.end(self._amid(self.shape(slots, STEEP)[0], 0.0))
        rest = (self.count - slots) * self._least
        return longest * self._ends[slots] + rest * self._schedule.cost_of_passes

    def _amid(self, sizes: list[float], others: float) -> list[float]:
        """Sizes amid those of the other slots, half of which come before."""
        lacking = self.count - len(sizes)
        return [others] * (lacking // 2) + sizes + [others] * (lacking - lacking // 2)

    def take_long(self, left: list[float], sizes: Sequence[float], usual: float) -> None:
        """Remove the long samples that a rank takes from those that are left, ascending: one in
        each of its largest slots, as long as they are longer than its usual plateau."""
        for size in sorted(sizes, reverse=True):
            place = bisect_right(left, size * self._shared_over) - 1
            if size < usual or place < 0 or left[place] <= usual:
                break
            del left[place]

    def _even(self, work: float, longest: float) -> list[float]:
        """All as large, except one in the middle like the longest. Forward alone its whole group
        is: at each chunk of the interleaved schedule the others of the group wait for it."""
        many, group = 1, min(self._group, self.count)
        if self._forward_only:
            fits = work - group * longest >= self._least * (self.count - group)
            many = group if fits else 1
        first = self.count // 2 // many * many
        sizes = [(work - many * longest) / max(1, self.count - many)] * self.count
        sizes[first : first + many] = [longest] * many
        return sizes

    def _around(self, work: float, longest: float) -> list[float]:
        """Targets that rise steeply to the longest sample, in as few slots as hold the work; the
        others hold next to nothing, half of them before these. If all are too few, they are between
        these and the usual."""
        least, count = self._least, self.count
        choices = range(self._group, count, self._group)
        enough = bisect_left(choices, work, key=functools.partial(self._held, longest))
        slots = choices[enough] if enough < len(choices) else count
        shape, total = self.shape(slots, STEEP)
        more = work - longest * total
        if more > 0.0 and slots == count:
            usual = longest * (self._usual_sum - total)
            part = min(1.0, more / usual) if usual > 0.0 else 0.0
            shape = [a + part * (b - a) for a, b in zip(shape, self.usual, strict=True)]
        # A comparison: faster than `max`.
        sizes = [scaled if (scaled := longest * size) > least else least for size in shape]
        sizes = self._amid(sizes, least)
        at, others = sizes.index(max(sizes)), count - 1
        over = ordered_sum(sizes) - longest - others * least
        rest = work - longest - others * least
        if rest < 0.0:  # small samples are enough for some of the others alone, just before it
            # What a thousandth of a small sample is lacking for is held by the others.
            small = least - self._fixed
            real = math.ceil((rest + others * small) / small - 0.001) if small > 0.0 else others
            real = min(others, max(0, real))
            return [self._fixed] * (others - real) + [least] * real + [longest]
        if over > 0.0:
            sizes = [least + rest / over * (size - least) for size in sizes]
        sizes[at] = longest
        return sizes


def even_ranks(
    targets: Targets, work: float, ranks: int, alone: Sequence[float]
) -> tuple[list[float], list[float]]:
    """Work of each rank with which the targets of all end together, and its longest sample
    [ranks]: a rank with a very long one waits for it, and has less work. Long samples share ranks:
    a plateau costs a rank time, not the number of slots that reach it.

    Args:
        targets: for the number of slots.
        work: of the mean rank, overhead of its micro-batches included.
        ranks: number of ranks.
        alone: costs of micro-batches of one sample each, of all samples, descending.
    """
    longest = alone[0] if alone else 0.0
    long = [cost for cost in alone if cost > targets.plateau(work)]
    if not long:
        return [work] * ranks, [longest, *[0.0] * (ranks - 1)]
    works, peaks = list[float](), list[float]()
    low = targets.plateau(work) * targets.usual_end
    end = high = targets.end(targets.of_rank(max(work, longest), longest))
    for _ in range(HALVINGS):
        left, found, tops = long[::-1], list[float](), [0.0] * ranks
        while left and len(found) < ranks:
            top = tops[len(found)] = left[-1]
            # With groups of slots the end jumps where one is full: rounds even out better.
            until = work if targets.in_groups else targets.work_until(end, top)
            usual = targets.plateau(until)
            if top <= usual:
                break
            found.append(until)
            targets.take_long(left, targets.of_rank(until, top), usual)
        rest, others = work * ranks - ordered_sum(found), ranks - len(found)
        if works and rest > others * targets.work_until(end, 0.0):
            low = end
        else:
            high, peaks = end, tops
            # With a long sample on every rank, all share what is left. Ranks with more work than
            # the mean keep it: with less, the other slots of theirs would hold next to nothing.
            more = 0.0 if others else max(0.0, rest) / ranks
            works = [until + more for until in found] + [rest / max(1, others)] * others
        end = (low + high) / 2
    return works, peaks
