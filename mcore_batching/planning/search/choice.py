"""The search: steps are made of several kinds, then single samples are moved in the best.

1. Of every other number of slots a step is made, then of those beside the best two, also with a
   gentle rise. With many ranks, some of these stand for all.
2. Of the best numbers steps are made with other sizes of the first slot; where order matters
   little, and if some ranks stood for all, they are made once more with more rounds.
3. Single samples are moved in the best few (`moves`), in fewer and fewer of them.

A step that no plan beats ends this at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from mcore_batching.planning.search.moves import improve
from mcore_batching.planning.search.objective import Candidate, Objective, Ranks, Slots
from mcore_batching.planning.search.steps import EVEN, FIRSTS, USUAL, Steps, thinned
from mcore_batching.planning.search.targets import Kind

FEW_RANKS, FEW_SAMPLES, ENOUGH_SAMPLES = 8, 512, 4096
"""Numbers of slots are compared on a thinned problem: 8 of R ranks with every R/8-th sample, or as
many ranks as hold 512 samples at least and 4096 at most, unless that is more than half of them.
Without the 512, steps of 2,048 samples on 256 ranks ended up to 6 % later; with 8192 or 1024 for
4096, one of 16,384 long-tailed samples on DP16×PP4 ended 0.6 and 1.1 % later."""
EFFORT_OF_MOVES = 0.5
"""Share of the effort kept for moves: the search for better kinds of steps ends there. With 0.4
steps end 0.04 % later in the mean."""
MOST_MOVED = 2
"""Steps, of different numbers of slots, in which samples are moved before the better one goes on.
With 4 steps end 0.05 % later in the mean."""


def search(objective: Objective, starts: Iterable[Ranks]) -> list[Slots]:
    """Look for the step that ends first.

    Args:
        objective: of the step; its effort is used up at most.
        starts: legal plans [ranks][slots]; the result ends no later than any of them.

    Returns:
        every rank's slots, the same number for each.
    """
    # Kept in the running to the end: the result is then no later than any rule's plan.
    found = list(map(objective.candidate, starts))
    # A start may be as good as the bound; then nothing is left to look for.
    if not any(objective.cannot_be_beaten(step.end) for step in found):
        found += _made(objective)
    return _moved(found, objective).ranks


def _made(objective: Objective) -> list[Candidate]:
    """Steps of the numbers of slots that do best."""
    whole = steps = Steps(objective)
    keep = EFFORT_OF_MOVES * objective.effort
    held = max(1, objective.problem.num_samples) / whole.ranks
    few = max(2, min(max(FEW_RANKS, math.ceil(FEW_SAMPLES / held)), int(ENOUGH_SAMPLES / held)))
    if whole.ranks >= 2 * few:
        steps = thinned(whole, few)
    _compare_counts(steps, keep)
    _compare_firsts(steps, keep)
    order = steps.soonest
    if steps is not whole:
        # The thinned problem was searched on the same budget.
        objective.effort = steps.objective.effort
        # Of each number its best kind alone: on all ranks it is the numbers that may change places.
        best = {kind.num_slots: kind for kind in reversed(order)}
        order = sorted(best.values(), key=order.index)[:2]
    if steps is not whole or not objective.problem.schedule.alternates:
        for kind in order:
            if whole.perfect or (whole.soonest and objective.effort < keep):
                break
            whole.make(kind, in_vain=3)
    found = [whole.best[kind] for kind in whole.soonest]
    if not (whole.perfect or objective.problem.schedule.alternates or objective.spent):
        found += filter(None, map(whole.folded, whole.counts()[:3]))
    return found


def _compare_counts(steps: Steps, keep: float) -> None:
    """Make steps of every other number of slots, then of those beside the best two."""
    counts, objective = steps.counts(), steps.objective
    # Far apart first: should the effort end early, it has been spent on the whole range.
    for at in sorted({*range(0, len(counts), 2), len(counts) - 1}, key=_far_apart):
        if steps.perfect or (objective.spent and steps.made):
            break
        steps.make(Kind(counts[at], USUAL))
        if objective.problem.schedule.which_cost and not steps.perfect:
            steps.make(Kind(counts[at], USUAL, fades=True))
    for count in reversed(counts):
        if steps.soonest:
            break
        # Where samples fit into no others: even micro-batches, whatever effort is left.
        steps.make(Kind(count, EVEN))
    rises = objective.problem.schedule.alternates and not objective.problem.dims.in_lockstep
    for kind in steps.soonest[:2] if rises else ():
        if steps.perfect or objective.spent:
            break
        steps.make(kind._replace(gentle=True), like=kind)
    while True:
        new = {
            kind._replace(num_slots=count)
            for kind in steps.soonest[:2]
            for at in [counts.index(kind.num_slots)]
            for count in counts[max(0, at - 1) : at + 2]
        } - steps.made.keys()
        # Sorted: a set promises no order, and ranks must make the same plan.
        for kind in sorted(new):
            if steps.perfect or objective.spent:
                break
            # The nearest number's ranks are even already, which saves rounds.
            like = min(sorted(steps.made), key=lambda made: abs(made.num_slots - kind.num_slots))
            steps.make(kind, like=like)
        if not new or steps.perfect or objective.effort < keep:
            return


def _far_apart(index: int) -> int:
    """A key that sorts indices so that each is far from those before: its 16 bits, reversed."""
    return int(f"{index:016b}"[::-1], 2)


def _compare_firsts(steps: Steps, keep: float) -> None:
    """Make steps of all sizes of the first slot, of the best numbers of slots."""
    objective = steps.objective
    # Where ranks run together sizes are fitted, whatever the first was.
    if objective.problem.dims.in_lockstep or not objective.problem.schedule.alternates:
        return
    for number, kind in enumerate(steps.soonest):
        for first in FIRSTS:
            # Of the best number all are tried, whatever effort that leaves for moves.
            if steps.perfect or (number and objective.effort < keep):
                return
            other = kind._replace(first=first)
            if other not in steps.made:
                steps.make(other, like=kind)


def _moved(found: Sequence[Candidate], objective: Objective) -> Candidate:
    """The best step after single samples were moved: of the best few with half of the effort, of
    half of them with half of the rest, and so on."""
    found = sorted(found, key=lambda step: step.end)
    # One of each number: steps of one number differ by what moves change anyway.
    of_count = {len(step.ranks[0]): step for step in reversed(found)}
    steps = sorted(of_count.values(), key=lambda step: step.end)[:MOST_MOVED]
    while not (objective.cannot_be_beaten(steps[0].end) or objective.spent):
        share = objective.effort / len(steps) / min(2, len(steps))
        steps = [improve(step, objective, keep=objective.effort - share) for step in steps]
        steps.sort(key=lambda step: step.end)
        if len(steps) == 1:
            break
        steps = steps[: len(steps) // 2]
    return steps[0]
