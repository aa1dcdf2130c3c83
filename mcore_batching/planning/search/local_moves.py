"""Single samples moved and swapped between micro-batches of a step.

    late, early    two micro-batches; late is on a rank that ends later, or more often on the
                   longest chain of passes, or the costliest of a slot that all ranks wait for
    moves          a sample of late to early; a sample of late for a cheaper one of early; within a
                   rank, all of late for all of early

Ranks run by themselves, each a pipeline of its own; with expert parallelism they run each slot
together, so that all are one pipeline, in which a slot costs as much as its costliest micro-batch.
A move is kept if it does not raise the sum of a high power of the pipelines' ends, which the latest
decide; of a single pipeline, if that does not end later. Most moves are refused unsimulated, by
chains of passes that were found before (`critical_path`). The cap and the bounds on samples and on
tokens in flight hold throughout, no micro-batch is emptied, and a rank with a placeholder takes a
further sample there. A counter decides which moves are tried, so they are the same everywhere.
"""

from __future__ import annotations

import random

from mcore_batching.planning.search.changed_ranks import Change, Pipeline, Rank
from mcore_batching.planning.search.objective import Candidate, Objective

GIVE_UP_AFTER = 12000
"""Moves in a row of which none made the step better."""
EFFORT_OF_A_TRY = 30
"""A move that is refused unsimulated takes about as long as so many simulated passes."""
EFFORT_OF_A_RANK = 2
"""So many more for each rank whose micro-batches share a slot, for the costliest among them."""
SQUARINGS = 7
BEYOND = 1.0055
"""More than the 2 ** SQUARINGS-th root of 2: no move makes a pipeline end so many times later than
the later of two, and lowers the sum of their powers."""


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


def high_power(end: float) -> float:
    """The power, of which moves are to lower the sum over pipelines; `end` in steps before."""
    for _ in range(SQUARINGS):
        end *= end
    return end


_Place = tuple[Pipeline, Rank, int]
"""A micro-batch: its rank with the pipeline that this is in, and its slot."""


class _Moved:
    """A step that is being changed."""

    def __init__(self, step: Candidate, objective: Objective) -> None:
        self._objective = objective
        self._random = Counter()
        self._scale = 1.0 / step.end if step.end else 1.0
        self.ranks = [Rank([list(samples) for samples in slots], objective) for slots in step.ranks]
        together = [self.ranks] if objective.lockstep else [[rank] for rank in self.ranks]
        self._pipelines = [Pipeline(ranks, objective) for ranks in together]
        self._slowest = max(self._pipelines, key=lambda pipeline: pipeline.end)
        self._ends: list[float] = []
        """Of pipelines after the changes that were simulated last."""

    @property
    def perfect(self) -> bool:
        """True if no step ends sooner."""
        return self._objective.cannot_be_beaten(self._slowest.end)

    def try_one(self) -> bool:
        """Try a move; True if it made the step better."""
        below, pipelines = self._random.below, self._pipelines
        late = pipelines[below(len(pipelines))] if below(2) else self._slowest
        early = late if below(2) else pipelines[below(len(pipelines))]
        slot, other = below(len(late.costs)), below(len(late.costs))
        if late is not early and late.end < early.end:
            late, early = early, late
        elif late is early and late.weights[slot] < late.weights[other]:
            slot, other = other, slot
        giver = late.costliest(slot)
        taker = early.ranks[0] if len(early.ranks) == 1 else early.ranks[below(len(early.ranks))]
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
        below, problem = self._random.below, self._objective.problem
        _, giver, slot = giving
        early, taker, other = taking
        mine = giver.slots[slot]
        if not mine:
            return False
        given, taken = mine[below(len(mine))], -1
        less, tokens = problem.costs[given], problem.tokens[given]
        left = len(mine) - 1
        if below(3) == 0 and left:
            if taker.empty is not None:
                other = taker.empty
        elif taker.slots[other]:
            taken = taker.slots[other][below(len(taker.slots[other]))]
            less -= problem.costs[taken]
            tokens -= problem.tokens[taken]
        else:
            return False
        if less <= 0.0 or (left and giver.tokens[slot] - tokens > problem.capacity):
            return False
        beside = [sample for sample in taker.slots[other] if sample != taken]
        if beside and (
            taker.tokens[other] + tokens > problem.capacity or len(beside) >= problem.max_samples
        ):
            return False
        if not self._sooner(changes := self._changes(giving, (early, taker, other), less)):
            return False
        before = mine, taker.slots[other]
        giver.slots[slot] = [i for i in mine if i != given] + ([taken] if taken >= 0 else [])
        taker.slots[other] = [*beside, given]
        if not all(self._objective.fits_in_memory(rank.slots) for rank in (giver, taker)):
            giver.slots[slot], taker.slots[other] = before
            return False
        giver.tokens[slot] -= tokens
        taker.tokens[other] += tokens
        if taker.empty is not None:
            taker.empty = taker.slots.index([]) if [] in taker.slots else None
        giver.costs[slot] -= less
        taker.costs[other] += less
        return self._keep(changes)

    def _swap_slots(self, pipeline: Pipeline, rank: Rank, slot: int, other: int) -> bool:
        """Exchange all of two micro-batches of a rank, neither of them a placeholder."""
        slots, costs, tokens = rank.slots, rank.costs, rank.tokens
        less = costs[slot] - costs[other]
        if less <= 0.0 or not (slots[slot] and slots[other]):
            return False
        changes = self._changes((pipeline, rank, slot), (pipeline, rank, other), less)
        if not self._sooner(changes):
            return False
        slots[slot], slots[other] = slots[other], slots[slot]
        if not self._objective.fits_in_memory(slots):
            slots[slot], slots[other] = slots[other], slots[slot]
            return False
        tokens[slot], tokens[other] = tokens[other], tokens[slot]
        costs[slot], costs[other] = costs[other], costs[slot]
        return self._keep(changes)

    def _changes(self, giving: _Place, taking: _Place, less: float) -> list[Change]:
        """Changes of the pipelines if so much work goes from one micro-batch to another."""
        late, giver, slot = giving
        early, taker, other = taking
        if late is not early:
            return [(early, other, less, other, 0.0), (late, slot, -less, slot, 0.0)]
        if len(late.ranks) == 1:
            return [(late, other, less, slot, -less)]
        self._objective.effort -= EFFORT_OF_A_RANK * len(late.ranks)
        shrunk = giver.costs[slot] - less
        for rank in late.ranks:
            if rank is not giver and rank.costs[slot] > shrunk:
                shrunk = rank.costs[slot]
        grown = max(late.costs[other], taker.costs[other] + less)
        if slot == other:
            grown = shrunk = max(shrunk, taker.costs[other] + less)
            return [(late, slot, shrunk - late.costs[slot], slot, 0.0)]
        return [(late, other, grown - late.costs[other], slot, shrunk - late.costs[slot])]

    def _sooner(self, changes: list[Change]) -> bool:
        """Simulate changes, unless chains refuse them; True if they make the step no worse."""
        pipeline = changes[0][0]
        if len(changes) == 1:
            if pipeline.soonest(changes[0], pipeline.end) > pipeline.end:
                return False
            self._ends = [pipeline.simulated(changes[0])]
            return self._ends[0] <= pipeline.end
        other = changes[1][0]
        limit = self._power(pipeline.end) + self._power(other.end)
        beyond = BEYOND * other.end
        grown = pipeline.soonest(changes[0], beyond)
        if grown > beyond:
            return False
        shrunk = other.soonest(changes[1], beyond)
        if self._power(grown) + self._power(shrunk) > limit:
            return False
        grown = pipeline.simulated(changes[0])
        if self._power(grown) + self._power(shrunk) > limit:
            return False
        shrunk = other.simulated(changes[1])
        self._ends = [grown, shrunk]
        return self._power(grown) + self._power(shrunk) <= limit

    def _power(self, end: float) -> float:
        return high_power(end * self._scale)

    def _keep(self, changes: list[Change]) -> bool:
        """Make changes of pipelines that were simulated; True if one ends sooner."""
        sooner = False
        for change, end in zip(changes, self._ends, strict=True):
            sooner = sooner or end < change[0].end
            change[0].become(change, end)
        self._slowest = max(self._pipelines, key=lambda pipeline: pipeline.end)
        return sooner
