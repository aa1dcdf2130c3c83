"""Single samples moved and swapped between the micro-batches of a step.

    pipeline    a rank by itself; ranks that share micro-batches; all ranks in lockstep
    place       a number of the pipeline's clock: a slot of its rank, a slot of one of its ranks,
                or in lockstep a slot, which costs as much as the costliest micro-batch there
    moves       a sample of one micro-batch to another, perhaps for a cheaper one that comes back;
                all that a rank has in one slot for all in another, in lockstep that all ranks have

A pipeline ends no sooner than any of its chains of passes takes, each a sum of weights times costs
of places. Those that were found last are remembered: they tell, without simulating, which moves
cannot help, and how much is best moved. A move is kept if it does not raise the sum of the 64th
powers of the pipelines' ends, which the latest decide. Throughout, the cap and the bounds on
samples and on tokens in flight hold, no micro-batch is emptied, none changes its context-parallel
size, and a rank with a placeholder takes a further sample there. A counter draws the moves, so they
are the same everywhere.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from operator import attrgetter

from mcore_batching.planning.integers import round_up
from mcore_batching.planning.pipeline import Clock, CoupledClock, blocks_of, inflight_tokens
from mcore_batching.planning.pipeline.clock import Changes
from mcore_batching.planning.problem import Problem
from mcore_batching.planning.search.objective import Candidate, Objective

EFFORT_OF_A_TRY = 40
"""A move that is refused unsimulated costs as much effort as 40 simulated passes, about its CPU
time."""
EFFORT_OF_A_SHARED_PASS = 0.15
"""Effort of one pass of one rank among ranks that wait for each other, which are simulated side by
side. About its CPU time where numba compiles the clock: a try on 29 slots of 8 ranks of four stages
then takes 8 µs, else 0.28 ms, and planning without numba about a third longer than with 1.5."""
MOST_CHAINS = 32
"""Critical paths remembered per pipeline, twice as many of ranks that share micro-batches: with no
more than 32, steps of these end 0.07 % later in the mean of five cases, 128 samples of azure_conv
0.1 %; with 128, as soon."""
ROUNDED = 1.0 + 1e-12
"""Ends closer than this are equal: they add up the same costs in another order."""

NOWHERE = -2
"""A place that no chain passes."""


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


class MicroBatch:
    """A micro-batch, with what it costs and holds on each rank that shares it."""

    __slots__ = ("cost", "costs", "pipeline", "place", "problem", "ranks", "samples", "tokens")
    costs: list[float]
    """On each kind of stage, where they differ; `cost` is the mean stage's."""
    pipeline: Pipeline
    place: int

    def __init__(self, samples: Sequence[int], problem: Problem, ranks: range) -> None:
        self.problem = problem
        """As if every micro-batch had this context-parallel size."""
        self.ranks = ranks
        self.hold(list(samples))

    def hold(self, samples: list[int]) -> None:
        """Have these samples."""
        tokens = self.problem.tokens
        self.samples = samples
        self.cost = self.problem.cost(samples)
        if self.problem.schedule.which_cost:
            self.costs = self.problem.slot_costs([samples])
        # A list, not a generator, here and below: every move passes through.
        self.tokens = sum([tokens[i] for i in samples])

    @property
    def legal(self) -> bool:
        """True if it keeps to the cap and to the bound on samples; one sample alone may exceed the
        cap."""
        count, problem = len(self.samples), self.problem
        return count == 1 or (self.tokens <= problem.capacity and count <= problem.max_samples)

    @property
    def held_tokens(self) -> int:
        """Padded tokens over all ranks that share it."""
        return round_up(self.tokens, self.problem.row_multiple) or self.problem.placeholder_tokens


def micro_batches_of(step: Candidate, objective: Objective) -> list[list[MicroBatch]]:
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


def most_in_flight(ranks: Iterable[Sequence[MicroBatch]], objective: Objective) -> float:
    """Most padded tokens whose activations the first stage of a rank holds at a time, over the
    context-parallel ranks of the dims."""
    schedule, size = objective.problem.schedule, objective.whole.dims.context_parallel
    return max(
        inflight_tokens(
            [each.held_tokens * size // each.problem.dims.context_parallel for each in rank],
            schedule,
        )
        for rank in ranks
    )


def fits_in_memory(ranks: Iterable[Sequence[MicroBatch]], objective: Objective) -> bool:
    """True if the first stage of none of these ranks holds more than it may."""
    bound = objective.max_inflight_tokens
    return bound is None or most_in_flight(ranks, objective) <= bound


_cost = attrgetter("cost")


class Chains:
    """The chains of a pipeline that were found last, those that refused a move first."""

    def __init__(self, most: int = MOST_CHAINS) -> None:
        self._most, self._chains = most, list[list[float]]()
        self._on_stages: list[Sequence[float]] = []
        """Of the same chains the weights of places of the clock, where these are others."""

    def __iter__(self) -> Iterator[list[float]]:
        """Weights of places on each chain, that of `NOWHERE`, and last how long it is."""
        return iter(self._chains)

    def add(self, weights: Sequence[float], length: float, on_stages: Sequence[float] = ()) -> None:
        """Add a chain with these weights of places and this length.

        Args:
            weights: of places.
            length: of the chain.
            on_stages: weights of the clock's places, where these are others.
        """
        # The 0 is for `NOWHERE`, -2 as an index: what is outside the pipeline is on no chain.
        self._chains.insert(0, [*weights, 0.0, length])
        del self._chains[self._most :]
        if on_stages:
            self._on_stages.insert(0, on_stages)
            del self._on_stages[self._most :]

    def change(self, changes: Changes) -> None:
        """Add to the costs of some of the clock's places."""
        for chain, weights in zip(self._chains, self._on_stages or self._chains, strict=True):
            for place, more in changes:
                chain[-1] += more * weights[place]

    def room(
        self, place: int, at: int, *, slope: float, least: float, free: float, end: float
    ) -> tuple[float, float] | None:
        """Costs that may be added to a micro-batch, if another costs as much less.

        Args:
            place: of the one that costs more.
            at: of the one that costs less, `NOWHERE` in this pipeline perhaps.
            slope: time by which the longest chain gets shorter for each unit of cost that moves,
                beside what `place` adds to it.
            least: smallest cost that can be added; None is returned if not even that fits.
            free: what it may cost more before its place does.
            end: by which the pipeline is to end.

        Returns:
            what makes the step end soonest, and the most by which the pipeline ends in time.
        """
        even = most = end
        for number, chain in enumerate(self._chains):
            weight = chain[place] - chain[at]
            # A chain that passes the cheaper place as often gets no longer by the exchange.
            if weight > 0.0:
                left = end - chain[-1] + free * chain[place]
                if left < weight * most:
                    most = left / weight
                    # What refused this move is likely to refuse the next one, so it is asked first.
                    if most < least:
                        self._chains.insert(0, self._chains.pop(number))
                        if self._on_stages:
                            self._on_stages.insert(0, self._on_stages.pop(number))
                        return None
                weight += slope
                if left < weight * even:
                    even = left / weight
        return even, most


class Pipeline:
    """Ranks that wait for each other, or one.

    Args:
        columns: their micro-batches [columns][ranks][slots], seen here as they change; those that
            ranks of one column have in a slot are in one place.
        objective: its effort is used.
    """

    def __init__(self, columns: Sequence[Sequence[list[MicroBatch]]], objective: Objective) -> None:
        self._objective, self._columns = objective, columns
        self.width = len(columns)
        # In lockstep a column has several ranks, of which all have the same slots.
        firsts = [column[0] for column in columns]
        self._first = firsts[0][0].ranks.start
        for rank in itertools.chain(*columns):
            for slot, micro_batch in enumerate(rank):
                micro_batch.pipeline = self
                micro_batch.place = self.place(micro_batch, slot)
        places = range(len(firsts[0]) * self.width)
        self.costs = [max([each.cost for each in self.micro_batches(place)]) for place in places]
        sizes = [[len(each.ranks) for each in rank] for rank in firsts]
        schedule = objective.problem.schedule
        self._kinds = schedule.num_costs
        costs = self.costs
        if self._kinds > 1:
            costs = [0.0] * (self._kinds * len(costs))
            for place in places:
                for at, cost in self._on_stages(place):
                    costs[at] = cost
        self._clock = (
            CoupledClock(costs, schedule, blocks_of(sizes))
            if self.width > 1
            else Clock(costs, schedule)
        )
        self._passes_counted = 0
        self.chains = Chains(MOST_CHAINS * min(2, self.width))
        self._look()

    def place(self, micro_batch: MicroBatch, slot: int) -> int:
        """The place of a micro-batch in a slot: that of its first rank."""
        return slot * self.width + (micro_batch.ranks.start - self._first) % self.width

    def micro_batches(self, place: int) -> list[MicroBatch]:
        """Micro-batches in a place: one, but in lockstep those of all ranks."""
        slot, column = divmod(place, self.width)
        return [rank[slot] for rank in self._columns[column]]

    def growth(self, place: int) -> list[tuple[int, float]]:
        """Changes for the clock: a place's cost by its micro-batches now, less the one it knows."""
        if self._kinds > 1:
            known = self._clock.costs
            return [(at, cost - known[at]) for at, cost in self._on_stages(place)]
        return [
            (
                place,
                max([each.cost for each in self.micro_batches(place)]) - self.costs[place],
            )
        ]

    def _on_stages(self, place: int) -> list[tuple[int, float]]:
        """The clock's places of a place, one for each kind of stage, with the costs there."""
        micro_batches, (slot, column) = self.micro_batches(place), divmod(place, self.width)
        first = slot * self._kinds * self.width + column
        return [
            (
                first + kind * self.width,
                max([each.costs[kind] for each in micro_batches]),
            )
            for kind in range(self._kinds)
        ]

    def end_with(self, changes: Changes) -> float:
        """End with more added to the costs of some places; a chain that ends later is
        remembered."""
        end = self._clock.end_with(changes)
        # This chain is why; remembered, it refuses moves like this one without the clock.
        if end > self.end:
            weights, length = self._clock.weights_with(), 0.0
            # By the costs before: `change` brings it up to date if the move is made.
            for weight, cost in zip(weights, self._clock.costs, strict=True):
                length += weight * cost
            self._remember(weights, length)
        self._count_effort()
        return end

    def become(self, changes: Changes) -> None:
        """Add to the costs of some of the clock's places."""
        self._clock.become(changes)
        self.chains.change(changes)
        for at, more in changes:
            if self._kinds > 1:
                slot, column = divmod(at, self.width)
                place = slot // self._kinds * self.width + column
                self.costs[place] = max([each.cost for each in self.micro_batches(place)])
            else:
                self.costs[at] += more
        self._look()

    def _of_places(self, weights: list[float]) -> list[float]:
        """Weights of places from those of the clock's places: what a micro-batch that costs 1 more
        on a mean stage adds, if that is made up like the micro-batch there."""
        if self._kinds == 1:
            return weights
        made, costs = [0.0] * len(self.costs), self._clock.costs
        for at, weight in enumerate(weights):
            if weight:
                slot, column = divmod(at, self.width)
                made[slot // self._kinds * self.width + column] += weight * costs[at]
        return [
            weight / cost if cost else 0.0 for weight, cost in zip(made, self.costs, strict=True)
        ]

    def _look(self) -> None:
        self.end, weights = self._clock.end, self._clock.weights()
        self.weights = self._of_places(weights)
        self.on_chain = [place for place, weight in enumerate(self.weights) if weight > 0.0]
        self._remember(weights, self.end)
        self._count_effort()

    def _remember(self, weights: list[float], length: float) -> None:
        on_stages = weights if self._kinds > 1 else ()
        self.chains.add(self._of_places(weights), length, on_stages)

    def _count_effort(self) -> None:
        # Passes, not calls: the clock runs only those that a change can reach.
        effort = EFFORT_OF_A_SHARED_PASS if self.width > 1 else 1.0
        self._objective.effort -= effort * (self._clock.passes_run - self._passes_counted)
        self._passes_counted = self._clock.passes_run


class _Moves:
    """A step that is being changed."""

    def __init__(self, step: Candidate, objective: Objective) -> None:
        self._objective = objective
        # Powers of ends are taken in units of the first end: in any other the 64th may overflow.
        self._draw = drawing()
        self._scale = 1.0 / step.end if step.end else 1.0
        self._shared = step.sizes is not None
        self._ranks = micro_batches_of(step, objective)
        self._placeholders = [[each for each in rank if not each.samples] for rank in self._ranks]
        self._pipelines = self._waiting_for_each_other()
        self.slowest = self._slowest()

    def _waiting_for_each_other(self) -> list[Pipeline]:
        """Ranks in lockstep or that share micro-batches together, others alone."""
        made, columns, after = [], [], 0
        for ranks in self._objective.lockstep_groups:
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
        # A rank with a placeholder takes a further sample there.
        bare = self._placeholders[theirs.ranks.start]
        # The last sample stays: an empty micro-batch would be a placeholder. It may be exchanged.
        may_move = len(mine.samples) > 1 and (not bare or int(self._draw() * 3) == 0)
        if may_move and bare:
            theirs = bare[0]
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
        if mine.legal and theirs.legal and self._kept(theirs, mine, {*mine.ranks, *theirs.ranks}):
            if theirs in bare:
                bare.remove(theirs)
        else:
            mine.hold(before[0])
            theirs.hold(before[1])

    def _two_micro_batches(self) -> tuple[MicroBatch, MicroBatch]:
        """A micro-batch on which the end of a late pipeline depends, and one on which less does,
        half the time of the same rank."""
        # No function draws from 0 to a bound: most tries are refused at once, and it would take a
        # twentieth of the search's time.
        draw, ranks = self._draw, self._ranks
        giver, taker = ranks[int(draw() * len(ranks))], ranks[int(draw() * len(ranks))]
        # Samples go from a late pipeline to an earlier one.
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
        brought up to date, if the ranks concerned hold no more than they may and the sum of powers
        of the ends does not rise."""
        # First, since it needs no clock.
        if not fits_in_memory([self._ranks[rank] for rank in ranks], self._objective):
            return False
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
