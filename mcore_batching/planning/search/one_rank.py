"""Slots of one rank alone, whose samples stay on it: dealt to targets, without moves.

All ranks take one number of slots, without knowing each other's samples: `ends_by_count` is what
they tell, `best_slots` what they make of the number that is best for all.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from mcore_batching.planning.problem import Problem
from mcore_batching.planning.search.objective import Objective, Slots
from mcore_batching.planning.search.steps import EVEN, FIRSTS, USUAL, Steps
from mcore_batching.planning.search.targets import Kind


def best_slots(problem: Problem, count: int) -> Slots | None:
    """The slots in which one rank's step ends first, looked for among targets alone.

    Args:
        problem: the rank's samples.
        count: number of slots.

    Returns:
        the slots; None if no targets hold the samples.
    """
    steps = _of_one(problem)
    for kind in (Kind(count, first, gentle) for gentle in (False, True) for first in FIRSTS):
        if steps.best and steps.objective.spent:
            break
        steps.make(kind)
    if not steps.best:
        steps.make(Kind(count, EVEN))
    return steps.best[steps.soonest[0]].ranks[0] if steps.best else None


def ends_by_count(problem: Problem, counts: Sequence[int]) -> list[float]:
    """End of one rank's step with each number of slots, with a few targets each.

    Beyond the numbers that are of any use, and once effort is spent, the end is taken to grow by a
    micro-batch's overhead.

    Args:
        problem: the rank's samples.
        counts: numbers of slots, ascending.

    Returns:
        the ends [counts], infinite where the samples do not fit.
    """
    steps = _of_one(problem)
    useful = steps.counts()
    overhead = problem.cost_model.per_micro_batch * problem.schedule.cost_of_passes
    ends: list[float] = []
    last, before = (math.inf, 0), 0
    for count in counts:
        beyond, before = before >= useful[-1], count
        if (beyond or steps.objective.spent) and last[0] < math.inf:
            ends.append(last[0] + (count - last[1]) * overhead)
            continue
        end = _end_with(steps, count) if count >= useful[0] else math.inf
        if end < math.inf:
            last = end, count
        ends.append(end)
    return ends


def _end_with(steps: Steps, count: int) -> float:
    """End of a rank's step of `count` slots; infinite where they do not hold the samples."""
    kinds = [Kind(count, USUAL), Kind(count, USUAL, gentle=True), Kind(count, EVEN)]
    for kind in kinds:
        if kind.first < EVEN or not any(each in steps.best for each in kinds):
            steps.make(kind)
    return min((steps.best[kind].end for kind in kinds if kind in steps.best), default=math.inf)


def _of_one(problem: Problem) -> Steps:
    dims = dataclasses.replace(problem.dims, data_parallel=1, expert_parallel=1)
    return Steps(Objective(dataclasses.replace(problem, dims=dims)))
