"""A time before which no plan's step ends, closer to the best one than `step_time_floor`.

Proof, in four parts; one more of the floor's, the longest sample's own way, is taken from there.

Chains. A rank's end is the length of the longest of many chains of passes (`critical_path`), each a
sum of weights times costs of slots, and no shorter than any mean of them. P stages have P - 1
levels between them: level d lies between stages P - 1 - d and P - d. A chain that stays on a stage
has weights of 1 + b, b being the backward ratio. Where it goes down level d with the forward pass
of slot n, n gains 1 and n - d loses b: that backward pass comes later on the one stage and earlier
on the other. Where it comes up with the backward pass of slot m, m gains b and m + d loses 1. Slots
that do not exist lose nothing. The chains used here start on the first stage, go down all levels
with slot n, and come up with slots no earlier than n, a higher level with none earlier than a lower
one. Such chains exist for any shares of the slots in ways down and up that keep to this order.

Part A, the mean rank. All slots gain as much if the first of them have shares in ways down, each
what it needs for its gain and for what later ones cost it, and all further ones in ways up, of the
lowest level first, each what it needs for its gain and for what earlier ones cost it. What is left
goes to the first and to the last slot and costs none. Let m be the mean over ranks of the costs of
each of K slots. The latest rank ends no sooner than the mean of ranks, so with equal weights w

    end >= w * sum(m) = w * (K * overhead + a rank's mean work)

Part B, the longest samples. On a rank whose longest sample costs c, some slot's samples cost c or
more. Shares in ways down and in ways up that are both at that slot give it more weight, W, and may
leave others less, w. With the least W over all places of that slot and the mean v of all weights

    end >= w * (work - c) + W * c + v * K * overhead

as W is no less than w. That bounds the rank's work within a time, to less the larger c is. Put
ranks in the order of their longest samples. All samples longer than a rank's longest are on ranks
before it and fit into what those can do; so, longest first, no rank's longest sample comes later
than the latest that the work of the ranks before allows, were their longest the latest allowed.
With those, ranks do most; if that is less than all work, no plan ends by then.

Part C, every K. No plan has fewer micro-batches per rank than hold all tokens, and none needs more
than there are samples; the bound is the least of those of every K between. Weights of K slots are
those of fewer as well: slots of no cost put first take no time, and shares that do for so many
slots do for fewer. Every chain's weights add up to (1 + b) * K or more, those of one that goes down
with the first slot and up with the last to (1 + b) * (P - 1) more. Chains that go down with the
first slot and up with each slot equally often have weights of 1 + b + (b - 1) * (P - 1) / K or more
on the mean, for any K; what that gives is least where its derivative by K is zero.

Forward passes alone end after all costs and P - 1 times the largest one. With ranks in lockstep a
slot costs the most of any rank, which is no less than the rank's or the mean. Ranks that share
micro-batches wait for each other, and end no sooner than by themselves; their work is then the
least that samples can have, and part B is left out, as a shared sample is short on each rank.
"""

from __future__ import annotations

import functools
import heapq
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

from mcore_batching.planning.bounds import step_time_floor
from mcore_batching.planning.cost import ordered_sum
from mcore_batching.planning.problem import Problem

MOST_SLOTS = 128
"""Beyond so many, all numbers of slots have one bound."""
GROUPING = 32
"""Up to so many slots each number of them has a bound; beyond, so many groups each time as many."""
GAINS = (-1.0, -0.75, -0.5, -0.375, -0.25, -0.125, -0.0625, 0.0, 0.03125, 0.0625, 0.125, 0.25)
"""What slots gain beside a long sample's, over the most that a way costs one of them."""
HALVINGS = 12
"""Of the interval in which a share or a gain is looked for."""
NEAR = 1e-4
"""Share of the bound within which it is looked for."""
ROUNDING = 1e-12
"""Share of sums of costs."""


class Weights(NamedTuple):
    """Of slots in a mean of chains, at least."""

    others: float
    """Of each slot but one."""
    one: float
    """Of that one, wherever it is."""
    mean: float
    """Of all slots in the mean."""


def step_time_bound(problem: Problem) -> float:
    """A time before which no plan's step can end, in units of cost; at least `step_time_floor`.

    The interleaved schedule's is the floor.
    """
    floor = step_time_floor(problem)
    if problem.dims.virtual_pipeline > 1 or not problem.num_samples:
        return floor
    ranks, model = problem.num_ranks, problem.cost_model
    work, fixed = ordered_sum(problem.least_costs) / ranks, model.per_micro_batch
    stages = problem.dims.pipeline_parallel
    ratio = None if problem.forward_only else model.backward_ratio
    shared = problem.config.max_context_parallel is not None
    long = None if shared else LongSamples(sorted(problem.costs, reverse=True), ranks)
    first = -(-problem.fewest_rows // ranks)
    # Placeholders in all ranks can be left out, so no step needs more than one sample a slot.
    most = max(problem.num_samples, first)
    # Bound, False if it is final, and groups of numbers of slots, the largest first.
    bounds = []
    while first <= most:
        last = min(most, first + first // (GROUPING + 1)) if first <= MOST_SLOTS else most
        bound = max(floor, _of_any(first, last, stages, ratio, work, fixed))
        bounds.append((bound, first <= MOST_SLOTS, -first, last, False))
        first = last + 1
    # The earliest is looked at again, until that makes it no later.
    heapq.heapify(bounds)
    while bounds[0][1]:
        bound, _, first, last, balanced = bounds[0]
        overheads = -first * fixed
        if not balanced:
            bound = max(bound, even_weight(last, stages, ratio) * (work + overheads))
        elif long:
            bound = long.bound(bound, overheads, slot_weights(last, stages, ratio))
        heapq.heapreplace(bounds, (bound, not balanced, first, last, True))
    return bounds[0][0]


def _of_any(
    fewest: int, most: int, stages: int, ratio: float | None, work: float, fixed: float
) -> float:
    """The bound of part C for all numbers of slots from the fewest to the most."""
    passes = 1.0 if ratio is None else 1.0 + ratio
    at_best = passes * (work + (fewest + stages - 1) * fixed)
    gain = 0.0 if ratio is None else max(0.0, ratio - 1.0) * (stages - 1)
    count = math.sqrt(gain * work / (passes * fixed)) if fixed else math.inf
    count = min(max(count, fewest), most)
    return max(at_best, (passes + gain / count) * (work + count * fixed))


class LongSamples:
    """Costs of a step's samples, which bound its end by part B."""

    def __init__(self, longest_first: list[float], ranks: int) -> None:
        self._costs = longest_first
        self._sums = [0.0, *accumulate(longest_first)]
        self._ranks = ranks

    def bound(self, soonest: float, overheads: float, ways: Sequence[Weights]) -> float:
        """A time by which no step can end; `soonest` where there is no later one."""
        if self._can_end(soonest, overheads, ways):
            return soonest
        latest = 2.0 * soonest
        while not self._can_end(latest, overheads, ways):
            soonest, latest = latest, 2.0 * latest
        while latest > soonest * (1.0 + NEAR):
            middle = (soonest + latest) / 2.0
            if self._can_end(middle, overheads, ways):
                latest = middle
            else:
                soonest = middle
        return soonest

    def _can_end(self, time: float, overheads: float, ways: Sequence[Weights]) -> bool:
        """False where all ranks together cannot do all work by then."""
        done, number = 0.0, 0
        for _ in range(self._ranks):
            longest = self._costs[number]
            most = min(
                longest + (time - mean * overheads - one * longest) / others
                for others, one, mean in ways
            )
            if most < longest * (1.0 - ROUNDING):
                return False
            done += most
            if done >= self._sums[-1] * (1.0 - ROUNDING):
                return True
            # No later sample can be the next rank's longest.
            number = bisect_right(self._sums, done * (1.0 + ROUNDING)) - 1
            number = min(number, len(self._costs) - 1)
        return False


@functools.lru_cache(maxsize=1024)
def slot_weights(count: int, stages: int, ratio: float | None) -> tuple[Weights, ...]:
    """Weights of means of chains, whatever slot holds a long sample; the even ones first.

    They are those of fewer slots as well.

    Args:
        count: slots.
        stages: pipeline stages.
        ratio: cost of a backward pass over its forward pass; None: forward passes alone.
    """
    even = even_weight(count, stages, ratio)
    found = [Weights(even, even, even)]
    if ratio is None:
        found.append(Weights(1.0, float(stages), 1.0 + (stages - 1) / count))
    elif stages > 1 and ratio:
        for part in GAINS:
            gain = part * max(1.0, ratio)
            # Which is 1 + ratio + gain, above nothing however large the ratio is.
            others = min(1.0, ratio) + (1.0 + part) * max(1.0, ratio)
            downs = [_share_down(gain, slot, stages, ratio) for slot in range(count)]
            ups = [_share_up(gain, slot, stages, ratio) for slot in range(count)]
            extra = (stages - 1) * min(
                down + ratio * up for down, up in zip(downs, reversed(ups), strict=True)
            )
            if extra < gain:
                # Nor would that of a larger gain be more.
                break
            found.append(Weights(others, 1.0 + ratio + extra, max(others, 1.0 + ratio)))
    return tuple(found)


@functools.lru_cache(maxsize=1024)
def even_weight(count: int, stages: int, ratio: float | None) -> float:
    """Weight of each slot in the mean of chains of part A.

    Args:
        count: slots.
        stages: pipeline stages.
        ratio: cost of a backward pass over its forward pass; None: forward passes alone.
    """
    if ratio is None:
        return 1.0 + (stages - 1) / count
    if stages == 1 or not ratio:
        return 1.0 + ratio
    # Shares of ways down for a gain of one, from the last slot that they are for to the first.
    sums = [0.0]
    shares: list[float] = []
    for _ in range(count):
        shares.append((1.0 + ratio * ordered_sum(shares[1 - stages :])) / (stages - 1))
        sums.append(sums[-1] + shares[-1])
    least, most = 0.0, (1.0 + ratio) * (stages - 1) / count
    for _ in range(HALVINGS):
        gain = (least + most) / 2.0
        slots = bisect_right(sums, 1.0 / gain) - 1
        if slots < count:
            # The slot after those is one of ways down in part.
            part = (1.0 / gain - sums[slots]) / (sums[slots + 1] - sums[slots])
            first = (1.0 - part) * gain
            if not _ups_suffice(gain, count - slots - 1, stages, ratio, 0.0, first):
                most = gain
                continue
        least = gain
    return 1.0 + ratio + least


def _share_down(gain: float, slots: int, stages: int, ratio: float) -> float:
    """Most of the ways down that a slot can have with so many before it, of a gain each; less than
    none where there are not enough for the others."""
    return _most_share(_downs_suffice, gain, _rounded(slots), stages, ratio)


def _share_up(gain: float, slots: int, stages: int, ratio: float) -> float:
    """Likewise of the ways up, with so many slots after it."""
    return _most_share(_ups_suffice, gain, _rounded(slots), stages, ratio)


def _rounded(slots: int) -> int:
    """No fewer slots, of which there are few different numbers."""
    grain = 1 << max(0, slots.bit_length() - 3)
    return -(-slots // grain) * grain


@functools.lru_cache(maxsize=4096)
def _most_share(
    suffice: Callable[[float, int, int, float, float], bool],
    gain: float,
    slots: int,
    stages: int,
    ratio: float,
) -> float:
    """Largest share for which the rest suffices; less than none if there is none."""
    if suffice(gain, slots, stages, ratio, 1.0):
        return 1.0
    if not suffice(gain, slots, stages, ratio, 0.0):
        return -math.inf
    least, most = 0.0, 1.0
    for _ in range(HALVINGS):
        share = (least + most) / 2.0
        if suffice(gain, slots, stages, ratio, share):
            least = share
        else:
            most = share
    return least


def _downs_suffice(gain: float, slots: int, stages: int, ratio: float, share: float) -> bool:
    """True if each of the slots before one with this share of the ways down can have the gain."""
    shares, whole = [share], share
    for _ in range(slots):
        needed = gain + ratio * ordered_sum(shares[1 - stages :])
        if needed <= 0.0 and gain <= 0.0:
            # Nor do those before it need any.
            break
        shares.append(max(0.0, needed) / (stages - 1))
        whole += shares[-1]
        if whole > 1.0:
            return False
    return True


def _ups_suffice(
    gain: float, slots: int, stages: int, ratio: float, share: float, first: float = 0.0
) -> bool:
    """True if each of the slots after one with this share of all levels' ways up can have the gain.

    Args:
        gain: of each slot.
        slots: after the one.
        stages: pipeline stages.
        ratio: cost of a backward pass over its forward pass.
        share: of the one.
        first: gain of the one beyond that.
    """
    left = [1.0 - share] * (stages - 1)
    lost = [0.0] + [share] * (stages - 1) + [0.0] * (slots + 1)
    level, needed = 0, first / ratio
    for slot in range(slots + 1):
        while needed > 0.0:
            if level == stages - 1:
                return False
            used = min(needed, left[level])
            lost[slot + level + 1] += used
            left[level] -= used
            needed -= used
            if needed > 0.0:
                level += 1
        needed = (gain + lost[slot + 1]) / ratio
    return True
