"""A time before which no plan's step ends, closer to the best one than `step_time_floor`.

Proof, in three parts, by means of chains of passes whose weights `chain_weights` gives; one more of
the floor's, the longest sample's own way, is taken from there.

Part A, the mean rank. Let m be the mean over ranks of the costs of each of K slots. The latest rank
ends no sooner than the mean of ranks, so with equal weights w of all slots

    end >= w * sum(m) = w * (K * overhead + a rank's mean work)

Part B, the longest samples. On a rank whose longest sample costs c, some slot's samples cost c or
more. Some means of chains give that slot more weight, W, and may leave others less, w. With the
least W over all places of that slot and the mean v of all weights

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
least that samples can have. Part B then knows of the longest sample alone: s ranks, for one of the
sizes s that it may have, each have a slot that costs as much as it does on each of s or more, and
all work is larger by what it costs at that size beyond the least.
"""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from chain_weights import Weights, even_weight, slot_weights

from mcore_batching.planning.costs.cost import ordered_sum
from mcore_batching.planning.packing.bounds import step_time_floor
from mcore_batching.planning.problem import Problem

MOST_SLOTS, MOST_WEIGHED = 128, 1024
"""Beyond so many, all numbers of slots have one bound; that is part C's where some are beyond so
many."""
GROUPING = 32
"""Up to so many slots each number of them has a bound; beyond, so many groups each time as many."""
NEAR = 1e-4
"""Share of the bound within which it is looked for."""
ROUNDING = 1e-12
"""Share of sums of costs."""


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
    long: LongSamples = SharedSample(problem) if shared else UnsharedSamples(problem)
    first = -(-problem.fewest_rows // ranks)
    # Placeholders in all ranks can be left out, so no step needs more than one sample a slot.
    most = max(problem.num_samples, first)
    # Bound, False if it is final, and groups of numbers of slots, the largest first.
    bounds = []
    while first <= most:
        last = min(most, first + first // (GROUPING + 1)) if first <= MOST_SLOTS else most
        bound = max(floor, _of_any(first, last, stages, ratio, work, fixed))
        bounds.append((bound, last <= MOST_WEIGHED, -first, last, False))
        first = last + 1
    # The earliest is looked at again, until that makes it no later.
    heapq.heapify(bounds)
    while bounds[0][1]:
        bound, _, first, last, balanced = bounds[0]
        overheads = -first * fixed
        if not balanced:
            bound = max(bound, even_weight(last, stages, ratio) * (work + overheads))
        else:
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


class LongSamples(ABC):
    """Samples that bound the end of a step by part B."""

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

    @abstractmethod
    def _can_end(self, time: float, overheads: float, ways: Sequence[Weights]) -> bool:
        """False where all ranks together cannot do all work by then."""


class UnsharedSamples(LongSamples):
    """All samples of a step in which nobody shares any."""

    def __init__(self, problem: Problem) -> None:
        self._costs = sorted(problem.costs, reverse=True)
        self._sums = [0.0, *accumulate(self._costs)]
        self._ranks = problem.num_ranks

    def _can_end(self, time: float, overheads: float, ways: Sequence[Weights]) -> bool:
        done, number = 0.0, 0
        for _ in range(self._ranks):
            longest = self._costs[number]
            most = _most_work(longest, time, overheads, ways)
            if most < longest * (1.0 - ROUNDING):
                return False
            done += most
            if done >= self._sums[-1] * (1.0 - ROUNDING):
                return True
            # No later sample can be the next rank's longest.
            number = bisect_right(self._sums, done * (1.0 + ROUNDING)) - 1
            number = min(number, len(self._costs) - 1)
        return False


class SharedSample(LongSamples):
    """The longest sample of a step under dynamic CP."""

    def __init__(self, problem: Problem) -> None:
        longest = max(range(problem.num_samples), key=problem.lengths.__getitem__)
        least = 1 if longest in problem.oversize else problem.least_sizes[longest]
        others = ordered_sum(problem.least_costs) - problem.least_costs[longest]
        fixed = problem.cost_model.per_micro_batch
        self._ranks = problem.num_ranks
        self._choices = []
        """Its size, its cost on each of so many ranks, and then the work of all ranks."""
        for size, rows in problem.on_ranks.items():
            if size >= least:
                cost = rows.cost([longest]) - fixed
                self._choices.append((size, cost, others + size * rows.costs[longest]))

    def _can_end(self, time: float, overheads: float, ways: Sequence[Weights]) -> bool:
        beside = max(0.0, _most_work(0.0, time, overheads, ways))
        for size, cost, work in self._choices:
            most = _most_work(cost, time, overheads, ways)
            done = size * most + (self._ranks - size) * beside
            if most >= cost * (1.0 - ROUNDING) and done >= work * (1.0 - ROUNDING):
                return True
        return False


def _most_work(longest: float, time: float, overheads: float, ways: Sequence[Weights]) -> float:
    """Most cost of samples on a rank that ends by then, one slot of which costs so much or more."""
    return min(
        longest + (time - mean * overheads - one * longest) / others for others, one, mean in ways
    )
