"""The search for the step that ends first under dynamic CP.

Steps of several forms are made (`form_search`), and single samples moved in the best of them
(`moves`). Then steps in which every micro-batch has one size are looked for by the search
without dynamic CP, for each size under which all samples fit and that a bound does not show to end
later, each with all the effort that a plan for that size alone gets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from mcore_batching.planning.bounds import step_time_floor
from mcore_batching.planning.errors import InflightBoundError
from mcore_batching.planning.plan import MicroBatches
from mcore_batching.planning.problem import Problem
from mcore_batching.planning.search.form_search import FormSearch
from mcore_batching.planning.search.moves import fits_in_memory, improve, most_in_flight, rows_of
from mcore_batching.planning.search.objective import Candidate, Sizes, Slots
from mcore_batching.planning.search.shared_rows import SharedObjective

SHARE_OF_FORMS, SHARE_OF_EACH, STEPS_IMPROVED = 0.35, 0.1, 2
"""Share of the effort for forms, and for moves in each of so many of the best steps before the best
of all gets the rest."""
ABOUT = 1.02
"""Steps of one size come first where their floor is less than so many times that of all plans."""


def search_dynamic(
    problem: Problem,
    start: tuple[Sequence[MicroBatches], Sequence[Sequence[int]]],
    of_one_size: Callable[[Problem], list[Slots]],
) -> Candidate:
    """Look for the step that ends first.

    Args:
        problem: under dynamic CP, with a sample or more.
        start: a legal step, but for the bound on tokens in flight.
        of_one_size: the step that the search without dynamic CP finds.

    Returns:
        a step that ends no later than `start`, if that keeps to the bound on tokens in flight, and
        than any that `of_one_size` finds for a context-parallel size that all samples fit under.

    Raises:
        InflightBoundError: nothing was found that keeps to that bound.
    """
    objective = SharedObjective(problem)
    best: list[Candidate] = []

    def consider(step: Candidate) -> None:
        if fits_in_memory(rows_of(step, objective), objective) and (
            not best or step.end < best[0].end
        ):
            best[:] = [step]

    def try_size(size: int) -> None:
        try:
            found = of_one_size(problem.on_ranks[size])
        except InflightBoundError:
            return
        consider(objective.candidate(*_shared(found, size)))

    consider(_given(objective, start))
    promising = _size_that_may_do(problem)
    if promising is not None:
        try_size(promising)
    if best and objective.cannot_be_beaten(best[0].end):
        return best[0]
    each = SHARE_OF_EACH * objective.effort
    for step in FormSearch(objective).search((1 - SHARE_OF_FORMS) * objective.effort)[
        :STEPS_IMPROVED
    ]:
        consider(step)
        consider(improve(step, objective, keep=objective.effort - each))
    for size in problem.row_sizes:
        soonest = best[0].end if best else math.inf
        if (
            size != promising
            and max(problem.least_sizes) <= size
            and step_time_floor(problem.on_ranks[size]) < soonest
        ):
            try_size(size)
    if not best:
        check_inflight_tokens(problem, start)
    return improve(best[0], objective)


def check_inflight_tokens(
    problem: Problem, step: tuple[Sequence[MicroBatches], Sequence[Sequence[int]]]
) -> None:
    """Check micro-batches and their context-parallel sizes against the bound on tokens in flight.

    Raises:
        InflightBoundError: the first stage of a rank holds more.
    """
    objective = SharedObjective(problem)
    rows = rows_of(_given(objective, step), objective)
    if not fits_in_memory(rows, objective):
        held = most_in_flight(rows, objective)
        raise InflightBoundError(problem.config.max_inflight_tokens, held)


def _given(
    objective: SharedObjective, step: tuple[Sequence[MicroBatches], Sequence[Sequence[int]]]
) -> Candidate:
    ranks, sizes = step
    return objective.candidate(ranks, [list(of_rank) for of_rank in sizes])


def _size_that_may_do(problem: Problem) -> int | None:
    """The least size under which every sample fits, if nothing says that its steps end later."""
    least = max(problem.least_sizes)
    floor = step_time_floor(problem.on_ranks[least])
    return least if floor <= ABOUT * step_time_floor(problem) else None


def _shared(ranks: Sequence[Slots], size: int) -> tuple[list[Slots], Sizes]:
    """The step in which each rank's micro-batches are those of so many; placeholders of one."""
    rows = [[list(samples) for samples in slots] for slots in ranks for _ in range(size)]
    return rows, [[size if samples else 1 for samples in slots] for slots in rows]
