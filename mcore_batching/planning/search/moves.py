"""Single samples moved and swapped between the micro-batches of a step.

A move takes a sample from one micro-batch to another, perhaps for a cheaper one that comes back. It
is kept if it hardly raises the sum of the 64th powers of the pipelines' ends, which the latest
decide: at first each end may rise by 0.05 %, at last by nothing (threshold accepting, Dueck and
Scheuer, 1990). The cap and the bound on samples hold, no micro-batch is emptied, none changes its
context-parallel size, and a rank with a placeholder takes a further sample there. A generator with
one seed draws the moves, so they are the same everywhere.

A pipeline is a rank by itself, ranks that share micro-batches, or all ranks in lockstep. Its places
are a rank's slots, each rank's slots, or the slots, each as costly as the costliest micro-batch
there. It ends no sooner than any of its paths: a sum of weights times costs of places. Critical
paths found lately show without a simulation which moves cannot help, and how much is best moved.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from itertools import chain
from operator import attrgetter, mul

from mcore_batching.planning.clock import Clock, blocks_of
from mcore_batching.planning.costs.cost import ordered_sum
from mcore_batching.planning.problem import Problem
from mcore_batching.planning.search.objective import SLACK, Objective, Step

COST_OF_A_TRY = 40
"""A move that is refused without a simulation counts as 40 simulated passes, about its CPU time; so
does what a simulation takes beside its passes, and remembering a critical path."""
MOST_PATHS = 24
"""Critical paths remembered per pipeline, twice as many of ranks that share rows; with the last one
alone steps end 0.12 % later, with half or twice as many as soon."""
GIVEN = 3
"""Samples of a micro-batch that may be given; with one, steps of many equal samples end 0.3 %
later: most of what is drawn is of the same length then, and changes as much."""
NOBODY = -1
"""A sample that does not exist."""

_cost = attrgetter("cost")


class MicroBatch:
    """A micro-batch, with its cost and tokens on each rank that shares it."""

    __slots__ = ("cost", "costs", "place", "problem", "ranks", "samples", "tokens")
    costs: list[float]
    """On each kind of stage; `cost` is the mean stage's."""
    place: int
    """In its pipeline, at the first of its ranks."""

    def __init__(self, samples: Sequence[int], problem: Problem, ranks: range) -> None:
        self.problem = problem
        """The problem in which every micro-batch has this context-parallel size."""
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

    def may_exchange(self, old: int, new: int, other: Problem) -> bool:
        """True if it keeps to the cap and to the bound on samples with `new`, of a micro-batch of
        another problem, in place of `old`; `NOBODY` stands for none."""
        problem, tokens = self.problem, self.problem.tokens
        count = len(self.samples) + (new >= 0) - (old >= 0)
        if count == 1:
            # Alone it may exceed the cap, unless the other context-parallel size has room for it.
            return problem is other or new not in problem.oversize
        total = self.tokens + (tokens[new] if new >= 0 else 0) - (tokens[old] if old >= 0 else 0)
        return total <= problem.capacity and count <= problem.max_samples


class Pipeline:
    """Ranks that wait for each other, or one.

    Args:
        ranks: their micro-batches [ranks][slots].
        objective: its budget is used.

    Attributes:
        at: micro-batches of each place [places]; several in lockstep.
        costs: of each place on a mean stage [places].
        width: places of each slot.
        end: end of the step on these ranks.
        weights: of each place on the critical path [places].
        on_path: places on it.
    """

    def __init__(self, ranks: Sequence[Sequence[MicroBatch]], objective: Objective) -> None:
        self._objective, problem = objective, objective.problem
        self.ranks = range(ranks[0][0].ranks.start, ranks[-1][0].ranks.stop)
        slots = list(map(list, zip(*ranks, strict=True)))
        self.at = slots if problem.dims.in_lockstep else [[each] for each in chain(*slots)]
        self.width = len(self.at) // len(slots)
        for place in reversed(range(len(self.at))):
            for each in self.at[place]:
                each.place = place  # at last that at its first rank
        self._kinds = problem.schedule.num_costs
        self._clock_costs = [0.0] * (len(self.at) * self._kinds)
        self._set_costs(self._clock_costs, range(len(self.at)))
        self.costs = [max(map(_cost, each)) for each in self.at]
        self._paths: list[list[float]] = []
        """Critical paths found lately, the newest first: weights of places, a 0 for places of other
        pipelines, and the length."""
        sizes = [[len(each.ranks) for each in rank] for rank in ranks]
        blocks = blocks_of(sizes) if self.width > 1 else ()
        self._become(Clock(self._clock_costs, problem.schedule, blocks, self.width))

    def slots_of(self, rank: int) -> list[MicroBatch]:
        """The micro-batches of one of its ranks."""
        number = rank - self.ranks.start
        if self.width == 1:
            return [each[number] for each in self.at]
        return [each[0] for each in self.at[number :: self.width]]

    def try_changes(self, places: Collection[int]) -> tuple[Clock, list[float]]:
        """The clock with the costs that micro-batches in some places have now, and these costs. A
        path that ends later is remembered: it refuses moves like this one without a simulation."""
        costs = self._clock_costs[:]
        clock = self._clock.with_costs(costs, self._set_costs(costs, places))
        self._objective.budget -= clock.num_passes + COST_OF_A_TRY
        if clock.end > self.end:
            self._remember(clock)
        return clock, costs

    def apply(self, places: Collection[int], clock: Clock, costs: list[float]) -> None:
        """Make changes that were tried."""
        for place in places:
            cost = max([each.cost for each in self.at[place]])
            more, self.costs[place] = cost - self.costs[place], cost
            for path in self._paths:
                path[-1] += more * path[place]
        self._clock_costs = costs
        self._become(clock)

    def room(
        self, place: int, at: int, *, slope: float, least: float, free: float, end: float
    ) -> tuple[float, float] | None:
        """Costs that may be added to a micro-batch, if another costs as much less.

        Args:
            place: of the one that costs more.
            at: of the one that costs less; the number of places if it is in another pipeline.
            slope: time by which the longest path gets shorter for each unit of cost that moves,
                beside what `place` adds to it.
            least: smallest cost that can be added; None is returned if not even that fits.
            free: what it may cost more before its place does.
            end: by which the pipeline is to end.

        Returns:
            what makes the step end soonest, and the most by which the pipeline ends in time.
        """
        even = most = end
        for path in self._paths:
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

    def exchange(self, at: int, place: int) -> None:
        """Exchange all that the ranks of two places have in their slots; in lockstep all ranks."""
        for column in range(len(self.at[at][0].ranks) if self.width > 1 else 1):
            here, there = at + column, place + column
            self.at[here], self.at[there] = self.at[there], self.at[here]
        for here in (at, place):
            for each in self.at[here]:
                each.place = here

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
        length = ordered_sum(map(mul, weights, self._clock_costs))
        if self._kinds > 1:
            weights = self._of_places(weights)
        self._paths.insert(0, [*weights, 0.0, length])
        del self._paths[MOST_PATHS * min(2, self.width) :]
        return weights

    def _clock_places(self, place: int) -> range:
        """The clock's costs of a place, one for each kind of stage."""
        slot, column = divmod(place, self.width)
        first, span = slot * self._kinds * self.width + column, self._kinds * self.width
        return range(first, first + span, self.width)

    def _set_costs(self, costs: list[float], places: Collection[int]) -> list[int]:
        """Set what micro-batches in some places cost; the clock's costs that change."""
        changed = []
        for place in places:
            micro_batches = self.at[place]
            # Of a shared row the place at its first rank, which may be another.
            for kind, at in enumerate(self._clock_places(micro_batches[0].place)):
                costs[at] = max([each.costs[kind] for each in micro_batches])
                changed.append(at)
        return changed

    def _of_places(self, weights: list[float]) -> list[float]:
        """Weights of places from those of the clock's costs: what a micro-batch that costs 1 more
        on a mean stage adds, if that is made up like the micro-batch there."""
        made = []
        for place, cost in enumerate(self.costs):
            of_kinds = [weights[at] * self._clock_costs[at] for at in self._clock_places(place)]
            made.append(ordered_sum(of_kinds) / cost if cost else 0.0)
        return made


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
    moves, budget = Moves(step, objective), objective.budget - keep
    slack = 0.0 if step.sizes else SLACK
    while objective.budget > keep and not objective.is_best(moves.slowest.end):
        objective.budget -= COST_OF_A_TRY
        moves.rise = 1.0 + slack * (objective.budget - keep) / budget
        moves.try_one()
    best = moves.result()
    return best if best.end <= step.end else step


class Moves:
    """A step that is being changed."""

    def __init__(self, step: Step, objective: Objective) -> None:
        self._objective, self._is_shared = objective, step.sizes is not None
        self.rise = 1.0
        """Moves are kept with which ends rise so many times at most."""
        # Not `randrange`: its draws may differ between versions of Python.
        self._draw = random.Random(1).random
        # Powers of ends are taken in units of the first end: in any other the 64th may overflow.
        self._scale = 1.0 / step.end if step.end else 1.0
        ranks = micro_batches_of(step, objective)
        self._with_placeholders = {
            number for number, rank in enumerate(ranks) if not all(each.samples for each in rank)
        }
        self._pipelines = list[Pipeline]()
        first = after = 0
        for group in objective.problem.dims.lockstep_groups:
            # A micro-batch that reaches beyond these ranks ties the next ones to the same pipeline.
            micro_batches = chain(*ranks[group.start : group.stop])
            after = max(after, *(each.ranks.stop for each in micro_batches))
            if after == group.stop:
                self._pipelines.append(Pipeline(ranks[first:after], objective))
                first = after
        self.slowest = max(self._pipelines, key=attrgetter("end"))

    def result(self) -> Step:
        """The step as it is now, simulated."""
        ranks = [each.slots_of(rank) for each in self._pipelines for rank in each.ranks]
        slots = [[each.samples for each in rank] for rank in ranks]
        sizes = [[len(each.ranks) for each in rank] for rank in ranks]
        return self._objective.step(slots, sizes if self._is_shared else None)

    def try_one(self) -> None:
        """Try a move from a micro-batch on which the end of a late pipeline depends to one on which
        less does, half the time of the same rank."""
        draw, pipelines = self._draw, self._pipelines
        late = pipelines[int(draw() * len(pipelines))]
        early = pipelines[int(draw() * len(pipelines))]
        if late.end < early.end:
            late, early = early, late
        # Half the time the latest, which alone decides the step; less elsewhere is room for later
        # moves.
        if draw() < 0.5:
            late = self.slowest
        places, weights = late.on_path, late.weights
        at, other = places[int(draw() * len(places))], places[int(draw() * len(places))]
        if weights[other] > weights[at]:
            at = other
        # In lockstep only the costliest micro-batch of a slot matters.
        mine = late.at[at][0] if len(late.at[at]) == 1 else max(late.at[at], key=_cost)
        is_same = draw() < 0.5
        if is_same:
            early = late
        weights, count = early.weights, len(early.at)
        place, other = int(draw() * count), int(draw() * count)
        if is_same and early.width > 1:
            place, other = (each - each % early.width + at % early.width for each in (place, other))
        if weights[other] < weights[place]:
            place = other
        others = early.at[place]
        if len(others) == 1:
            theirs = others[0]
        else:
            theirs = others[mine.ranks.start if is_same else int(draw() * len(others))]
        if mine is theirs or not mine.samples:
            return
        # Of the same ranks whole slots, 3 times in 4: that changes no micro-batch, so the cap still
        # holds. Without, small steps end 0.5 % later, in lockstep 1 %, single ones 6 %.
        if mine.ranks == theirs.ranks and draw() >= 0.25:
            self._exchange_slots(late, mine.place, theirs.place)
            return
        chosen = self._choose(late, early, mine, theirs)
        if chosen is None:
            return
        given, taken = chosen
        # Tried in place, and undone if refused: copying a step for each move would take longer.
        before = mine.samples, theirs.samples
        mine.set_samples([i for i in mine.samples if i != given] + [taken] * (taken >= 0))
        theirs.set_samples([*(i for i in theirs.samples if i != taken), given])
        if not self._is_kept(late, early, mine.place, theirs.place):
            mine.set_samples(before[0])
            theirs.set_samples(before[1])

    def _may_grow(self, pipeline: Pipeline, micro_batch: MicroBatch) -> bool:
        """True if it may take a further sample. A rank with a placeholder takes one nowhere else,
        in its last slot before any other (`placement`)."""
        rank = micro_batch.ranks.start
        if micro_batch.samples:
            return rank not in self._with_placeholders
        last = pipeline.slots_of(rank)[-1]
        return last is micro_batch or bool(last.samples)

    def _choose(
        self, late: Pipeline, early: Pipeline, mine: MicroBatch, theirs: MicroBatch
    ) -> tuple[int, int] | None:
        """A sample of `mine`, of a few that are drawn, and the cheaper one that comes back for it,
        or `NOBODY`, so that by the paths remembered the step ends soonest; None if there are none
        with which ends rise too much."""
        costs, place = theirs.problem.costs, theirs.place
        at = mine.place if late is early else len(early.at)
        # How fast the late pipeline gets shorter as cost goes from the one to the other.
        slope = late.weights[mine.place] - (late.weights[place] if late is early else 0.0)
        # In lockstep a micro-batch may grow up to the costliest of its slot for nothing.
        free = early.costs[place] - theirs.cost
        if slope <= 0.0 and not free:
            return None
        back = [(costs[i], i) for i in theirs.samples]
        # The last sample stays, or is exchanged: an empty micro-batch would be a placeholder.
        if len(mine.samples) > 1 and self._may_grow(early, theirs):
            back.append((0.0, NOBODY))
        draw, samples = self._draw, mine.samples
        few = {samples[int(draw() * len(samples))] for _ in range(GIVEN)}
        choices = [
            (costs[i] - less, i, other) for i in few for less, other in back if less < costs[i]
        ]
        if not choices:
            return None
        least = min(choices)[0]
        if at == place:
            room = (free / 2.0, free) if free >= least else None
        else:
            room = early.room(
                place, at, slope=slope, least=least, free=free, end=self.rise * late.end
            )
        if room is None:
            return None
        best, most = room
        # On fewer ranks a sample may cost more than the step takes, which no path need show.
        fitting = [(abs(more - best), i, other) for more, i, other in choices if more <= most]
        for _, given, taken in sorted(fitting):
            if theirs.may_exchange(taken, given, mine.problem) and mine.may_exchange(
                given, taken, theirs.problem
            ):
                return given, taken
        return None

    def _exchange_slots(self, pipeline: Pipeline, at: int, place: int) -> None:
        """Exchange all that a rank has in two slots, in lockstep all ranks."""
        less = pipeline.costs[at] - pipeline.costs[place]
        if less <= 0.0 or pipeline.weights[at] <= pipeline.weights[place]:
            return
        end = self.rise * pipeline.end
        if not pipeline.room(place, at, slope=0.0, least=less, free=0.0, end=end):
            return
        # A placeholder may not come last: the last micro-batch touches every parameter
        # (`placement`).
        last = len(pipeline.at) - pipeline.width
        for here, there in ((at, place), (place, at)):
            if here >= last and not all(each.samples for each in pipeline.at[there]):
                return
        pipeline.exchange(at, place)
        if not self._is_kept(pipeline, pipeline, at, place):
            pipeline.exchange(at, place)

    def _is_kept(self, late: Pipeline, early: Pipeline, at: int, place: int) -> bool:
        """Simulate two pipelines in which the micro-batches of a place each were changed; True,
        with the changes applied, if the sum of powers of the ends rises as if each end rose `rise`
        times at most."""
        both = [(early, {at, place})] if late is early else [(early, {place}), (late, {at})]
        total, limit, tried = 0.0, 0.0, []
        for each, _ in both:
            limit += self._power(self.rise * each.end)
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
