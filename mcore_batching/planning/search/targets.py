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
STEEP = 0.0625, 0.125, 0.25
"""Before a long sample the first slot is a sixteenth, an eighth or a quarter of the usual, since
whatever precedes it delays it, and more as far as the work needs it. Of the three the clock takes
one: with an eighth alone steps of long samples end 0.2 % later. Where stages differ it is a
quarter: there the clock is no guide, as costs of long samples are made up otherwise."""
SHARED_OVER = 1.12
"""A long sample shares a rank with a longer one in a slot whose target is up to 12 % smaller: fewer
ranks have to wait for one. Without, steps of long samples on 8 stages end 4 % later."""


@functools.lru_cache(maxsize=4096)
def rise_and_fall(
    units: int, stages: int, growth: float, first: float, last: float, *, falls_late: bool
) -> list[float]:
    """Sizes of slots (groups) over the plateau.

    Args:
        units: number of slots (groups).
        stages: of the pipeline.
        growth: each size is `first` and this times the last `stages - 1` sizes together: what their
            backward passes let by.
        first: the first size.
        last: the last size.
        falls_late: False for a fall over as many slots as a linear program has it, True for a
            shorter one, each size a multiple of the next.
    """
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
    return sizes


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
        self._forward_only = problem.forward_only
        self.units = -(-count // self._group)
        # Groups pass like slots through two stages: their forward and their backward passes.
        self._stages = problem.dims.pipeline_parallel if self._group == 1 else 2
        self._growth = ratio / max(1, self._stages - 1)
        self._is_uneven = bool(self._schedule.which_cost)
        self.even = not self._schedule.alternates
        """True on one stage and forward alone, where order matters little."""
        self.usual = [1.0] * count if self.even else self.shape(self.units)
        """Sizes of slots over the plateau where no sample is long [slots]."""
        self._usual_sum = ordered_sum(self.usual)

    def shape(self, units: int, steeper: float = 1.0) -> list[float]:
        """Sizes of the slots of so many units over the plateau; the first is `steeper` times the
        usual."""
        last, late = min(ENDS[0], ENDS[1] * self._stages / units), self._is_uneven
        first = steeper * last * (SMALLER if late else 1.0)
        last = FADED if late else last
        sizes = rise_and_fall(units, self._stages, self._growth, first, last, falls_late=late)
        return [size for size in sizes for _ in range(self._group)][: self.count]

    def plateau(self, work: float) -> float:
        """The largest size of a rank with this work and no long sample."""
        return work / self._usual_sum * max(self.usual)

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
            steep = STEEP[-1:] if self._is_uneven else STEEP
            found = [self._around(work, longest, each) for each in steep]
            return min(found, key=self._end) if len(found) > 1 else found[0], True
        scale = work / self._usual_sum
        return [max(self._least, scale * size) for size in self.usual], False

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

    def _end(self, sizes: Sequence[float]) -> float:
        return Clock(sizes, self._schedule).end

    def _around(self, work: float, longest: float, steep: float) -> list[float]:
        """Targets that rise steeply to the longest sample, in as few slots as hold the work; the
        others hold next to nothing, half of them before these. If all are too few, they rise more
        gently."""
        least, others = self._least, self.count - 1

        def reaching(shape: tuple[int, float]) -> list[float]:
            sizes = self.shape(*shape)
            scale = longest / max(sizes)
            # A comparison: faster than `max`.
            sizes = [scaled if (scaled := scale * size) > least else least for size in sizes]
            before = (self.count - len(sizes)) // 2
            return [least] * before + sizes + [least] * (self.count - len(sizes) - before)

        shapes = [(units, steep) for units in range(1, self.units)]
        gentler = [steep]
        while gentler[-1] < 1.0:
            gentler.append(min(1.0, gentler[-1] * math.sqrt(2.0)))
        shapes += [(self.units, steeper) for steeper in gentler]
        last = len(shapes) - 1
        enough = bisect_left(shapes, work, hi=last, key=lambda each: ordered_sum(reaching(each)))
        sizes = reaching(shapes[enough])
        at = sizes.index(max(sizes))
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


def all_targets(
    targets: Targets, works: Sequence[float], alone: Sequence[float]
) -> list[list[float]]:
    """Targets of all ranks [ranks][slots]. Long samples share ranks: a plateau costs a rank time,
    not the number of slots that reach it.

    Args:
        targets: for the number of slots.
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
