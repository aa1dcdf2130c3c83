"""Micro-batches and pipelines of a step while it is changed, and their chains of passes.

A pipeline is a rank by itself, ranks that share micro-batches, or all ranks in lockstep. Its places
are a rank's slots, each rank's, or in lockstep the slots, of which each costs as much as the
costliest micro-batch there. It ends no sooner than any of its chains takes: a sum of weights times
costs of places. Those found last are remembered: they tell, without simulating, which moves cannot
help, and how much is best moved.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from mcore_batching.planning.pipeline import Clock, CoupledClock, blocks_of
from mcore_batching.planning.pipeline.clock import Changes
from mcore_batching.planning.problem import Problem
from mcore_batching.planning.search.objective import Candidate, Objective

EFFORT_OF_A_SHARED_PASS = 0.15
"""Effort of one pass of one rank among ranks that wait for each other, which are simulated side by
side: a try on 29 slots of 8 ranks of four stages takes 0.28 ms. Planning takes about a third longer
than with 1.5."""
MOST_CHAINS = 32
"""Critical paths remembered per pipeline, twice as many of ranks that share micro-batches: with no
more than 32, steps of these end 0.07 % later in the mean of five cases, 128 samples of azure_conv
0.1 %; with 128, as soon."""

NOWHERE = -2
"""A place that no chain passes."""


class MicroBatch:
    """A micro-batch, with what it costs and holds on each rank that shares it."""

    __slots__ = ("cost", "costs", "pipeline", "place", "problem", "ranks", "samples", "tokens")
    costs: list[float]
    """On each kind of stage; `cost` is the mean stage's."""
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
        is_uneven = self.problem.schedule.num_costs > 1
        self.costs = self.problem.slot_costs([samples]) if is_uneven else [self.cost]
        # A list, not a generator, here and below: every move passes through.
        self.tokens = sum([tokens[i] for i in samples])

    @property
    def legal(self) -> bool:
        """True if it keeps to the cap and to the bound on samples; one sample alone may exceed the
        cap."""
        count, problem = len(self.samples), self.problem
        return count == 1 or (self.tokens <= problem.capacity and count <= problem.max_samples)


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


class Chains:
    """The chains of a pipeline that were found last, the newest first."""

    def __init__(self, most: int = MOST_CHAINS) -> None:
        self._most = most
        self._chains: list[tuple[list[float], Sequence[float]]] = []
        """Of each the weights of places, that of `NOWHERE`, and last how long it is; and the
        weights of the clock's places, which are others where stages differ."""

    def add(
        self, weights: Sequence[float], length: float, clock_weights: Sequence[float] = ()
    ) -> None:
        """Add a chain with these weights of places, this length, and these weights of the clock's
        places, where those are others."""
        # The 0 is for `NOWHERE`, -2 as an index: what is outside the pipeline is on no chain.
        self._chains.insert(0, ([*weights, 0.0, length], clock_weights or weights))
        del self._chains[self._most :]

    def change(self, changes: Changes) -> None:
        """Add to the costs of some of the clock's places."""
        for chain, weights in self._chains:
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
        for chain, _ in self._chains:
            weight = chain[place] - chain[at]
            # A chain that passes the cheaper place as often gets no longer by the exchange.
            if weight > 0.0:
                left = end - chain[-1] + free * chain[place]
                if left < weight * most:
                    most = left / weight
                    if most < least:
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
        schedule = objective.problem.schedule
        self._kinds = schedule.num_costs
        places = range(len(firsts[0]) * self.width)
        self.costs = list(map(self._cost, places))
        of_clock = dict(itertools.chain(*map(self._on_stages, places)))
        costs = [of_clock[at] for at in range(len(of_clock))]
        sizes = [[len(each.ranks) for each in rank] for rank in firsts]
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
        known = self._clock.costs
        return [(at, cost - known[at]) for at, cost in self._on_stages(place)]

    def _cost(self, place: int) -> float:
        return max([each.cost for each in self.micro_batches(place)])

    def _on_stages(self, place: int) -> list[tuple[int, float]]:
        """The clock's places of a place, one for each kind of stage, with the costs there."""
        slot, column = divmod(place, self.width)
        first = slot * self._kinds * self.width + column
        every = zip(*[each.costs for each in self.micro_batches(place)], strict=True)
        return [(first + kind * self.width, max(costs)) for kind, costs in enumerate(every)]

    def _place_of(self, at: int) -> int:
        """The place of one of the clock's places."""
        slot, column = divmod(at, self.width)
        return slot // self._kinds * self.width + column

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
            self.chains.add(self._of_places(weights), length, weights)
        self._count_effort()
        return end

    def become(self, changes: Changes) -> None:
        """Add to the costs of some of the clock's places."""
        self._clock.become(changes)
        self.chains.change(changes)
        for at, _ in changes:
            place = self._place_of(at)
            self.costs[place] = self._cost(place)
        self._look()

    def _of_places(self, weights: list[float]) -> list[float]:
        """Weights of places from those of the clock's places: what a micro-batch that costs 1 more
        on a mean stage adds, if that is made up like the micro-batch there."""
        if self._kinds == 1:
            return weights
        made = [0.0] * len(self.costs)
        for at, (weight, cost) in enumerate(zip(weights, self._clock.costs, strict=True)):
            made[self._place_of(at)] += weight * cost
        return [
            weight / cost if cost else 0.0 for weight, cost in zip(made, self.costs, strict=True)
        ]

    def _look(self) -> None:
        self.end, weights = self._clock.end, self._clock.weights()
        self.weights = self._of_places(weights)
        # Costs of 0, as of placeholders without a fixed cost, have no weight on uneven stages.
        self.on_chain = [at for at, weight in enumerate(self.weights) if weight > 0.0] or [0]
        self.chains.add(self.weights, self.end, weights)
        self._count_effort()

    def _count_effort(self) -> None:
        # Passes, not calls: the clock runs only those that a change can reach.
        effort = EFFORT_OF_A_SHARED_PASS if self.width > 1 else 1.0
        self._objective.effort -= effort * (self._clock.passes_run - self._passes_counted)
        self._passes_counted = self._clock.passes_run
