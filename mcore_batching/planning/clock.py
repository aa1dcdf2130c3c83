"""When the passes of a step start and end: one simulation, of one pipeline or of coupled ones.

A pass starts when its stage is free, its input is there, and the sends that its stage waits for
have ended. Passes of all stages are numbered so that each comes after those that it waits for, at
most two; then one loop in the order of numbers gives all ends.

    F of stage 0, slot 1   waits for   F of stage 0, slot 0   its stage is busy until then
    F of stage 1, slot 1   waits for   F of stage 1, slot 0 and F of stage 0, slot 1

The critical path takes each micro-batch's cost some number of times, its weight. Any path bounds
the end from below, so for the weights of any step

    end(costs) >= sum(weight * cost), with equality for the costs that they were taken from.

Ranks that share a row start each of its passes when the last of them is ready; then passes of all
ranks are numbered, those of a shared row once:

    rank 0   [a]  [x]  [b]        x is one row over both ranks
    rank 1   [c]  [x]  [d]

Guarantees: the same times on every platform, because only IEEE `+`, `*` and comparisons are used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from operator import itemgetter, mul

from mcore_batching.planning.errors import ParallelDimsError
from mcore_batching.planning.schedule import Kind, Schedule, StagePass

Blocks = Sequence[tuple[int, int]]
"""First rank, and the one after the last, of each row of a slot that ranks share."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One pass of one micro-batch through one model chunk, with its times."""

    stage: int
    """Pipeline rank."""
    kind: Kind
    """See `schedule`."""
    chunk: int
    """Model chunk of the stage."""
    slot: int
    """Number of the micro-batch on its data-parallel rank."""
    start: float
    """Units of cost since the step began."""
    end: float
    """Units of cost since the step began."""


class PassGraph:
    """Numbered passes, with joints between them that take no time: number 0 is one, the start of
    the step.

    Attributes:
        passes: pass, and the ranks that run it together, of each number [numbers]; None for joints.
        places: place of the cost that each number takes, (slot * kinds of stages + kind) * ranks +
            the first rank that runs it [numbers]; -1 for joints.
        waits: the two numbers that each waits for, which may be equal [numbers].
        last: the number of the end of the step on each rank.
    """

    def __init__(self) -> None:
        self.passes: list[tuple[StagePass, range] | None] = []
        self.places: list[int] = []
        self.waits: list[tuple[int, int]] = []
        self.last: list[int] = []
        self.add(None, -1, ())

    def add(self, each: tuple[StagePass, range] | None, place: int, waits: Collection[int]) -> int:
        """Add a number. Where it waits for more than two others, joints gather them first."""
        needed = [*waits] or [0]
        while len(needed) > 2:
            needed = [*needed[:-2], self.add(None, -1, needed[-2:])]
        self.passes.append(each)
        self.places.append(place)
        self.waits.append((needed[0], needed[-1]))
        return len(self.places) - 1

    def shares(self, schedule: Schedule) -> list[float]:
        """Time of each number over the cost that it takes [numbers]."""
        forward, backward = schedule.share("F"), schedule.share("B")
        return [
            0.0 if each is None else forward if each[0][1].kind == "F" else backward
            for each in self.passes
        ]

    @functools.cached_property
    def of_each(self) -> Callable[[Sequence[float]], Sequence[float]]:
        """Values of each number, from a list of the values of places, and last that of joints."""
        return itemgetter(*self.places)  # a third of the time of looking up each

    @functools.cached_property
    def of_place(self) -> dict[int, list[int]]:
        """The numbers that take the cost of each place, ascending."""
        found: dict[int, list[int]] = {}
        for number, place in enumerate(self.places):
            found.setdefault(place, []).append(number)
        return found


@functools.lru_cache(maxsize=128)
def _graph(schedule: Schedule, count: int) -> PassGraph:
    """The passes of `count` micro-batches on one rank.

    Raises:
        ParallelDimsError: the schedule cannot run this many micro-batches.
    """
    graph, dims, alone = PassGraph(), schedule.dims, range(1)
    stages = range(dims.pipeline_parallel)
    orders = [schedule.order(stage, count) for stage in stages]
    sends = schedule.waits_for_sends(count)
    numbers: dict[StagePass, int] = {}
    newest, at = [0 for _ in stages], [0 for _ in stages]
    unfinished = list(stages)
    while unfinished:
        before = len(numbers)
        for stage in unfinished:
            each = stage, orders[stage][at[stage]]
            taken = schedule.needs(*each)
            needs = [taken, *sends.get(each, ())] if taken else sends.get(each, ())
            # Its stage's pass before is one of the waits, whatever else it needs.
            waits = {numbers.get(other, -1) for other in needs} | {newest[stage]}
            if -1 in waits:
                continue  # not numbered yet: this stage's turn comes again
            needed = sorted(waits - {0})  # every number comes after the start anyway
            number = graph.add((each, alone), schedule.place_of_cost(*each), needed)
            newest[stage] = numbers[each] = number
            at[stage] += 1
        unfinished = [stage for stage in unfinished if at[stage] < len(orders[stage])]
        if len(numbers) == before:
            raise ParallelDimsError(f"{schedule} waits for itself; this is a bug")
    # The end waits for every number that no other waits for.
    graph.last = [
        graph.add(
            None, -1, set(range(len(graph.places))).difference(chain.from_iterable(graph.waits))
        )
    ]
    return graph


@functools.lru_cache(maxsize=256)
def graph_of_rank(schedule: Schedule, count: int) -> tuple[PassGraph, list[float]]:
    """The numbered passes of `count` micro-batches on one rank, and each one's time over the cost
    that it takes [numbers]."""
    # Schedules that differ in shares of costs or ranks alone share one graph.
    one_rank = replace(schedule.dims, data_parallel=1, context_parallel=1, expert_parallel=1)
    graph = _graph(replace(schedule, dims=one_rank, backward_ratio=1.0), count)
    return graph, graph.shares(schedule)


def graph_of_ranks(schedule: Schedule, blocks: Sequence[Blocks], ranks: int) -> PassGraph:
    """The numbered passes of ranks that share rows, `blocks` [slots]."""
    (alone, _), graph = graph_of_rank(schedule, len(blocks)), PassGraph()
    apart = [range(rank, rank + 1) for rank in range(ranks)]
    rows = []
    for of_slot in blocks:
        shared = [range(*block) for block in of_slot]
        others = [rank for rank in apart if not any(rank[0] in block for block in shared)]
        rows.append(sorted([*shared, *others], key=itemgetter(0)))
    numbers = [[0] * ranks]
    """Of each of one rank's numbers those of all ranks."""
    passes = zip(alone.passes, alone.places, alone.waits, strict=True)
    for each, place, (before, other) in islice(passes, 1, None):
        here: list[int] = []
        for row in rows[place // schedule.num_costs] if each else apart:
            first, after = row.start, row.stop
            waits = {*numbers[before][first:after], *numbers[other][first:after]} - {0}
            what = (each[0], row) if each else None
            where = place * ranks + first if each else -1
            here += [graph.add(what, where, waits)] * len(row)
        numbers.append(here)
    graph.last = numbers[-1]
    return graph


class Clock:
    """A simulated step of one data-parallel rank, of ranks in lockstep, or of ranks that share
    rows.

    Args:
        costs: forward cost of each micro-batch on each kind of stage [slots * kinds * ranks]; in
            lockstep of the costliest in each slot. One that ranks share counts at the first.
        schedule: order and relative costs of passes.
        blocks: the ranks that share a row [slots]; empty if there is one rank.
        ranks: number of ranks.

    Attributes:
        ends: end of the step on each rank.
        end: end of the step.
        num_passes: passes that were simulated, joints among them.

    Raises:
        ParallelDimsError: the schedule cannot run this many micro-batches.
    """

    def __init__(
        self,
        costs: Sequence[float],
        schedule: Schedule,
        blocks: Sequence[Blocks] = (),
        ranks: int = 1,
    ) -> None:
        if blocks:
            self._graph = graph_of_ranks(schedule, blocks, ranks)
            self._shares = self._graph.shares(schedule)
        else:
            count = len(costs) // schedule.num_costs
            self._graph, self._shares = graph_of_rank(schedule, count)
        self._took = [*map(mul, self._graph.of_each([*costs, 0.0]), self._shares)]
        self._times = [0.0]
        self._num_costs = len(costs)
        self._simulate(1)

    def with_costs(self, costs: Sequence[float], places: Iterable[int]) -> Clock:
        """The same step with other costs, of which those of some places differ."""
        # `copy.copy` takes as long as a tenth of a simulation.
        other = object.__new__(Clock)
        other.__dict__.update(self.__dict__)
        other._took, shares, first = self._took[:], self._shares, len(self._took)
        for place in places:
            numbers = self._graph.of_place.get(place)  # none take that of a shared row twice
            if numbers:
                first = min(first, numbers[0])
                for number in numbers:
                    other._took[number] = costs[place] * shares[number]
        other._simulate(first)
        return other

    def _simulate(self, first: int) -> None:
        """Simulate from a number on; passes before it end as they did."""
        times = self._times[:first]
        add = times.append
        # Slices, since skipping the first passes in the loop would take half as long as simulating
        # them; and a comparison: faster than `max`.
        for (before, other), took in zip(
            self._graph.waits[first:], self._took[first:], strict=True
        ):
            start, ready = times[before], times[other]
            add((ready if ready > start else start) + took)
        self._times, self.num_passes = times, len(times) - first
        self.ends = [times[number] for number in self._graph.last]
        self.end = max(self.ends)

    def weights(self) -> list[float]:
        """Weight of each cost on the critical path of the rank that ends last [slots * kinds *
        ranks]: a forward pass of a mean stage that holds one chunk counts 1. A shared row has its
        weight at its first rank."""
        graph, times, shares = self._graph, self._times, self._shares
        weights = [0.0] * (self._num_costs + 1)  # that of joints comes last
        # Back from the end of the step, each time to the later of two waits.
        number = max(graph.last, key=times.__getitem__)
        while number > 0:
            weights[graph.places[number]] += shares[number]
            before, other = graph.waits[number]
            number = other if times[other] > times[before] else before
        return weights[:-1]

    def operations(self, rank: int = 0) -> list[Operation]:
        """All passes of a rank with their times: stage after stage, each in the order it runs."""
        times, made = self._times, []
        for each, end, waits in zip(self._graph.passes, times, self._graph.waits, strict=True):
            if each is not None and rank in each[1]:
                (stage, what), start = each[0], max(times[other] for other in waits)
                made.append(Operation(stage, *what, start, end))
        return sorted(made, key=lambda each: each.stage)


def clocks_of(
    costs: Sequence[Sequence[float]],
    schedule: Schedule,
    sizes: Sequence[Sequence[int]] | None = None,
) -> list[Clock]:
    """The clocks of a step.

    Args:
        costs: forward cost of each micro-batch [ranks][slots], or on each kind of stage
            [ranks][slots * kinds]; a shared one has its cost on each of its ranks.
        schedule: order and relative costs of passes.
        sizes: under dynamic CP the context-parallel size of each micro-batch [ranks][slots].

    Returns:
        a single clock for ranks in lockstep or where any share rows; else one for each rank, the
        same object for ranks with equal costs.
    """
    if schedule.dims.in_lockstep:  # every slot takes as long as its costliest micro-batch
        return [Clock([max(slot) for slot in zip(*costs, strict=True)], schedule)]
    if sizes is not None and any(size > 1 for of_rank in sizes for size in of_rank):
        flat = [cost for slot in zip(*costs, strict=True) for cost in slot]
        return [Clock(flat, schedule, blocks_of(sizes), len(costs))]
    ranks = [tuple(rank) for rank in costs]
    of_costs = {rank: Clock(rank, schedule) for rank in dict.fromkeys(ranks)}
    return [of_costs[rank] for rank in ranks]


def blocks_of(sizes: Sequence[Sequence[int]]) -> list[Blocks]:
    """The ranks that share a micro-batch [slots], from context-parallel sizes [ranks][slots].

    On 4 ranks with sizes 2, 2, 1, 1 in a slot its blocks are [(0, 2)].
    """
    return [
        [(rank, rank + size) for rank, size in enumerate(slot) if size > 1 and rank % size == 0]
        for slot in zip(*sizes, strict=True)
    ]
