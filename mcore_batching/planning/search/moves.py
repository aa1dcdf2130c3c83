"""Single samples moved and swapped between the micro-batches of a step.

A move takes a sample from one micro-batch to another, perhaps for a cheaper one that comes back. It
is kept if it does not raise the sum of the 64th powers of the pipelines' ends, which the latest
decide. The cap and the bound on samples hold, no micro-batch is emptied, none changes its
context-parallel size, and a rank with a placeholder takes a further sample there. A generator with
one seed draws the moves, so they are the same everywhere.

A pipeline is a rank by itself, ranks that share micro-batches, or all ranks in lockstep. Its places
are a rank's slots, each rank's slots, or the slots, each as costly as the costliest micro-batch
there. It ends no sooner than any of its paths: a sum of weights times costs of places. Critical
paths found lately show without a simulation which moves cannot help, and how much is best moved.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Collection, Sequence
from operator import attrgetter, mul

from mcore_batching.planning.clock import Clock, blocks_of
from mcore_batching.planning.problem import Problem
from mcore_batching.planning.search.objective import Objective, Step

COST_OF_A_TRY = 40
"""A move that is refused without a simulation counts as 40 simulated passes, about its CPU time."""
MOST_PATHS = 24
"""Critical paths remembered per pipeline, twice as many of ranks that share rows; with the last one
alone steps end 0.12 % later."""
ROUNDED = 1.0 + 1e-12
"""Ends closer than this are equal: they add up the same costs in another order."""

_cost = attrgetter("cost")


class MicroBatch:
    """A micro-batch, with its cost and tokens on each rank that shares it."""

    __slots__ = ("cost", "costs", "pipeline", "place", "problem", "ranks", "samples", "tokens")
    costs: list[float]
    """On each kind of stage; `cost` is the mean stage's."""
    pipeline: Pipeline
    place: int

    def __init__(self, samples: Sequence[int], problem: Problem, ranks: range) -> None:
        self.problem = problem
        """As if every micro-batch had this context-parallel size."""
        self.ranks = ranks
        self.set_samples(list(samples))

    def set_samples(self, samples: list[int]) -> None:
        """Have these samples."""
        tokens = self.problem.tokens
        self.samples = samples
        self.cost = self.problem.cost(samples)
        is_uneven = self.problem.schedule.num_costs > 1
        self.costs = self.problem.slot_costs([samples]) if is_uneven else [self.cost]
        # A list, not a generator, here and below: every move passes through.
        self.tokens = sum([tokens[i] for i in samples])

    @property
    def is_legal(self) -> bool:
        """True if it keeps to the cap and to the bound on samples; one sample alone may exceed the
        cap."""
        count, problem = len(self.samples), self.problem
        return count == 1 or (self.tokens <= problem.capacity and count <= problem.max_samples)


class Pipeline:
    """Ranks that wait for each other, or one.

    Args:
        columns: their micro-batches [columns][ranks][slots], seen here as they change; those that
            ranks of one column have in a slot are in one place.
        objective: its budget is used.

    Attributes:
        costs: of each place on a mean stage [places].
        end: end of the step on these ranks.
        weights: of each place on the critical path [places].
        on_path: places on it.
    """

    def __init__(self, columns: Sequence[Sequence[list[MicroBatch]]], objective: Objective) -> None:
        self._objective, self._columns, self.width = objective, columns, len(columns)
        # In lockstep a column has several ranks, which all have the same slots.
        firsts = [column[0] for column in columns]
        self._kinds = objective.problem.schedule.num_costs
        for rank in itertools.chain(*columns):
            for slot, micro_batch in enumerate(rank):
                column = micro_batch.ranks.start - firsts[0][0].ranks.start
                micro_batch.place = slot * self.width + (column if self.width > 1 else 0)
                micro_batch.pipeline = self
        places = range(len(firsts[0]) * self.width)
        self.costs = [max(map(_cost, self.micro_batches(place))) for place in places]
        self._clock_costs = [0.0] * (len(places) * self._kinds)
        for place in places:
            self._set_costs(self._clock_costs, place)
        self._paths: list[tuple[list[float], list[float]]] = []
        """Critical paths found lately, the newest first. Each has weights of places, then that of
        `NOWHERE` and its length; and the weights of the clock's costs."""
        blocks = blocks_of([[len(each.ranks) for each in rank] for rank in firsts])
        schedule, coupled = objective.problem.schedule, self.width > 1
        self._become(Clock(self._clock_costs, schedule, blocks if coupled else (), self.width))

    def micro_batches(self, place: int) -> list[MicroBatch]:
        """Those of one place: several in lockstep."""
        if self.width == 1:
            return [rank[place] for rank in self._columns[0]]
        slot, column = divmod(place, self.width)
        return [rank[slot] for rank in self._columns[column]]

    def try_changes(self, places: Collection[int]) -> tuple[Clock, list[float]]:
        """The clock with the costs that micro-batches in some places have now, and these costs. A
        path that ends later is remembered: it refuses moves like this one without a simulation."""
        costs = self._clock_costs[:]
        for place in places:
            self._set_costs(costs, place)
        first = min([self._clock_places(place)[0] for place in places])
        clock = self._clock.with_costs(costs, first)
        self._objective.budget -= clock.num_passes
        if clock.end > self.end:
            self._remember(clock)
        return clock, costs

    def apply(self, places: Collection[int], clock: Clock, costs: list[float]) -> None:
        """Make changes that were tried."""
        changes = [
            (at, costs[at] - self._clock_costs[at])
            for place in places
            for at in self._clock_places(place)
        ]
        for path, weights in self._paths:
            for at, more in changes:
                path[-1] += more * weights[at]
        for place in places:
            self.costs[place] = max(map(_cost, self.micro_batches(place)))
        self._clock_costs = costs
        self._become(clock)

    def room(
        self, place: int, at: int, *, slope: float, least: float, free: float, end: float
    ) -> tuple[float, float] | None:
        """Costs that may be added to a micro-batch, if another costs as much less.

        Args:
            place: of the one that costs more.
            at: of the one that costs less; `NOWHERE` in another pipeline.
            slope: time by which the longest path gets shorter for each unit of cost that moves,
                beside what `place` adds to it.
            least: smallest cost that can be added; None is returned if not even that fits.
            free: what it may cost more before its place does.
            end: by which the pipeline is to end.

        Returns:
            what makes the step end soonest, and the most by which the pipeline ends in time.
        """
        even = most = end
        for path, _ in self._paths:
            weight = path[place] - path[at]
            # A path that passes the cheaper place as often gets no longer by the move.
            if weight > 0.0:
                left = end - path[-1] + free * path[place]
                if left < weight * most:
                    most = left / weight
                    if most < least:
                        return None
                weight += slope
                if left < weight * even:
                    even = left / weight
        return even, most

    def _become(self, clock: Clock) -> None:
        self._clock, self.end = clock, clock.end
        self.weights = self._remember(clock)
        # Costs of 0, as of placeholders without a fixed cost, have no weight on uneven stages.
        self.on_path = [at for at, weight in enumerate(self.weights) if weight > 0.0] or [0]

    def _remember(self, clock: Clock) -> list[float]:
        """Remember the critical path of a clock, and return its weights of places."""
        weights = clock.weights()
        self._objective.budget -= COST_OF_A_TRY
        # By the costs before: `apply` brings it up to date if the change is made.
        length = math.fsum(map(mul, weights, self._clock_costs))
        of_places = self._of_places(weights)
        self._paths.insert(0, ([*of_places, 0.0, length], weights))
        del self._paths[MOST_PATHS * min(2, self.width) :]
        return of_places

    def _clock_places(self, place: int) -> range:
        """The clock's costs of a place, one for each kind of stage."""
        slot, column = divmod(place, self.width)
        first, span = slot * self._kinds * self.width + column, self._kinds * self.width
        return range(first, first + span, self.width)

    def _set_costs(self, costs: list[float], place: int) -> None:
        micro_batches = self.micro_batches(place)
        ranks = len(micro_batches[0].ranks) if self.width > 1 else 1
        # Of a shared row the place at its first rank, which may be another.
        for kind, at in enumerate(self._clock_places(micro_batches[0].place)):
            cost = max([each.costs[kind] for each in micro_batches])
            costs[at : at + ranks] = [cost] * ranks

    def _of_places(self, weights: list[float]) -> list[float]:
        """Weights of places from those of the clock's costs: what a micro-batch that costs 1 more
        on a mean stage adds, if that is made up like the micro-batch there."""
        if self._kinds == 1:
            return weights
        made = []
        for place, cost in enumerate(self.costs):
            of_kinds = [weights[at] * self._clock_costs[at] for at in self._clock_places(place)]
            made.append(math.fsum(of_kinds) / cost if cost else 0.0)
        return made


NOWHERE = -2
"""A place that is on no path: the weight before a path's length."""


def improve(step: Step, objective: Objective, *, keep: float = 0.0) -> Step:
    """Improve a step until its budget is spent or no plan ends sooner.

    Args:
        step: the step, which is left as it is.
        objective: simulates; its budget is used.
        keep: budget that is left over.

    Returns:
        a step that ends no later.
    """
    if objective.budget <= keep or objective.is_best(step.end):
        return step
    moves = Moves(step, objective)
    while objective.budget > keep and not objective.is_best(moves.slowest.end):
        objective.budget -= COST_OF_A_TRY
        moves.try_one()
    best = moves.result()
    # A move may raise the latest end by little, if others fall: the step before is then better.
    return best if best.end <= step.end else step


class Moves:
    """A step that is being changed."""

    def __init__(self, step: Step, objective: Objective) -> None:
        self._objective, self._is_shared = objective, step.sizes is not None
        # Not `randrange`, whose draws may differ between versions of Python.
        self._draw = random.Random(1).random
        # Powers of ends are taken in units of the first end: in any other the 64th may overflow.
        self._scale = 1.0 / step.end if step.end else 1.0
        self._ranks = micro_batches_of(step, objective)
        self._with_placeholders = {
            number
            for number, rank in enumerate(self._ranks)
            if any(not each.samples for each in rank)
        }
        self._pipelines = self._coupled()
        self.slowest = max(self._pipelines, key=attrgetter("end"))

    def _coupled(self) -> list[Pipeline]:
        """Ranks in lockstep or that share micro-batches together, others alone."""
        made, columns, after = [], [], 0
        for ranks in self._objective.problem.dims.lockstep_groups:
            columns.append(self._ranks[ranks.start : ranks.stop])
            # A micro-batch that reaches beyond these ranks ties the next ones to the same pipeline.
            stops = [each.ranks.stop for each in itertools.chain(*columns[-1])]
            after = max(after, *stops)
            if after == ranks.stop:
                made.append(Pipeline(columns, self._objective))
                columns = []
        return made

    def result(self) -> Step:
        """The step as it is now, simulated."""
        slots = [[each.samples for each in rank] for rank in self._ranks]
        sizes = [[len(each.ranks) for each in rank] for rank in self._ranks]
        return self._objective.step(slots, sizes if self._is_shared else None)

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
        # The last sample stays: an empty micro-batch would be a placeholder. It may be swapped.
        may_move = len(mine.samples) > 1 and self._may_grow(theirs)
        given, taken = self._choose(mine, theirs, may_move)
        # Nor may a sample go where it is over the cap of the other size.
        if given < 0 or (
            mine.problem is not theirs.problem
            and (given in theirs.problem.oversize or taken in mine.problem.oversize)
        ):
            return
        # Tried in place, and undone if refused: copying a step for each move would take longer.
        before = mine.samples, theirs.samples
        mine.set_samples([i for i in mine.samples if i != given] + [taken] * (taken >= 0))
        theirs.set_samples([*(i for i in theirs.samples if i != taken), given])
        if not (mine.is_legal and theirs.is_legal and self._is_kept(theirs, mine)):
            mine.set_samples(before[0])
            theirs.set_samples(before[1])

    def _may_grow(self, micro_batch: MicroBatch) -> bool:
        """True if it may take a further sample. A rank with a placeholder takes one nowhere else,
        in its last slot before any other (`placement`)."""
        rank = micro_batch.ranks.start
        if micro_batch.samples:
            return rank not in self._with_placeholders
        last = self._ranks[rank][-1]
        return last is micro_batch or bool(last.samples)

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
        places, weights = late.on_path, late.weights
        place, other = places[int(draw() * len(places))], places[int(draw() * len(places))]
        if weights[other] > weights[place]:
            place = other
        # In lockstep only the costliest micro-batch of a slot matters.
        mine = max(late.micro_batches(place), key=_cost)
        if draw() >= 0.5:
            taker = ranks[mine.ranks.start]
        theirs, another = taker[int(draw() * len(taker))], taker[int(draw() * len(taker))]
        weights = theirs.pipeline.weights
        return mine, theirs if weights[theirs.place] <= weights[another.place] else another

    def _choose(self, mine: MicroBatch, theirs: MicroBatch, may_move: bool) -> tuple[int, int]:
        """Any sample of a micro-batch, and what comes back for it, so that by the paths remembered
        the step ends soonest: a cheaper sample, or -1 for none, if that is allowed. Twice -1 if
        nothing lets the step end sooner."""
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
            room = early.room(place, at, slope=slope, least=least, free=free, end=late.end)
        if room is None:
            return -1, -1
        best, most = room
        # On fewer ranks a sample may cost more than the step takes, which no path need show.
        fitting = [(abs(more - best), i) for more, i in choices if more <= most]
        return (given, min(fitting)[1]) if fitting else (-1, -1)

    def _exchange_slots(self, mine: MicroBatch, theirs: MicroBatch) -> None:
        """Exchange all that a rank has in two slots, in lockstep all ranks."""
        pipeline, at, place = mine.pipeline, mine.place, theirs.place
        less = pipeline.costs[at] - pipeline.costs[place]
        if less <= 0.0 or pipeline.weights[at] <= pipeline.weights[place]:
            return
        if not pipeline.room(place, at, slope=0.0, least=less, free=0.0, end=pipeline.end):
            return
        first, last = (pipeline.micro_batches(at)[each].ranks for each in (0, -1))
        ranks = self._ranks[first.start : last.stop]
        slots = [each // pipeline.width for each in (at, place)]
        self._exchange(ranks, slots)
        # A placeholder may not come last: the last micro-batch touches every parameter
        # (`placement`).
        if not (all(rank[-1].samples for rank in ranks) and self._is_kept(mine, theirs)):
            self._exchange(ranks, slots)

    def _exchange(self, ranks: list[list[MicroBatch]], slots: list[int]) -> None:
        slot, other = slots
        for rank in ranks:
            rank[slot], rank[other] = rank[other], rank[slot]
            for each in slots:
                pipeline = rank[each].pipeline
                rank[each].place = each * pipeline.width + rank[each].place % pipeline.width

    def _is_kept(self, theirs: MicroBatch, mine: MicroBatch) -> bool:
        """Simulate the pipelines of two micro-batches that were changed; True, with the changes
        applied, if the sum of powers of the ends does not rise."""
        late, early = mine.pipeline, theirs.pipeline
        both = [(early, [theirs.place, mine.place])]
        if late is not early:
            both = [(early, [theirs.place]), (late, [mine.place])]
        elif theirs.place == mine.place:
            both = [(early, [mine.place])]
        total, limit = 0.0, ROUNDED * math.fsum([self._power(each.end) for each, _ in both])
        tried = []
        for each, places in both:
            tried.append(each.try_changes(places))
            total += self._power(tried[-1][0].end)
            if total > limit:
                return False
        for (each, places), (clock, costs) in zip(both, tried, strict=True):
            each.apply(places, clock, costs)
        self.slowest = max(self._pipelines, key=attrgetter("end"))
        return True

    def _power(self, end: float) -> float:
        """The 64th power of an end, in ends of the step before."""
        end *= self._scale
        # Nearly the maximum, yet smaller ends count: a step of equal latest ranks can improve.
        for _ in range(6):  # 2 ** 6 = 64
            end *= end
        return end


def micro_batches_of(step: Step, objective: Objective) -> list[list[MicroBatch]]:
    """Micro-batches [ranks][slots]; ranks that share one have the same `MicroBatch` there."""
    ranks: list[list[MicroBatch]] = []
    for number, slots in enumerate(step.ranks):
        micro_batches = []
        for slot, samples in enumerate(slots):
            size = step.sizes[number][slot] if step.sizes else 1
            # Only the first of the ranks that share one makes it; the others find it made.
            if number % size:
                micro_batches.append(ranks[-1][slot])
            else:
                problem = objective.whole.on_ranks[size] if step.sizes else objective.problem
                micro_batches.append(MicroBatch(samples, problem, range(number, number + size)))
        ranks.append(micro_batches)
    return ranks
