"""Target sizes of slots that all ranks run together, as ranks with experts between them do.

All ranks have the same targets, and one pipeline's end is the step's. What a slot can be is bounded
from both sides: by the costliest samples, which have to be somewhere, and by the cap.

    shaped   as `Targets` has them, each slot within its bounds
    fitted   then sizes move from slots that the pipeline's critical path takes more often to others

The end is the largest of many sums of weights times sizes, one for each path through the pipeline,
so that it falls along the mean of the weights of critical paths (a subgradient method).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from mcore_batching.planning.costs.cost import ordered_sum
from mcore_batching.planning.pipeline import Clock
from mcore_batching.planning.problem import Problem
from mcore_batching.planning.search.objective import Objective
from mcore_batching.planning.search.targets import Targets, bisected

MOST_SCALED = 8.0
"""Bound of a bisection: slots are scaled up at most 8 times to make up for slots that the cap keeps
small. With 4 or 16 the mean moves by 0.01 %."""
ROUNDED = 1.0 + 1e-7
"""Samples that just fill a slot up are held by it."""
FIT_STEPS, FIRST_STEP = 40, 0.15
"""Steps of fitting, the first by 0.15 of a mean slot, the tenth by half as much. With 15 steps end
0.07 % later in the mean of 65; a first step half or twice as long moves it by 0.05 %."""

Bounds = Sequence[tuple[float, float]]


class Samples(NamedTuple):
    """The samples of a step, costliest first [samples]."""

    alone: Sequence[float]
    """Cost of a micro-batch of each of them alone."""
    filled: Sequence[float]
    """The same filled up to the cap with what is cheaper, at its mean cost a token."""
    costs_until: Sequence[float]
    """Costs of all up to this one, over ranks."""


def lockstep_targets(
    targets: Targets, work: float, samples: Samples, objective: Objective
) -> list[float]:
    """Targets of every rank [slots] where all run a slot together, fitted to the clock unless they
    are even.

    Args:
        targets: of the number of slots.
        work: of each rank.
        samples: of all ranks.
        objective: of the step; fitting uses its effort.
    """
    top = samples.alone[0] if samples.alone else 0.0
    sizes, _ = targets.of_rank(max(work, top), top)
    order = sorted(range(targets.count), key=lambda slot: (-sizes[slot], slot))
    bounds = [(0.0, math.inf)] * targets.count
    ranks, last = objective.problem.dims.data_parallel, len(samples.alone) - 1
    fixed = objective.problem.cost_model.per_micro_batch

    def scaled(scale: float) -> list[float]:
        within, held = list(sizes), 0.0
        for slot in order:
            # The costliest sample that the larger slots do not hold.
            at = bisect_right(samples.costs_until, held)
            within[slot] = scale * sizes[slot]
            if at <= last:
                # The rank with the cheapest of the next samples fills up least.
                most = samples.filled[min(at + ranks - 1, last)]
                bounds[slot] = samples.alone[at], max(samples.alone[at], most)
                within[slot] = _within(within[slot], bounds[slot])
                held += (min(within[slot], most) - fixed) * ROUNDED
        return within

    made = scaled(bisected(lambda scale: ordered_sum(scaled(scale)) < work, 0.0, MOST_SCALED))
    return made if targets.even else _fitted(made, bounds, objective)


def _fitted(sizes: list[float], bounds: Bounds, objective: Objective) -> list[float]:
    """Sizes within bounds, of the same sum, with which the pipeline ends sooner."""
    problem, work = objective.problem, ordered_sum(sizes)
    ratios = over_mean_stage(problem, range(problem.num_samples))
    best, soonest = sizes, math.inf
    for number in range(FIT_STEPS):
        clock = Clock([size * ratio for size in sizes for ratio in ratios], problem.schedule)
        objective.effort -= clock.passes_run
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


def _adding_up(sizes: Sequence[float], bounds: Bounds, work: float) -> list[float]:
    """Sizes within bounds that add up to the work, by as much more for each."""

    def shifted(by: float) -> list[float]:
        return [_within(size + by, of) for size, of in zip(sizes, bounds, strict=True)]

    return shifted(bisected(lambda by: ordered_sum(shifted(by)) < work, -work, work))


def _within(size: float, bounds: tuple[float, float]) -> float:
    least, most = bounds
    return max(least, min(most, size))
