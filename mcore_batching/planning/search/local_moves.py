"""Single samples moved and swapped between micro-batches of ranks that run by themselves.

    late, early    two micro-batches, of one rank or of two of which one ends later; early is less
                   often on the longest chain of passes, or on the rank that ends sooner
    moves          a sample of late to early; a sample of late for a cheaper one of early; within a
                   rank, all of late for all of early

A move is kept if it lowers the sum of a high power of the ranks' ends, which the latest decide.
Most moves are refused unsimulated, by chains of passes that were found before (`critical_path`).
The cap and the bounds on samples and on tokens in flight hold throughout, no micro-batch is
emptied, and a rank with a placeholder takes a further sample there. A counter decides which moves
are tried, so they are the same everywhere.
"""

from __future__ import annotations

import random

from mcore_batching.planning.search.objective import Candidate, Objective, Slots

GIVE_UP_AFTER = 12000
"""Moves in a row of which none was kept."""
MOST_CHAINS = 16
"""Chains of passes that are remembered of each rank."""
EFFORT_OF_A_TRY = 30
"""A move that is refused unsimulated takes about as long as so many simulated passes."""
SQUARINGS = 7
BEYOND = 1.0055
"""More than the 2 ** SQUARINGS-th root of 2: no move makes a rank end so many times later than the
later of two, and lowers the sum of their powers."""


class Counter:
    """Python's Mersenne Twister from one seed: the same numbers on every platform and version."""

    def __init__(self) -> None:
        self._random = random.Random(1).random

    def below(self, bound: int) -> int:
        """The next number from 0 to `bound - 1`."""
        return int(self._random() * bound)


def improve(step: Candidate, objective: Objective, *, keep: float = 0.0) -> Candidate:
    """Improve a step until its effort is spent or nothing has helped for long.

    Args:
        step: the step, which is left as it is.
        objective: simulates; its effort is used.
        keep: effort that is left over.

    Returns:
        a step that ends no later.
    """
    moved = _Moved(step, objective)
    in_vain = 0
    while objective.effort > keep and in_vain < GIVE_UP_AFTER and not moved.perfect:
        objective.effort -= EFFORT_OF_A_TRY
        in_vain = 0 if moved.try_one() else in_vain + 1
    best = objective.candidate([rank.slots for rank in moved.ranks])
    return best if best.end <= step.end else step


class _Rank:
    """A rank's micro-batches, with what decides about moves between them."""

    def __init__(self, slots: Slots, objective: Objective) -> None:
        self._objective = objective
        tokens = objective.problem.tokens
        self.slots = slots
        self.costs = objective.slot_costs(slots)
        self.tokens = [sum(tokens[i] for i in samples) for samples in slots]
        self.end, self.weights = objective.longest_chain(self.costs)
        self._newest = self.weights
        self.chains: list[list[float]] = [[*self.weights, self.end]]
        """Weights of slots of chains, and last how long the chain is."""
        self.empty = slots.index([]) if [] in slots else None

    def soonest(self, slot: int, more: float, other: int, limit: float) -> float:
        """A time before which the rank does not end if `slot` costs `more` and `other`, unless
        -1, as much less; the first found beyond `limit`."""
        latest = 0.0
        for number, chain in enumerate(self.chains):
            end = chain[-1] + more * (chain[slot] - chain[other] if other >= 0 else chain[slot])
            if end > latest:
                latest = end
                if end > limit:
                    if number:
                        self.chains.insert(0, self.chains.pop(number))
                    return latest
        return latest

    def simulated(self, costs: list[float]) -> float:
        """End of the rank with other costs of its slots; the chain found is remembered."""
        end, self._newest = self._objective.longest_chain(costs)
        weights = self._newest
        length = 0.0
        for weight, cost in zip(weights, self.costs, strict=True):
            length += weight * cost
        self.chains.insert(0, [*weights, length])
        del self.chains[MOST_CHAINS:]
        return end

    def become(self, costs: list[float], end: float) -> None:
        """Take the costs that were simulated, and their end."""
        changed = [
            (slot, new - old)
            for slot, (new, old) in enumerate(zip(costs, self.costs, strict=True))
            if new != old
        ]
        for chain in self.chains:
            for slot, more in changed:
                chain[-1] += more * chain[slot]
        self.costs, self.end, self.weights = costs, end, self._newest


Changed = tuple[_Rank, list[float], float]
"""A rank, and costs of its slots and its end after a move."""


class _Moved:
    """A step that is being changed."""

    def __init__(self, step: Candidate, objective: Objective) -> None:
        self._objective = objective
        self._random = Counter()
        self._scale = 1.0 / step.end if step.end else 1.0
        self.ranks = [
            _Rank([list(samples) for samples in slots], objective) for slots in step.ranks
        ]
        self._slowest = max(self.ranks, key=lambda rank: rank.end)

    @property
    def perfect(self) -> bool:
        """True if no step ends sooner."""
        return self._objective.cannot_be_beaten(self._slowest.end)

    def try_one(self) -> bool:
        """Try a move; True if it was kept."""
        below, ranks = self._random.below, self.ranks
        late = ranks[below(len(ranks))] if below(2) else self._slowest
        early = late if below(2) else ranks[below(len(ranks))]
        slot, other = below(len(late.slots)), below(len(late.slots))
        if late is early:
            if late.weights[slot] == late.weights[other]:
                return False
            if late.weights[slot] < late.weights[other]:
                slot, other = other, slot
            if not below(4):
                return self._swap_slots(late, slot, other)
        elif late.end < early.end:
            late, early = early, late
        return self._move_sample(late, slot, early, other)

    def _move_sample(self, late: _Rank, slot: int, early: _Rank, other: int) -> bool:
        """Move a sample to a slot, perhaps for one that comes back."""
        below, problem = self._random.below, self._objective.problem
        mine = late.slots[slot]
        if not mine:
            return False
        given, taken = mine[below(len(mine))], -1
        less, tokens = problem.costs[given], problem.tokens[given]
        left = len(mine) - 1
        if below(3) == 0 and left:
            if early.empty is not None:
                other = early.empty
        elif early.slots[other]:
            taken = early.slots[other][below(len(early.slots[other]))]
            less -= problem.costs[taken]
            tokens -= problem.tokens[taken]
        else:
            return False
        if less <= 0.0 or (left and late.tokens[slot] - tokens > problem.capacity):
            return False
        beside = [sample for sample in early.slots[other] if sample != taken]
        if beside and (
            early.tokens[other] + tokens > problem.capacity or len(beside) >= problem.max_samples
        ):
            return False
        if late is early:
            changed = self._within(late, slot, other, less)
        else:
            changed = self._between(late, slot, early, other, less)
        if changed is None:
            return False
        before = mine, early.slots[other]
        late.slots[slot] = [i for i in mine if i != given] + ([taken] if taken >= 0 else [])
        early.slots[other] = [*beside, given]
        if not all(self._objective.fits_in_memory(rank.slots) for rank in (late, early)):
            late.slots[slot], early.slots[other] = before
            return False
        late.tokens[slot] -= tokens
        early.tokens[other] += tokens
        if early.empty is not None:
            early.empty = early.slots.index([]) if [] in early.slots else None
        return self._keep(changed)

    def _swap_slots(self, rank: _Rank, slot: int, other: int) -> bool:
        """Exchange all of two micro-batches of a rank, neither of them a placeholder."""
        less = rank.costs[slot] - rank.costs[other]
        if less <= 0.0 or not (rank.slots[slot] and rank.slots[other]):
            return False
        changed = self._within(rank, slot, other, less)
        if changed is None:
            return False
        slots, tokens = rank.slots, rank.tokens
        slots[slot], slots[other] = slots[other], slots[slot]
        if not self._objective.fits_in_memory(slots):
            slots[slot], slots[other] = slots[other], slots[slot]
            return False
        tokens[slot], tokens[other] = tokens[other], tokens[slot]
        return self._keep(changed)

    def _within(self, rank: _Rank, slot: int, other: int, less: float) -> list[Changed] | None:
        """The rank if one of its slots costs less and another as much more; None if it would end
        later."""
        if rank.soonest(other, less, slot, rank.end) > rank.end:
            return None
        costs = rank.costs[:]
        costs[slot] -= less
        costs[other] += less
        end = rank.simulated(costs)
        return [(rank, costs, end)] if end <= rank.end else None

    def _between(
        self, late: _Rank, slot: int, early: _Rank, other: int, less: float
    ) -> list[Changed] | None:
        """Two ranks if work goes from one to the other; None if the sum of powers would grow."""
        limit = self._power(late.end) + self._power(early.end)
        beyond = BEYOND * late.end
        grown = early.soonest(other, less, -1, beyond)
        if grown > beyond:
            return None
        shrunk = late.soonest(slot, -less, -1, beyond)
        if self._power(grown) + self._power(shrunk) > limit:
            return None
        more, fewer = early.costs[:], late.costs[:]
        more[other] += less
        fewer[slot] -= less
        grown = early.simulated(more)
        if self._power(grown) + self._power(shrunk) > limit:
            return None
        shrunk = late.simulated(fewer)
        if self._power(grown) + self._power(shrunk) > limit:
            return None
        return [(early, more, grown), (late, fewer, shrunk)]

    def _power(self, end: float) -> float:
        power = end * self._scale
        for _ in range(SQUARINGS):
            power *= power
        return power

    def _keep(self, changed: list[Changed]) -> bool:
        for rank, costs, end in changed:
            rank.become(costs, end)
        self._slowest = max(self.ranks, key=lambda rank: rank.end)
        return True
