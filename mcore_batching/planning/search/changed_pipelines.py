"""Pipelines of a step while single samples are moved (`local_moves`).

    a rank by itself   is a pipeline of its own
    coupled ranks      share micro-batches in some slots and wait for each other there: one pipeline
    lockstep           all ranks wait for each other in every slot: one pipeline, in which a slot
                       costs as much as its costliest micro-batch

A pipeline remembers the longest chains of passes that its simulations found. It ends no sooner than
any chain takes (`Clock`): so most changes need not be tried, and the others are of the cost
that does most good.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mcore_batching.planning.cost import ordered_sum
from mcore_batching.planning.pipeline import Blocks, Clock, CoupledClock
from mcore_batching.planning.search.chains import Chains, Room
from mcore_batching.planning.search.changed_ranks import Rank, Row
from mcore_batching.planning.search.objective import Objective
from mcore_batching.planning.search.shared_rows import EFFORT_OF_A_PASS, EFFORT_OF_A_RANK

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
        self._clock = self._clock_of_rows()
        self._counted = 0
        self._count_passes()
        self.costs, self.end = self._clock.costs, self._clock.end
        self.weights = self._clock.weights()
        self.chains = Chains()
        self.chains.add(self.weights, self.end)

    def _clock_of_rows(self) -> Clock:
        costs = [max(row.cost for row in slot) for slot in self._slots()]
        return Clock(costs, self._objective.problem.schedule)

    @property
    def ends(self) -> list[float]:
        """Of ranks that are told apart."""
        return self._clock.ends

    def _slots(self) -> list[tuple[Row, ...]]:
        return list(zip(*(rank.rows for rank in self.ranks), strict=True))

    def _count_passes(self) -> None:
        """Take effort for what the clock ran since the last time."""
        passes, self._counted = self._clock.passes_run - self._counted, self._clock.passes_run
        effort = EFFORT_OF_A_PASS / self.width + EFFORT_OF_A_RANK if self.width > 1 else 1.0
        self._objective.count_passes(effort * passes)

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
        end = self._clock.end_with(((at, more), (other, other_more)))
        if end > WORTH_A_CHAIN * self.end:
            self.chains.remember(self._clock.weights_with(), self.costs)
        self._count_passes()
        return end

    def evenness(self) -> float:
        """0, or less if the change that was simulated last lets ranks that end before the last end
        sooner; more if later."""
        return 0.0

    def become(self, change: Change, end: float) -> bool:
        """Make the change that was simulated last, with its end; True if it is for the better."""
        _, at, more, other, other_more = change
        self.chains.change(at, more, other, other_more)
        self._clock.become(((at, more), (other, other_more)))
        end, self.weights = self._clock.end, self._clock.weights()
        self.chains.add(self.weights, end)
        self._count_passes()
        sooner = end < self.end
        self.end = end
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
        for slot in zip(*(rank.rows for rank in ranks), strict=True):
            for row in slot:
                row.offset = row.ranks.start - first
            blocks = {(row.offset, row.offset + len(row.ranks)): None for row in slot}
            self._blocks.append([(start, stop) for start, stop in blocks if stop > start + 1])
        super().__init__(ranks, objective)
        self._find_chain()

    def _clock_of_rows(self) -> Clock:
        costs = [row.cost for slot in self._slots() for row in slot]
        self._coupled = CoupledClock(costs, self._objective.problem.schedule, self._blocks)
        return self._coupled

    def _find_chain(self) -> None:
        self._chain = [place for place, weight in enumerate(self.weights) if weight > 0.0]

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

    def evenness(self) -> float:
        """By the sum of powers of all ranks' ends."""
        clock = self._coupled
        return powers(clock.ends_with(), self.end) - powers(clock.ends, self.end)

    def become(self, change: Change, end: float) -> bool:
        """As for a rank."""
        evener = self.evenness() < 0.0
        sooner = super().become(change, end)
        self._find_chain()
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
