"""The search for the step that ends first under dynamic CP.

Steps of several forms are made (`shared_forms`), and single samples moved in the best of them
(`shared_moves`). Steps in which every micro-batch has one size, of each size under which all
samples fit and that could end sooner, are looked for by the search without dynamic CP.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from mcore_batching.planning.bounds import step_time_floor
from mcore_batching.planning.problem import Problem
from mcore_batching.planning.search.objective import Objective, Slots
from mcore_batching.planning.search.shared_forms import SharedForms
from mcore_batching.planning.search.shared_moves import improve_shared
from mcore_batching.planning.search.shared_rows import SharedObjective, SharedStep, Sizes

SHARE_OF_FORMS, SHARE_OF_EACH, STEPS_IMPROVED = 0.35, 0.2, 2
"""Share of the effort for forms, and for moves in each of so many of the best steps before the best
of all gets the rest."""
ABOUT = 1.02
"""Steps of one size come first where their floor is less than so many times that of all plans."""
SHORT, FAR, FEW = 8, 1.06, 48
"""The search for steps of one size is run with a SHORT-th of the effort first where there are more
than FEW samples; with all of it only if that ends less than FAR times as late as the best."""


def search_dynamic(
    problem: Problem,
    start: tuple[Sequence[Sequence[Sequence[int]]], Sequence[Sequence[int]]],
    of_one_size: Callable[[Problem], list[Slots]],
) -> SharedStep:
    """Look for the step that ends first.

    Args:
        problem: under dynamic CP, with a sample or more.
        start: a legal step.
        of_one_size: the step that the search without dynamic CP finds.

    Returns:
        a step that ends no later than `start`, and than any that `of_one_size` finds for a
        context-parallel size that all samples fit under, unless a short search for it stays far
        behind.
    """
    objective = SharedObjective(problem)
    ranks, sizes = start
    best = objective.step(ranks, [list(of_rank) for of_rank in sizes])
    promising = _size_that_may_do(problem)
    if promising is not None:
        rows = problem.on_ranks[promising]
        best = min(best, objective.step(*_shared(of_one_size(rows), promising)), key=_end)
        if objective.cannot_be_beaten(best.end):
            return best
    effort = objective.effort
    found = SharedForms(objective).search(effort * (1 - SHARE_OF_FORMS))
    for step in found[:STEPS_IMPROVED]:
        kept = objective.effort - SHARE_OF_EACH * effort
        best = min(best, step, improve_shared(step, objective, keep=kept), key=_end)
    for size in problem.row_sizes:
        rows = problem.on_ranks[size]
        if size == promising:
            continue
        if max(problem.least_sizes) <= size and _may_end_before(best.end, rows, of_one_size):
            best = min(best, objective.step(*_shared(of_one_size(rows), size)), key=_end)
    return improve_shared(best, objective)


def _size_that_may_do(problem: Problem) -> int | None:
    """The least size under which every sample fits, if nothing says that its steps end later."""
    least = max(problem.least_sizes)
    floor = step_time_floor(problem.on_ranks[least])
    return least if floor <= ABOUT * step_time_floor(problem) else None


def _end(step: SharedStep) -> float:
    return step.end


def _may_end_before(
    end: float, problem: Problem, of_one_size: Callable[[Problem], list[Slots]]
) -> bool:
    """False if no step of this size ends sooner, or a short search stays far from it."""
    if step_time_floor(problem) >= end:
        return False
    config = problem.config
    short = dataclasses.replace(config, plan_effort=max(1, config.plan_effort // SHORT))
    if problem.num_samples <= FEW:
        return True
    objective = Objective(dataclasses.replace(problem, config=short))
    return objective.candidate(of_one_size(objective.problem)).end < FAR * end


def _shared(ranks: Sequence[Slots], size: int) -> tuple[list[Slots], Sizes]:
    """The step in which each rank's micro-batches are those of so many; placeholders of one."""
    rows = [[list(samples) for samples in slots] for slots in ranks for _ in range(size)]
    return rows, [[size if samples else 1 for samples in slots] for slots in rows]
