"""Target sizes of the slots of each rank.

A pipeline idles in proportion to the size of its full slots: its first micro-batches must be small
and may grow only as fast as the backward passes behind them allow, its last must shrink. So a rank
has a plateau as high as its work asks for, or as its longest sample. The higher that is the fewer
slots reach it, and what is left of them holds next to nothing:

    usual   0.25 0.42 0.69 1.00 1.00 1.00 1.00 0.92 0.85 0.73 0.5     times the plateau
    long    0.05 0.05 0.05 0.08 0.14 0.23 0.38 0.63 1.00 0.86 0.5     one sample is the plateau

(PP4, 11 slots). Under the interleaved schedule groups of slots take the place of slots, of a
pipeline of two stages. On one stage, and forward alone, order matters little: targets are even.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate, repeat
from operator import mul
from typing import NamedTuple

from mcore_batching.planning.costs.cost import ordered_sum
from mcore_batching.planning.search.objective import Objective

STEEPER = 0.25
"""Before a long sample the first slot is a quarter of the usual: whatever precedes it delays it.
With an eighth or a half the mean moves by 0.02 %, single steps by 0.6 %."""
LOWEST = 0.5, 1.25
"""Last slot over the plateau: 1.25 · stages / slots (groups), at most 0.5, as a linear program has
it. Both halved or doubled, steps end 0.16 or 0.27 % later in the mean."""
FADED, SMALLER = 0.02, 0.4
"""Last slot over the plateau of a fall that fades, and what the first slots before it are times the
usual: a stage slower than the others idles for as long as both pass these. Either halved or
doubled, steps end up to 0.3 % later in the mean of six."""
TINY = 1e-9
"""Keeps divisors above zero."""
HALVINGS = 20
"""Steps of a bisection."""


class Kind(NamedTuple):
    """The shape of a step, decided before samples are dealt."""

    num_slots: int
    """Number of slots."""
    first: float
    """Size of the first slot (group of slots) over the plateau."""
    gentle: bool = False
    """True for a rise along a line, and a fall over twice as many slots."""
    fades: bool = False
    """True for a fall to next to nothing and smaller first slots, for stages that wait for a slower
    one; tried where stages differ."""


class Targets:
    """Targets of a kind of step.

    Args:
        objective: gives the schedule and the costs.
        kind: of the step.
        least: cost of a micro-batch of one small sample.
    """

    def __init__(self, objective: Objective, kind: Kind, least: float) -> None:
        problem = objective.problem
        schedule, ratio = problem.schedule, problem.cost_model.backward_ratio
        count, first, gentle, fades = kind
        self.count = count
        self._least, self._fixed = least, problem.cost_model.per_micro_batch
        self._group = problem.dims.slots_per_group
        self._units = -(-count // self._group)
        self._stages = stages = schedule.stages_of_groups
        self._forward_only = problem.forward_only
        self.even = first >= 1.0 or not schedule.alternates
        if self.even:
            return
        # A step run backwards is one with forward and backward exchanged.
        self._mirrored = ratio < 1.0
        self._growth = (1.0 if gentle else max(ratio, 1.0 / ratio)) / (stages - 1)
        span = (4 if gentle else 2) * stages
        self._decay = (span - 1.4) / (span + 1.4)
        most, times = LOWEST
        self._lowest = min(most, times * stages / self._units)
        self._powers = list(accumulate(repeat(self._decay, self._units), mul, initial=1.0))
        if fades:
            first, self._lowest = SMALLER * first, 0.0
            self._powers = [max(0.0, 1.0 - FADED / max(power, TINY)) for power in self._powers]
        self._first = first
        self._usual = self._sizes(self._rising(first), self._units - 1, 1.0 - self._lowest)
        self._usual_sum = self._sum(self._usual)

    def _rising(self, first: float) -> list[float]:
        """Sizes up to the plateau: each adds to the first what the backward passes of the last
        `stages - 1` let by."""
        sizes: list[float] = []
        for unit in range(self._units):
            before = sizes[max(0, unit + 1 - self._stages) :]
            size = first + self._growth * ordered_sum(before)
            if size >= 1.0:
                return sizes + [1.0] * (self._units - unit)
            sizes.append(size)
        return sizes

    def _sizes(self, rise: Sequence[float], last: int, lacking: float) -> list[float]:
        """Sizes of units, rising, and falling until one lacks `lacking` of the plateau."""
        sizes = [
            up if up < (down := 1.0 - lacking * power) else down
            for up, power in zip(rise, self._powers[last::-1], strict=False)
        ]
        return sizes + [0.0] * (self._units - 1 - last)

    def _sum(self, sizes: Sequence[float]) -> float:
        """Over slots; the last group may have fewer."""
        total = ordered_sum(sizes) * self._group
        return total - (self._units * self._group - self.count) * sizes[-1]

    def plateau(self, work: float) -> float:
        """The largest size of a rank with this work and no long sample."""
        return work / self.count if self.even else work / self._usual_sum * max(self._usual)

    @property
    def relative(self) -> list[float]:
        """Sizes of slots relative to each other, where no sample is long [slots]."""
        return [1.0] * self.count if self.even else self._of_slots(self._usual)

    def of_rank(self, work: float, longest: float) -> tuple[list[float], bool]:
        """Targets of a rank [slots], in cost.

        Args:
            work: of the rank, overhead of its micro-batches included.
            longest: cost of the micro-batch of its longest sample.

        Returns:
            the targets, which add up to `work`; True if the longest sample makes the plateau.
        """
        long = self.plateau(work) < longest
        if self.even:
            return self._even(work, longest if long else 0.0), long
        if not long:
            scale = work / self._usual_sum
            sizes = self._of_slots([max(self._least, scale * size) for size in self._usual])
        else:
            sizes = self._around(work, longest)
        if self._mirrored:
            sizes.reverse()
        return sizes, long

    def _even(self, work: float, longest: float) -> list[float]:
        """All as large, but for one in the middle like the longest. Forward alone its whole group
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
            keep = min(1.0, rest / over) if over > 0.0 else 1.0
            sizes = [self._least + keep * (size - self._least) for size in sizes]
        sizes[at] = longest
        return sizes

    def _units_around(self, work: float, longest: float) -> list[float]:
        """Sizes of units up to the longest sample that hold the work, or hardly more: a steep rise
        and as late a fall as it takes, then a rise as gentle as it takes."""

        def reaching(rise: Sequence[float], last: int, lacking: float) -> list[float]:
            sizes = self._sizes(rise, last, lacking)
            scale = longest / max(*sizes, TINY)
            return [max(self._least, size * scale) for size in sizes]

        def is_short(rise: Sequence[float], last: int, lacking: float) -> bool:
            return self._sum(reaching(rise, last, lacking)) < work

        steep = self._rising(STEEPER * self._first)
        first = min(self._stages, self._units)
        falls = range(first, max(first, self._units - 1))
        last = first + bisect_left(falls, True, key=lambda unit: not is_short(steep, unit, 1.0))
        # If the last unit lacks 1 / decay, the one before it lacks all, as when that was the last.
        least, most = 1.0 / self._decay if last > first else 1.0, 1.0
        if is_short(steep, last, most):
            # Nothing left but the usual last slot, larger than this.
            least, most = most, min(most, 1.0 - self._lowest)
        if is_short(steep, last, most):
            gentlest = bisected(
                lambda steeper: is_short(self._rising(steeper * self._first), last, most),
                STEEPER,
                1.0,
            )
            return reaching(self._rising(gentlest * self._first), last, most)
        lacking = bisected(lambda lacking: is_short(steep, last, lacking), least, most)
        return reaching(steep, last, lacking)

    def _of_slots(self, sizes: list[float]) -> list[float]:
        if self._group == 1:
            return sizes
        return [size for size in sizes for _ in range(self._group)][: self.count]


def bisected(is_short: Callable[[float], bool], low: float, high: float) -> float:
    """About the least number that is not short."""
    for _ in range(HALVINGS):
        middle = (low + high) / 2.0
        low, high = (middle, high) if is_short(middle) else (low, middle)
    return high


def all_targets(
    targets: Targets, works: Sequence[float], longest: Sequence[float]
) -> list[list[float]]:
    """Targets of all ranks [ranks][slots]. Long samples share ranks: a plateau costs a rank time,
    not the number of slots that reach it.

    Args:
        targets: of the number of slots.
        works: of each rank, as in `Targets.of_rank`.
        longest: costs of micro-batches of one sample each, of all samples, descending.
    """
    left = list(reversed(longest))
    made = []
    for work in works:
        sizes, long = targets.of_rank(max(work, left[-1] if left else 0.0), left[-1] if left else 0)
        made.append(sizes)
        if not long:
            left = []  # those that are left are as short
            continue
        usual = targets.plateau(work)
        for size in sorted(sizes, reverse=True):
            # A slot holds what is a thousandth over its target, too: that delays nothing.
            place = bisect_right(left, size * 1.001) - 1
            if size < usual or place < 0 or left[place] <= usual:
                break
            del left[place]
    return made
