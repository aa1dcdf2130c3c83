"""A rank's slots under a bound on tokens in flight: changed little, or put in another order."""

from __future__ import annotations

from collections.abc import Iterator

from mcore_batching.planning.pipeline import Excess, excess_tokens
from mcore_batching.planning.search.deal import settle
from mcore_batching.planning.search.objective import Objective, Slots

TRIED = 4
"""Samples, slots that give and slots that take tried in each change, nearest to what is wanted
first."""
CHANGES = 4
"""Most changes for each slot of a rank."""


def lowered(slots: Slots, objective: Objective) -> Slots:
    """Slots with fewer tokens in flight: while too many are, a sample leaves the slots that are in
    flight then, or one of these changes places with another.

    Unlike `spread` it keeps the shape of the step, but it may end above the bound.

    Args:
        slots: of one rank, left as they are.
        objective: has the bound.
    """
    problem, bound = objective.problem, objective.max_inflight_tokens
    assert bound is not None
    made = list(slots)

    def excess() -> Excess:
        tokens = [problem.row_tokens(samples) or problem.placeholder_tokens for samples in made]
        return excess_tokens(tokens, problem.schedule, bound)

    now = excess()
    for _ in range(CHANGES * len(made)):
        for slot, other, *both in _changes(made, now, objective):
            before = made[slot], made[other]
            made[slot], made[other] = both
            after = excess()
            if after.total < now.total:
                now = after
                break
            made[slot], made[other] = before
        else:
            break
    return settle([list(samples) for samples in made], problem.costs)


def _changes(
    slots: Slots, excess: Excess, objective: Objective
) -> Iterator[tuple[int, int, list[int], list[int]]]:
    """Two slots, the first in flight when most tokens are, and samples for each instead."""
    if not excess.total:
        return
    problem = objective.problem

    def size(slot: int) -> int:
        return problem.row_tokens(slots[slot])

    others = sorted((slot for slot in range(len(slots)) if slot not in excess.slots), key=size)
    leaving = sorted(
        (abs(problem.tokens[sample] - excess.most), slot, sample)
        for slot in excess.slots
        if len(slots[slot]) > 1
        for sample in slots[slot]
    )
    for _, slot, sample in leaving[:TRIED]:
        for other in others[:TRIED]:
            joined = [*slots[other], sample]
            fits = problem.row_tokens(joined) <= problem.capacity
            if len(joined) == 1 or (fits and len(joined) <= problem.max_samples):
                yield slot, other, [each for each in slots[slot] if each != sample], joined
    for slot in sorted(excess.slots, key=size, reverse=True)[:TRIED]:
        for other in others[:TRIED]:
            yield slot, other, slots[other], slots[slot]


def spread(slots: Slots, objective: Objective) -> Slots:
    """The same slots in an order in which few tokens are in flight at a time.

    As many slots in a row as there are stages are in flight: dealing them out by size, to every
    stage-th place first up and then down again, gives each run of them about as much.
    """
    problem = objective.problem
    stages = problem.dims.pipeline_parallel

    def tokens(number: int) -> int:
        return sum(problem.tokens[sample] for sample in slots[number])

    by_size = sorted(range(len(slots)), key=lambda number: (-tokens(number), number))
    places: list[int] = []
    for first in range(min(stages, len(slots))):
        column = range(first, len(slots), stages)
        places += column if first % 2 else reversed(column)
    ordered: Slots = [[] for _ in slots]
    for place, number in zip(places, by_size, strict=True):
        ordered[place] = slots[number]
    return settle(ordered, problem.costs)
