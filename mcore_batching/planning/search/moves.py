"""Single samples moved and swapped between the micro-batches of a step (`pipelines`).

A move takes a sample of one micro-batch to another, perhaps for a cheaper one that comes back; or
it exchanges all that a rank has in two slots, in lockstep that all ranks have. It is kept if it
does not raise the sum of the 64th powers of the pipelines' ends, which the latest decide.
Throughout, the cap and the bound on samples hold, no micro-batch is
emptied, none changes its context-parallel size, and a rank with a placeholder takes a further
sample there. A generator with one seed draws the moves, so they are the same everywhere.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Collection
from operator import attrgetter

from mcore_batching.planning.search.objective import Candidate, Objective
from mcore_batching.planning.search.pipelines import (
    NOWHERE,
    MicroBatch,
    Pipeline,
    micro_batches_of,
)

EFFORT_OF_A_TRY = 40
"""A move that is refused unsimulated costs as much effort as 40 simulated passes, about its CPU
time."""
ROUNDED = 1.0 + 1e-12
"""Ends closer than this are equal: they add up the same costs in another order."""


def drawing() -> Callable[[], float]:
    """Python's Mersenne Twister from one seed: the same numbers from 0 to 1, which is never drawn,
    on every platform and version."""
    # Not `randrange`, whose draws may differ between versions of Python.
    return random.Random(1).random


def improve(step: Candidate, objective: Objective, *, keep: float = 0.0) -> Candidate:
    """Improve a step until its effort is spent or no plan ends sooner.

    Args:
        step: the step, which is left as it is.
        objective: simulates; its effort is used.
        keep: effort that is left over.

    Returns:
        a step that ends no later.
    """
    if objective.effort <= keep:
        return step
    moves = _Moves(step, objective)
    while objective.effort > keep and not objective.cannot_be_beaten(moves.slowest.end):
        objective.effort -= EFFORT_OF_A_TRY
        moves.try_one()
    best = moves.result()
    # A move may raise the latest end by little, if others fall: the step before is then better.
    return best if best.end <= step.end else step


_cost = attrgetter("cost")


class _Moves:
    """A step that is being changed."""

    def __init__(self, step: Candidate, objective: Objective) -> None:
        self._objective = objective
        # Powers of ends are taken in units of the first end: in any other the 64th may overflow.
        self._draw = drawing()
        self._scale = 1.0 / step.end if step.end else 1.0
        self._shared = step.sizes is not None
        self._ranks = micro_batches_of(step, objective)
        self._with_placeholders = {
            number
            for number, rank in enumerate(self._ranks)
            if any(not each.samples for each in rank)
        }
        self._pipelines = self._waiting_for_each_other()
        self.slowest = self._slowest()

    def _waiting_for_each_other(self) -> list[Pipeline]:
        """Ranks in lockstep or that share micro-batches together, others alone."""
        made, columns, after = [], [], 0
        for ranks in self._objective.problem.dims.lockstep_groups:
            columns.append(self._ranks[ranks.start : ranks.stop])
            # A micro-batch that reaches beyond these ranks ties the next ones to the same pipeline.
            after = max(
                after, *(micro_batch.ranks.stop for micro_batch in itertools.chain(*columns[-1]))
            )
            if after == ranks.stop:
                made.append(Pipeline(columns, self._objective))
                columns = []
        return made

    def _slowest(self) -> Pipeline:
        return max(self._pipelines, key=lambda pipeline: pipeline.end)

    def result(self) -> Candidate:
        """The step as it is now, simulated."""
        slots = [[each.samples for each in rank] for rank in self._ranks]
        sizes = [[len(each.ranks) for each in rank] for rank in self._ranks]
        return self._objective.candidate(slots, sizes if self._shared else None)

    def try_one(self) -> None:
        """Try a move, and keep it if it does no harm."""
        mine, theirs = self._two_micro_batches()
        if mine is theirs or not mine.samples:
            return
        # Of the same ranks whole slots, 3 times in 4: that changes no micro-batch, so the cap still
        # holds.
        if mine.ranks == theirs.ranks and self._draw() >= 0.25:
            self._exchange_slots(mine, theirs)
            return
        # The last sample stays: an empty micro-batch would be a placeholder. It may be exchanged.
        # A rank with a placeholder takes a further sample nowhere else.
        may_move = len(mine.samples) > 1 and not (
            theirs.samples and theirs.ranks.start in self._with_placeholders
        )
        given, taken = self._choose(mine, theirs, may_move)
        # Nor may a sample go where it is over the cap of the other size.
        if given < 0 or (
            mine.problem is not theirs.problem
            and (given in theirs.problem.oversize or taken in mine.problem.oversize)
        ):
            return
        # Tried in place, and undone if refused: copying a step for each move would take longer.
        before = mine.samples, theirs.samples
        mine.hold([i for i in mine.samples if i != given] + [taken] * (taken >= 0))
        theirs.hold([*(i for i in theirs.samples if i != taken), given])
        ranks = {*mine.ranks, *theirs.ranks}
        if not (mine.legal and theirs.legal and self._kept(theirs, mine, ranks)):
            mine.hold(before[0])
            theirs.hold(before[1])

    def _two_micro_batches(self) -> tuple[MicroBatch, MicroBatch]:
        """A micro-batch on which the end of a late pipeline depends, and one on which less does,
        half the time of the same rank."""
        draw, ranks = self._draw, self._ranks
        # Written out, not a function: most tries are refused at once, and calls would take long.
        giver, taker = ranks[int(draw() * len(ranks))], ranks[int(draw() * len(ranks))]
        if giver[0].pipeline.end < taker[0].pipeline.end:
            giver, taker = taker, giver
        # Half the time the latest, which alone decides the step; less elsewhere is room for later
        # moves.
        late = self.slowest if draw() >= 0.5 else giver[0].pipeline
        places, weights = late.on_chain, late.weights
        place, other = places[int(draw() * len(places))], places[int(draw() * len(places))]
        if weights[other] > weights[place]:
            place = other
        # In lockstep only the costliest micro-batch of a slot matters.
        micro_batches = late.micro_batches(place)
        mine = max(micro_batches, key=_cost) if len(micro_batches) > 1 else micro_batches[0]
        if draw() >= 0.5:
            taker = ranks[mine.ranks.start]
        theirs, another = taker[int(draw() * len(taker))], taker[int(draw() * len(taker))]
        weights = theirs.pipeline.weights
        return mine, theirs if weights[theirs.place] <= weights[another.place] else another

    def _choose(self, mine: MicroBatch, theirs: MicroBatch, may_move: bool) -> tuple[int, int]:
        """Any sample of a micro-batch, and what comes back for it, so that by the chains known the
        step ends soonest: a cheaper sample, or -1 for none, if that is allowed. Twice -1 if nothing
        lets the step end sooner."""
        costs, late, early = theirs.problem.costs, mine.pipeline, theirs.pipeline
        at, place = mine.place if late is early else NOWHERE, theirs.place
        # How fast the late pipeline gets shorter as cost goes from the one to the other.
        slope = late.weights[mine.place] - (late.weights[place] if late is early else 0.0)
        # In lockstep a micro-batch may grow up to the costliest of its slot for nothing.
        free = early.costs[place] - theirs.cost
        given = mine.samples[int(self._draw() * len(mine.samples))]
        if slope <= 0.0 and not free:
            return -1, -1
        cost = costs[given]
        choices = [(cost - costs[i], i) for i in theirs.samples if costs[i] < cost]
        if may_move:
            choices.append((cost, -1))
        if not choices:
            return -1, -1
        least = min(choices)[0]
        if at == place:
            room = (free / 2.0, free) if free >= least else None
        else:
            room = early.chains.room(place, at, slope=slope, least=least, free=free, end=late.end)
        if room is None:
            return -1, -1
        best, most = room
        # On fewer ranks a sample may cost more than the step takes, which no chain need tell.
        fitting = [(abs(more - best), i) for more, i in choices if more <= most]
        return (given, min(fitting)[1]) if fitting else (-1, -1)

    def _exchange_slots(self, mine: MicroBatch, theirs: MicroBatch) -> None:
        """Exchange all that a rank has in two slots, in lockstep all ranks."""
        pipeline, at, place = mine.pipeline, mine.place, theirs.place
        less = pipeline.costs[at] - pipeline.costs[place]
        if less <= 0.0 or pipeline.weights[at] <= pipeline.weights[place]:
            return
        if not pipeline.chains.room(place, at, slope=0.0, least=less, free=0.0, end=pipeline.end):
            return
        micro_batches = pipeline.micro_batches(at)
        block = range(micro_batches[0].ranks.start, micro_batches[-1].ranks.stop)
        slots = at // pipeline.width, place // pipeline.width
        self._exchange(block, *slots)
        # A placeholder may not come last: the last micro-batch touches every parameter
        # (`placement`).
        real = all(self._ranks[rank][-1].samples for rank in block)
        if not (real and self._kept(theirs, mine, block)):
            self._exchange(block, *slots)

    def _exchange(self, block: range, slot: int, other: int) -> None:
        for rank in self._ranks[block.start : block.stop]:
            rank[slot], rank[other] = rank[other], rank[slot]
            for each in (slot, other):
                rank[each].place = rank[each].pipeline.place(rank[each], each)

    def _kept(self, theirs: MicroBatch, mine: MicroBatch, ranks: Collection[int]) -> bool:
        """Simulate the pipelines of two micro-batches that were changed; True, with the clocks
        brought up to date, if the sum of powers of the ends does not rise."""
        late, early = mine.pipeline, theirs.pipeline
        both = [(early, {theirs.place, mine.place})]
        if late is not early:
            both = [(early, {theirs.place}), (late, {mine.place})]
        # Sorted, as sets have no order of their own, and ranks must add up in the same one.
        changes = [
            (each, [change for place in sorted(places) for change in each.growth(place)])
            for each, places in both
        ]
        total, limit = 0.0, ROUNDED * sum([self._power(each.end) for each, _ in both])
        for each, change in changes:
            total += self._power(each.end_with(change))
            if total > limit:
                return False
        for each, change in changes:
            each.become(change)
        self.slowest = self._slowest()
        return True

    def _power(self, end: float) -> float:
        """The 64th power of an end, in ends of the step before."""
        end *= self._scale
        # Nearly the maximum, yet smaller ends count: a step of equal latest ranks can improve.
        for _ in range(6):  # 2 ** 6 = 64
            end *= end
        return end
