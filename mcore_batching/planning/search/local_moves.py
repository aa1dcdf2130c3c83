"""Single samples moved and swapped between micro-batches of a step.

    late, early    two micro-batches; late is on a rank that ends later, or more often on the
                   longest chain of passes, or the costliest of a slot that all ranks wait for
    moves          a sample of late to early; a sample of late for a cheaper one of early; within a
                   rank, all of late for all of early, by all ranks that share one of them

Ranks that wait for each other are one pipeline (`changed_pipelines`). A move is kept if it does not
raise the sum of a high power of the pipelines' ends, which the latest decide; of a single pipeline,
if that does not end later, nor the ranks in it that end before its last. What is moved is what the
chains of passes known (`chains`) make best: mostly they refuse all there is, unsimulated. The cap
and the bounds on samples and on tokens in flight hold throughout, no micro-batch is emptied, none
changes its context-parallel size, and a rank with a placeholder takes a further sample there. A
counter decides which moves are tried, so they are the same everywhere.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

from mcore_batching.planning.cost import ordered_sum
from mcore_batching.planning.search.changed_pipelines import (
    Below,
    Change,
    Pipeline,
    high_power,
    pipelines_of,
    powers,
)
from mcore_batching.planning.search.changed_ranks import Rank, Row, ranks_of
from mcore_batching.planning.search.objective import Candidate, Objective

GIVE_UP_AFTER = 12000
"""Moves in a row of which none made the step better."""
EFFORT_OF_A_TRY = 40
"""A move that is refused unsimulated takes about as long as so many simulated passes."""
ROUNDED = 1.0 + 1e-12
"""Ends that differ by no more are the same: they are sums in another order."""


def counter() -> Below:
    """Python's Mersenne Twister from one seed: the same numbers on every platform and version."""
    number = random.Random(1).random
    return lambda bound: int(number() * bound)


def improve(step: Candidate, objective: Objective, *, keep: float = 0.0) -> Candidate:
    """Improve a step until its effort is spent or nothing has helped for long.

    Args:
        step: the step, which is left as it is.
        objective: simulates; its effort is used.
        keep: effort that is left over.

    Returns:
        a step that ends no later.
    """
    if objective.effort <= keep:
        return step
    moved = _Moved(step, objective)
    in_vain = 0
    perfect = moved.perfect
    while objective.effort > keep and in_vain < GIVE_UP_AFTER and not perfect:
        objective.effort -= EFFORT_OF_A_TRY
        in_vain += 1
        if moved.try_one():
            in_vain, perfect = 0, moved.perfect
    best = moved.result()
    return best if best.end <= step.end else step


_Place = tuple[Pipeline, Rank, int]
"""A micro-batch: its rank with the pipeline that this is in, and its slot."""


class _Moved:
    """A step that is being changed."""

    def __init__(self, step: Candidate, objective: Objective) -> None:
        self._objective = objective
        self._below = counter()
        self._scale = 1.0 / step.end if step.end else 1.0
        self._shared = step.sizes is not None
        self.ranks = ranks_of(step, objective)
        self._pipelines = pipelines_of(self.ranks, objective)
        self._slowest = max(self._pipelines, key=lambda pipeline: pipeline.end)
        self._ends: list[float] = []
        """Of pipelines after the changes that were simulated last."""

    @property
    def perfect(self) -> bool:
        """True if no step ends sooner."""
        return self._objective.cannot_be_beaten(self._slowest.end)

    def result(self) -> Candidate:
        """The step as it is now, simulated."""
        slots = [[row.samples for row in rank.rows] for rank in self.ranks]
        sizes = [[len(row.ranks) for row in rank.rows] for rank in self.ranks]
        return self._objective.candidate(slots, sizes if self._shared else None)

    def try_one(self) -> bool:
        """Try a move; True if it made the step better."""
        below, pipelines = self._below, self._pipelines
        late = early = self._slowest
        if not self._objective.lockstep:
            late = pipelines[below(len(pipelines))] if below(2) else late
            early = late if below(2) else pipelines[below(len(pipelines))]
        if late is early:
            (giver, slot), (taker, other) = late.two_places(below)
        else:
            if late.end < early.end:
                late, early = early, late
            (giver, slot), (taker, other) = late.late_place(below), early.place(below)
        if self._objective.lockstep and slot != other and not below(4):
            return self._exchange_slots(late, slot, other)
        if giver is taker:
            if slot == other or (
                len(late.ranks) == 1 and late.weights[slot] == late.weights[other]
            ):
                return False
            if not below(4):
                return self._swap_slots(late, giver, slot, other)
        return self._move_sample((late, giver, slot), (early, taker, other))

    def _move_sample(self, giving: _Place, taking: _Place) -> bool:
        """Move a sample to a micro-batch, perhaps for one that comes back."""
        below = self._below
        _, giver, slot = giving
        early, taker, other = taking
        mine, theirs = giver.rows[slot], taker.rows[other]
        samples = mine.samples
        if not samples or mine is theirs:
            return False
        left = len(samples) - 1
        may_move = left > 0 and (taker.empty is None or not below(3))
        if may_move and taker.empty is not None:
            other = taker.empty
            theirs = taker.rows[other]
        chosen = self._choose(giving, (early, taker, other), may_move)
        if chosen is None:
            return False
        given, taken = chosen
        differences = _differences(mine, theirs, given, taken)
        if differences is None:
            return False
        less, more, tokens, further = differences
        if left and mine.tokens - tokens > mine.capacity:
            return False
        beside = len(theirs.samples) - (taken >= 0)
        if beside and (
            theirs.tokens + further > theirs.capacity
            or beside >= self._objective.problem.max_samples
        ):
            return False
        changes = self._changes(giving, (early, taker, other), less, more)
        if not self._sooner(changes):
            return False
        before = samples, theirs.samples
        mine.samples = [i for i in samples if i != given] + ([taken] if taken >= 0 else [])
        theirs.samples = [*(i for i in theirs.samples if i != taken), given]
        mine.tokens -= tokens
        theirs.tokens += further
        if not self._fits_in_memory({*mine.ranks, *theirs.ranks}):
            mine.samples, theirs.samples = before
            mine.tokens += tokens
            theirs.tokens -= further
            return False
        if taker.empty is not None:
            taker.find_empty()
        mine.cost -= less
        theirs.cost += more
        return self._keep(changes)

    def _choose(self, giving: _Place, taking: _Place, may_move: bool) -> tuple[int, int] | None:
        """Any sample of a micro-batch, and what comes back for it, so that by the chains known the
        step ends soonest: a cheaper sample, or -1 for none, if that is allowed. None if nothing
        lets the step end sooner."""
        late, giver, slot = giving
        early, taker, other = taking
        mine, theirs = giver.rows[slot], taker.rows[other]
        costs, samples = theirs.costs, mine.samples
        given = samples[self._below(len(samples))]
        cost = costs[given]
        choices = [(cost - costs[i], i) for i in theirs.samples if costs[i] < cost]
        if may_move:
            choices.append((cost, -1))
        if not choices:
            return None
        least = min(choices)[0]
        if late is early:
            room = late.room(slot, mine, other, theirs, least, late.end)
        else:
            slope = late.weights[slot * late.width + mine.offset]
            place, end = other * early.width + theirs.offset, late.end
            room = early.chains.room(place, slope, least, end)
        if room is None:
            return None
        even, most = room
        # On fewer ranks a sample may cost more than the step takes, which no chain need tell.
        fitting = [(abs(more - even), i) for more, i in choices if more <= most]
        return (given, min(fitting)[1]) if fitting else None

    def _swap_slots(self, pipeline: Pipeline, rank: Rank, slot: int, other: int) -> bool:
        """Exchange all of two micro-batches of a rank, neither of them a placeholder."""
        mine, theirs = rank.rows[slot], rank.rows[other]
        if len(mine.ranks) > 1 or len(theirs.ranks) > 1:
            return self._swap_columns(pipeline, slot, other, max(mine.ranks, theirs.ranks, key=len))
        less = mine.cost - theirs.cost
        if less <= 0.0 or not (mine.samples and (theirs.samples or slot < len(rank.rows) - 1)):
            return False
        changes = self._changes((pipeline, rank, slot), (pipeline, rank, other), less, less)
        end = pipeline.end
        if pipeline.soonest(changes[0], end) > end or not self._sooner(changes):
            return False
        rank.rows[slot], rank.rows[other] = theirs, mine
        if not self._fits_in_memory(mine.ranks):
            rank.rows[slot], rank.rows[other] = mine, theirs
            return False
        rank.find_empty()
        return self._keep(changes)

    def _exchange_slots(self, pipeline: Pipeline, slot: int, other: int) -> bool:
        """Exchange two slots of all ranks, which run in lockstep."""
        less = pipeline.costs[slot] - pipeline.costs[other]
        both = [rank.rows[place] for rank in self.ranks for place in (slot, other)]
        to_last = len(pipeline.costs) - 1 in (slot, other)
        if less == 0.0 or (to_last and not all(row.samples for row in both)):
            return False
        change = (pipeline, other, less, slot, -less)
        end = pipeline.end
        if pipeline.soonest(change, end) > end or not self._sooner([change]):
            return False
        self._exchange(self.ranks, slot, other)
        if not self._fits_in_memory(range(len(self.ranks))):
            self._exchange(self.ranks, slot, other)
            return False
        return self._keep([change])

    def _swap_columns(self, pipeline: Pipeline, slot: int, other: int, block: range) -> bool:
        """Exchange all that the ranks of a block have in two slots. This changes who waits for
        whom, so that chains found before say nothing of it."""
        ranks = [self.ranks[number] for number in block]
        both = [row for rank in ranks for row in (rank.rows[slot], rank.rows[other])]
        if any(len(row.ranks) > len(block) for row in both):
            return False
        last = len(ranks[0].rows) - 1
        if last in (slot, other) and not all(
            rank.rows[slot + other - last].samples for rank in ranks
        ):
            return False
        self._exchange(ranks, slot, other)
        if self._fits_in_memory(block):
            made = type(pipeline)(pipeline.ranks, self._objective)
            if powers(made.ends, pipeline.end) <= powers(pipeline.ends, pipeline.end):
                self._pipelines[self._pipelines.index(pipeline)] = made
                self._slowest = max(self._pipelines, key=lambda pipeline: pipeline.end)
                return made.end < pipeline.end
        self._exchange(ranks, slot, other)
        return False

    def _exchange(self, ranks: list[Rank], slot: int, other: int) -> None:
        for rank in ranks:
            rank.rows[slot], rank.rows[other] = rank.rows[other], rank.rows[slot]
            rank.find_empty()

    def _fits_in_memory(self, ranks: Iterable[int]) -> bool:
        bounded = self._objective.max_inflight_tokens is not None
        return not bounded or all(self.ranks[i].fits_in_memory(self._objective) for i in ranks)

    def _changes(self, giving: _Place, taking: _Place, less: float, more: float) -> list[Change]:
        """Changes of the pipelines if one micro-batch costs so much less, and another more."""
        late, giver, slot = giving
        early, taker, other = taking
        mine, theirs = giver.rows[slot], taker.rows[other]
        if late is early:
            return [late.within(slot, mine, less, other, theirs, more)]
        here = slot * late.width + mine.offset
        there = other * early.width + theirs.offset
        return [(early, there, more, there, 0.0), (late, here, -less, here, 0.0)]

    def _sooner(self, changes: list[Change]) -> bool:
        """Simulate changes; True if they make the step no worse."""
        pipeline = changes[0][0]
        if len(changes) == 1:
            self._ends = [pipeline.simulated(changes[0])]
            total, limit = self._ends[0], pipeline.end
        else:
            other, at, less, _, _ = changes[1]
            limit = self._power(pipeline.end) + self._power(other.end)
            grown = pipeline.simulated(changes[0])
            if grown > other.end:
                return False
            soonest = other.end + less * other.weights[at]
            if self._power(grown) + self._power(soonest) > limit:
                return False
            shrunk = other.simulated(changes[1])
            self._ends = [grown, shrunk]
            total = self._power(grown) + self._power(shrunk)
        if total > ROUNDED * limit or (
            total >= limit and ordered_sum(change[0].evenness() for change in changes) > 0.0
        ):
            return False
        return True

    def _power(self, end: float) -> float:
        return high_power(end * self._scale)

    def _keep(self, changes: list[Change]) -> bool:
        """Make changes of pipelines that were simulated; True if one ends sooner, or those of its
        ranks that end before its last."""
        better = [
            change[0].become(change, end) for change, end in zip(changes, self._ends, strict=True)
        ]
        self._slowest = max(self._pipelines, key=lambda pipeline: pipeline.end)
        return any(better)


def _differences(
    mine: Row, theirs: Row, given: int, taken: int
) -> tuple[float, float, int, int] | None:
    """Cost that a micro-batch loses and another gains if a sample of the first goes there, and
    perhaps one (-1: none) comes back; tokens that it loses, and the other gains.

    None if the first would not cost less, or a sample is too long for where it goes.
    """
    less = mine.costs[given] - (mine.costs[taken] if taken >= 0 else 0.0)
    if less <= 0.0:
        return None
    tokens = mine.tokens_of[given] - (mine.tokens_of[taken] if taken >= 0 else 0)
    if mine.problem is theirs.problem:
        return less, less, tokens, tokens
    if given in theirs.problem.oversize or taken in mine.problem.oversize:
        return None
    more = theirs.costs[given] - (theirs.costs[taken] if taken >= 0 else 0.0)
    further = theirs.tokens_of[given] - (theirs.tokens_of[taken] if taken >= 0 else 0)
    return less, more, tokens, further
