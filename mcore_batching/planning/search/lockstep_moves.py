"""Single samples moved and swapped between micro-batches of ranks that run each slot together.

    heavy      the costliest micro-batch of a slot, which all ranks wait for
    other      another one, at random
    moves      a sample of heavy to other; a sample of heavy for a cheaper one of other;
               all of heavy for the micro-batch of its rank in the slot of other

A move is kept if the step ends no later than before. The cap and the bounds on samples and on
tokens in flight hold throughout, no micro-batch is emptied, and a rank with a placeholder takes a
further sample there. A counter decides which moves are tried, so they are the same everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator

from mcore_batching.planning.problem import Problem
from mcore_batching.planning.search.local_moves import Counter
from mcore_batching.planning.search.objective import (
    Candidate,
    Changes,
    Objective,
    Place,
    Slots,
)

GIVE_UP_AFTER = 2000
"""Pairs of micro-batches in a row between which no move made the step end sooner."""


def improve_lockstep(step: Candidate, objective: Objective, *, keep: float = 0.0) -> Candidate:
    """Improve a step until its effort is spent or nothing has helped for long.

    Args:
        step: the step, which is left as it is.
        objective: simulates; its effort is used.
        keep: effort that is left over.

    Returns:
        a step that ends no later.
    """
    random = Counter()
    state = _State(step, objective)
    in_vain = 0
    while objective.effort > keep and in_vain < GIVE_UP_AFTER:
        if objective.cannot_be_beaten(state.end):
            break
        in_vain += 1
        heavy, other = state.places(random)
        for changes in _moves(state.ranks, heavy, other, objective.problem, random):
            before, latest = state.end, state.latest_after(changes)
            if latest > before or not _fits_in_memory(state.ranks, changes, objective):
                continue
            state.keep(changes)
            if latest < before:
                in_vain = 0
            break
    return Candidate(state.ranks, state.ends)


class _State:
    """A step that is being changed, with the cost of each of its micro-batches."""

    def __init__(self, step: Candidate, objective: Objective) -> None:
        self.ranks = [list(slots) for slots in step.ranks]
        self.ends = list(step.ends)
        self._objective = objective
        self._costs = [objective.slot_costs(slots) for slots in self.ranks]
        self._slowest = [max(slot) for slot in zip(*self._costs, strict=True)]
        self._tried: tuple[dict[Place, float], list[float], float] = ({}, [], 0.0)

    @property
    def end(self) -> float:
        """End of the step."""
        return max(self.ends)

    def places(self, random: Counter) -> tuple[Place, Place]:
        """The costliest micro-batch of a slot, and any other."""
        slot = random.below(len(self._slowest))
        rank = max(range(len(self.ranks)), key=lambda r: (self._costs[r][slot], -r))
        other = (random.below(len(self.ranks)), random.below(len(self._slowest)))
        return (rank, slot), other

    def latest_after(self, changes: Changes) -> float:
        """End of the step with these changes."""
        # Maxima over ranks cost about as much as so many simulated passes.
        self._objective.effort -= 2 * len(self.ranks)
        costs = {place: self._objective.problem.cost(samples) for place, samples in changes.items()}
        slowest = self._slowest[:]
        for number in {slot for _, slot in changes}:
            slowest[number] = max(
                costs.get((rank, number), slots[number]) for rank, slots in enumerate(self._costs)
            )
        end = self._objective.end_of(slowest)
        self._tried = costs, slowest, end
        return end

    def keep(self, changes: Changes) -> None:
        """Make the changes that `latest_after` was asked about last."""
        costs, self._slowest, self.ends[0] = self._tried
        for (rank, slot), samples in changes.items():
            self.ranks[rank][slot], self._costs[rank][slot] = samples, costs[rank, slot]


def _moves(
    ranks: list[Slots], heavy: Place, other: Place, problem: Problem, random: Counter
) -> Iterator[Changes]:
    """Moves that take work off `heavy`; see the module."""
    mine, theirs = ranks[heavy[0]][heavy[1]], ranks[other[0]][other[1]]
    if heavy == other or not mine:
        return
    given = mine[random.below(len(mine))]
    without = [sample for sample in mine if sample != given]
    target = other
    if [] in ranks[other[0]]:
        target = (other[0], ranks[other[0]].index([]))
    joined = [*ranks[target[0]][target[1]], given]
    if without and target != heavy and _holds(joined, problem):
        yield {heavy: without, target: joined}
    if theirs:
        taken = theirs[random.below(len(theirs))]
        swapped = [sample for sample in theirs if sample != taken] + [given]
        without = [*without, taken]
        cheaper = problem.costs[taken] < problem.costs[given]
        if cheaper and _holds(swapped, problem) and _holds(without, problem):
            yield {heavy: without, other: swapped}
    place = (heavy[0], other[1])
    if heavy[1] != other[1] and ranks[place[0]][place[1]]:
        yield {heavy: ranks[place[0]][place[1]], place: mine}


def _holds(samples: list[int], problem: Problem) -> bool:
    """True if these samples may share a micro-batch."""
    if len(samples) == 1:
        return True
    return (
        len(samples) <= problem.max_samples
        and sum(problem.tokens[i] for i in samples) <= problem.capacity
        and not any(i in problem.oversize for i in samples)
    )


def _fits_in_memory(ranks: list[Slots], changes: Changes, objective: Objective) -> bool:
    if objective.max_inflight_tokens is None:
        return True
    return all(
        objective.fits_in_memory(
            [changes.get((rank, slot), samples) for slot, samples in enumerate(ranks[rank])]
        )
        for rank in {rank for rank, _ in changes}
    )
