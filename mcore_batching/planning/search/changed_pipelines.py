"""Pipelines of a step while single samples are moved (`local_moves`).

    a rank by itself   is a pipeline of its own
    coupled ranks      share micro-batches in some slots and wait for each other there: one pipeline
    lockstep           all ranks wait for each other in every slot: one pipeline, in which a slot
                       costs as much as its costliest micro-batch

A pipeline remembers the longest chains of passes that its simulations found. It ends no sooner than
any chain takes (`critical_path`): so most changes need not be tried, and the others are of the cost
that does most good.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mcore_batching.planning.cost import ordered_sum
from mcore_batching.planning.coupled_ranks import Blocks, Ends
from mcore_batching.planning.search.chains import Chains, Room
from mcore_batching.planning.search.changed_ranks import Rank, Row
from mcore_batching.planning.search.objective import Objective
from mcore_batching.planning.search.shared_rows import simulated_together

WORTH_A_CHAIN = 1.0005
"""Where a change would make a rank end so many times later, the chain by which is remembered."""
SAME_SLOT = 4
"""One in so many moves in lockstep is within a slot."""
ON_CHAIN, SAME_RANK = 4, 3
"""Of coupled ranks all but one in so many micro-batches are on the longest chain; one in so many
pairs is of the same rank."""
NEAR = 4
"""Half of the pairs of slots of a rank are no further apart: fewer rounds are simulated."""

Below = Callable[[int], int]
"""The next random number from 0 to a bound."""


def high_power(end: float) -> float:
    """The power, of which moves are to lower the sum over pipelines; `end` in steps before."""
    end *= end
    end *= end
    end *= end
    end *= end
    end *= end
    end *= end
    return end * end


def powers(ends: Sequence[float], unit: float) -> float:
    """Sum of the powers of ranks' ends, in units of one."""
    return ordered_sum(high_power(end / unit) for end in ends)


class Pipeline:
    """A rank by itself, with what decides about moves between its slots."""

    width = 1
    """Ranks that are told apart: costs and weights are of [slots * width]."""

    def __init__(self, ranks: Sequence[Rank], objective: Objective) -> None:
        self._objective = objective
        self.ranks = ranks
        self._count = len(ranks[0].rows)
        self.costs = self._of_rows()
        self.chains = Chains()
        self._rounds = objective.rounds(self.costs) if self.width == 1 else None
        if self._rounds:
            self.end, self.weights = self._rounds.end, self._rounds.weights()
            self.chains.add(self.weights, self.end)
        else:
            self.end = self._simulate(self.costs)
            next(iter(self.chains))[-1] = self.end
            self.weights = self._newest
        self.ends = [self.end]
        """Of ranks that are told apart; not kept up to date where that is one."""

    def _of_rows(self) -> list[float]:
        return [max(row.cost for row in slot) for slot in self._slots()]

    def _slots(self) -> list[tuple[Row, ...]]:
        return list(zip(*(rank.rows for rank in self.ranks), strict=True))

    def _simulate(self, costs: list[float]) -> float:
        """End with these costs; the chain found is remembered."""
        end, self._newest = self._objective.longest_chain(costs)
        self.chains.remember(self._newest, self.costs)
        return end

    def place(self, below: Below) -> tuple[Rank, int]:
        """A rank and slot that the end hangs on little."""
        slot, other = below(self._count), below(self._count)
        return self.ranks[0], slot if self.weights[slot] <= self.weights[other] else other

    def late_place(self, below: Below) -> tuple[Rank, int]:
        """A rank and slot that the end hangs on more."""
        slot, other = below(self._count), below(self._count)
        return self.ranks[0], slot if self.weights[slot] >= self.weights[other] else other

    def two_places(self, below: Below) -> tuple[tuple[Rank, int], tuple[Rank, int]]:
        """Two ranks and slots; the end hangs no less on the first."""
        count, weights = self._count, self.weights
        slot, other, third = below(count), below(count), below(count)
        if weights[other] > weights[slot]:
            slot, other = other, slot
        if below(2):
            other = min(max(slot + below(2 * NEAR + 1) - NEAR, 0), count - 1)
            if weights[slot] < weights[other]:
                slot, other = other, slot
        elif weights[third] < weights[other]:
            other = third
        return (self.ranks[0], slot), (self.ranks[0], other)

    def within(
        self, slot: int, mine: Row, less: float, other: int, theirs: Row, more: float
    ) -> Change:
        """The change if a micro-batch of a slot costs so much less, and one of another more."""
        width = self.width
        return self, other * width + theirs.offset, more, slot * width + mine.offset, -less

    def room(
        self, slot: int, mine: Row, other: int, theirs: Row, least: float, end: float
    ) -> Room | None:
        """How much a micro-batch may cost more by the chains known, if one of another slot costs as
        much less.

        Args:
            slot: the slot that costs less.
            mine: its micro-batch.
            other: the other slot.
            theirs: its micro-batch.
            least: None is returned if it may not cost so much more.
            end: by which the pipeline is to end.
        """
        at, place = slot * self.width + mine.offset, other * self.width + theirs.offset
        slope = self.weights[at] - self.weights[place]
        return self.chains.room_within(at, place, slope, least, end)

    def soonest(self, change: Change, limit: float) -> float:
        """A time before which the pipeline does not end after a change; the first found beyond
        `limit`."""
        return self.chains.soonest(*change[1:], limit)

    def simulated(self, change: Change) -> float:
        """End of the pipeline after a change."""
        _, at, more, other, other_more = change
        if self._rounds:
            self._objective.count_rounds(self._rounds.span(at, other))
            end = self._rounds.end_with(at, more, other, other_more)
            if end > WORTH_A_CHAIN * self.end:
                self._objective.count_rounds(self._count)
                self.chains.remember(self._rounds.weights_with(*change[1:]), self.costs)
            return end
        costs = self.costs[:]
        costs[at] += more
        costs[other] += other_more
        return self._simulate(costs)

    def evenness(self) -> float:
        """0, or less if the change that was simulated last lets ranks that end before the last end
        sooner; more if later."""
        return 0.0

    def become(self, change: Change, end: float) -> bool:
        """Make the change that was simulated last, with its end; True if it is for the better."""
        _, at, more, other, other_more = change
        self.chains.change(at, more, other, other_more)
        self.costs[at] += more
        self.costs[other] += other_more
        if self._rounds:
            self._rounds.become(at, more, other, other_more)
            self._objective.count_rounds(self._count)
            end, self._newest = self._rounds.end, self._rounds.weights()
            self.chains.add(self._newest, end)
        sooner = end < self.end
        self.end, self.weights = end, self._newest
        return sooner


class LockstepRanks(Pipeline):
    """All ranks, which run each slot together."""

    def __init__(self, ranks: Sequence[Rank], objective: Objective) -> None:
        super().__init__(ranks, objective)
        self._costliest = [self._two_costliest(slot) for slot in range(self._count)]

    def _two_costliest(self, slot: int) -> tuple[Rank, float]:
        """A rank with a slot's costliest micro-batch, and what the next costliest one costs."""
        costliest = max(self.ranks, key=lambda rank: rank.rows[slot].cost)
        others = (rank.rows[slot] for rank in self.ranks)
        mine = costliest.rows[slot]
        return costliest, max((row.cost for row in others if row is not mine), default=0.0)

    def two_places(self, below: Below) -> tuple[tuple[Rank, int], tuple[Rank, int]]:
        """The costliest of a slot, and the cheaper of any two of it or of one that the end hangs no
        more on."""
        slot, other = below(self._count), below(self._count)
        if self.weights[other] > self.weights[slot]:
            slot, other = other, slot
        if not below(SAME_SLOT):
            other = slot
        ranks = self.ranks
        early, another = ranks[below(len(ranks))], ranks[below(len(ranks))]
        if another.rows[other].cost < early.rows[other].cost:
            early = another
        return (self._costliest[slot][0], slot), (early, other)

    def within(
        self, slot: int, mine: Row, less: float, other: int, theirs: Row, more: float
    ) -> Change:
        """The change of what the slots cost, if the costliest of one costs less."""
        shrunk = max(mine.cost - less, self._costliest[slot][1])
        if slot == other:
            shrunk = max(shrunk, theirs.cost + more)
            return self, slot, shrunk - self.costs[slot], slot, 0.0
        grown = max(self.costs[other], theirs.cost + more)
        return self, other, grown - self.costs[other], slot, shrunk - self.costs[slot]

    def become(self, change: Change, end: float) -> bool:
        """As for a rank, whose micro-batches already cost what the change makes them."""
        sooner = super().become(change, end)
        for slot in {change[1], change[3]}:
            self._costliest[slot] = self._two_costliest(slot)
        return sooner

    def room(
        self, slot: int, mine: Row, other: int, theirs: Row, least: float, end: float
    ) -> Room | None:
        """As for a rank; a slot costs no more until a micro-batch is its costliest."""
        free = self.costs[other] - theirs.cost
        if slot == other:
            return (free / 2.0, free) if free >= least else None
        room = super().room(slot, mine, other, theirs, least - free, end)
        return room and (room[0] + free, room[1] + free)


class CoupledRanks(Pipeline):
    """Ranks that wait for each other where they share micro-batches."""

    def __init__(self, ranks: Sequence[Rank], objective: Objective) -> None:
        self.width, first = len(ranks), ranks[0].rows[0].ranks.start
        self._blocks: list[Blocks] = []
        self._shared: list[int] = []
        """Ranks that share each micro-batch [slots * ranks]."""
        for slot in zip(*(rank.rows for rank in ranks), strict=True):
            for row in slot:
                row.offset = row.ranks.start - first
            blocks = {(row.offset, row.offset + len(row.ranks)): None for row in slot}
            self._blocks.append([(start, stop) for start, stop in blocks if stop > start + 1])
            self._shared += [len(row.ranks) for row in slot]
        self._passes: Ends = []
        self._first_changed = 0
        super().__init__(ranks, objective)
        self.ends, self._passes = self._ends_tried, self._passes_tried
        self._chain = self._chain_tried

    def _of_rows(self) -> list[float]:
        return [row.cost for slot in self._slots() for row in slot]

    def _simulate(self, costs: list[float]) -> float:
        width = self.width
        self._costs_tried = costs
        self._ends_tried, chain, self._passes_tried = simulated_together(
            self._objective,
            [costs[first : first + width] for first in range(0, len(costs), width)],
            self._blocks,
            before=(self._passes, self._first_changed) if self._passes else None,
        )
        self._newest, length = [0.0] * len(costs), 0.0
        self._chain_tried = [slot * width + rank for rank, slot in chain]
        for place, weight in zip(self._chain_tried, chain.values(), strict=True):
            self._newest[place] = weight
            length += weight * self.costs[place]
        self.chains.add(self._newest, length)
        return max(self._ends_tried)

    def place(self, below: Below) -> tuple[Rank, int]:
        """Any rank and slot."""
        return self.ranks[below(self.width)], below(self._count)

    def late_place(self, below: Below) -> tuple[Rank, int]:
        """Mostly one on the longest chain."""
        if not below(ON_CHAIN):
            return self.place(below)
        slot, rank = divmod(self._chain[below(len(self._chain))], self.width)
        return self.ranks[rank], slot

    def two_places(self, below: Below) -> tuple[tuple[Rank, int], tuple[Rank, int]]:
        """A late one and any other."""
        late, early = self.late_place(below), self.place(below)
        if not below(SAME_RANK):
            early = late[0], early[1]
        return late, early

    def simulated(self, change: Change) -> float:
        """As for a rank; each that shares a micro-batch takes as much longer."""
        _, at, more, other, other_more = change
        costs = self.costs[:]
        for place, each in ((at, more), (other, other_more)):
            for rank in range(place, place + self._shared[place]):
                costs[rank] += each
        self._first_changed = min(at, other) // self.width
        return self._simulate(costs)

    def evenness(self) -> float:
        """By the sum of powers of all ranks' ends."""
        return powers(self._ends_tried, self.end) - powers(self.ends, self.end)

    def become(self, change: Change, end: float) -> bool:
        """As for a rank."""
        evener = self.evenness() < 0.0
        sooner = super().become(change, end)
        self.costs, self._chain = self._costs_tried, self._chain_tried
        self.ends, self._passes = self._ends_tried, self._passes_tried
        return sooner or evener


Change = tuple[Pipeline, int, float, int, float]
"""A pipeline, one of its micro-batches and how much more that costs, and another (or the same)
likewise."""


def pipelines_of(ranks: Sequence[Rank], objective: Objective) -> list[Pipeline]:
    """All ranks in lockstep, or those that share micro-batches together and others alone."""
    if objective.lockstep:
        return [LockstepRanks(ranks, objective)]
    made: list[Pipeline] = []
    first = after = 0
    for number, rank in enumerate(ranks):
        after = max(after, *(row.ranks.stop for row in rank.rows))
        if number + 1 == after:
            kind = Pipeline if after == first + 1 else CoupledRanks
            made.append(kind(ranks[first:after], objective))
            first = after
    return made
