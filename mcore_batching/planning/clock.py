"""When the passes of a step start and end: one simulation, of one pipeline or of coupled ones.

A pass starts when its stage is free, its input is there, and the sends that its stage waits for
have ended. Passes of all stages are numbered so that each comes after those that it waits for, at
most two; then one loop in the order of numbers gives all ends.

    F of stage 0, slot 1   waits for   F of stage 0, slot 0   its stage is busy until then
    F of stage 1, slot 1   waits for   F of stage 1, slot 0 and F of stage 0, slot 1

The critical path takes each micro-batch's cost some number of times, its weight. Any path bounds
the end from below, so for the weights of any step

    end(costs) >= sum(weight * cost), with equality for the costs that they were taken from.

Ranks that share a row start each of its passes when the last of them is ready:

    rank 0   [a]  [x]  [b]        x is one row over both ranks
    rank 1   [c]  [x]  [d]

Guarantees: the same times on every platform, because only IEEE `+`, `*` and comparisons are used.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from operator import itemgetter, mul

from mcore_batching.planning.errors import ParallelDimsError
from mcore_batching.planning.schedule import Kind, Schedule, StagePass

IMPLIED_WAITS_REACH = 256
"""A wait is left out if another one implies it within this many numbers. Under the interleaved
schedule most passes are then left with two waits: with 0, clocks take 1.6 times as long."""

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
    """Numbered passes of `count` micro-batches, with joints between them that take no time: number
    0 is one, the start of the step; the last is its end.

    Attributes:
        passes: stage and pass of each number [numbers]; None for joints.
        places: place of the cost that each number takes, slot * kinds of stages + kind [numbers];
            the place after the last for joints.
        waits: the two numbers that each waits for, which may be equal [2][numbers].

    Raises:
        ParallelDimsError: the schedule cannot run this many micro-batches.
    """

    def __init__(self, schedule: Schedule, count: int) -> None:
        self.no_place = count * schedule.num_costs
        self.passes: list[StagePass | None] = []
        self.places: list[int] = []
        self.waits: tuple[list[int], list[int]] = [], []
        self._implied: list[int] = []
        """Bit n of entry i: number i comes after number i - n, by any sequence of waits."""
        self._add(None, ())
        self._number_passes(schedule, count)
        # The end waits for every number that no other waits for.
        self._add(None, set(range(len(self.places))).difference(*self.waits))
        self.of_each = itemgetter(*self.places)
        """Values of each number, from a list of the values of places, and last those of joints."""
        self.first: dict[int, int] = {}
        """The first number of each place."""
        for number, place in enumerate(self.places):
            self.first.setdefault(place, number)

    def _number_passes(self, schedule: Schedule, count: int) -> None:
        stages = range(schedule.dims.pipeline_parallel)
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
                waits = [numbers.get(other, -1) for other in needs]
                if -1 in waits:
                    continue  # not numbered yet: this stage's turn comes again
                # Its stage's pass before is one of the waits, whatever else it needs.
                place = schedule.place_of_cost(*each)
                newest[stage] = self._add(each, (newest[stage], *waits), place)
                numbers[each] = newest[stage]
                at[stage] += 1
            unfinished = [stage for stage in unfinished if at[stage] < len(orders[stage])]
            if len(numbers) == before:
                raise ParallelDimsError(f"{schedule} waits for itself; this is a bug")

    def _add(self, each: StagePass | None, waits: Iterable[int], place: int = -1) -> int:
        """Add a number. Where it waits for more than two others, joints gather them first."""
        implied, near = self._implied, (2 << IMPLIED_WAITS_REACH) - 1
        needed = sorted(set(waits) - {0}) or [0]  # every number comes after the start anyway
        if len(needed) > 2:  # leave out those that a later one waits for anyway
            needed = [
                early
                for early in needed
                if not any(implied[late] >> (late - early) & 1 for late in needed if late > early)
            ]
        while len(needed) > 2:
            needed = [*needed[:-2], self._add(None, needed[-2:])]
        number = len(self.places)
        implied.append(0)
        for early in needed:
            # What `early` comes after, moved up by the distance to it; far bits are cut off.
            implied[number] |= (implied[early] | 1) << (number - early) & near
        self.passes.append(each)
        self.places.append(self.no_place if each is None else place)
        self.waits[0].append(needed[0])
        self.waits[1].append(needed[-1])
        return number


_graph = functools.lru_cache(maxsize=128)(PassGraph)


@functools.lru_cache(maxsize=256)
def graph_of(schedule: Schedule, count: int) -> tuple[PassGraph, list[float]]:
    """The numbered passes of `count` micro-batches, and each number's time over the cost that it
    takes [numbers]."""
    # Schedules that differ in shares of costs or ranks alone share one graph.
    one_rank = replace(schedule.dims, data_parallel=1, context_parallel=1, expert_parallel=1)
    graph = _graph(replace(schedule, dims=one_rank, backward_ratio=1.0), count)
    return graph, [schedule.share(each[1].kind) if each else 0.0 for each in graph.passes]


class Clock:
    """A simulated step of one data-parallel rank, of ranks in lockstep, or of ranks that share
    rows.

    Args:
        costs: forward cost of each micro-batch on each kind of stage [slots * kinds * ranks]; in
            lockstep of the costliest in each slot. One that ranks share has its cost on each.
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
        self._graph, self._shares = graph_of(schedule, len(costs) // (schedule.num_costs * ranks))
        # Joints have the place after the last.
        self._blocks = [*(each for each in blocks for _ in range(schedule.num_costs)), ()]
        self._ranks, self._is_coupled = ranks, bool(blocks)
        self._times: list[list[float]] = [[0.0] * ranks]
        self._line = [0.0]
        self._simulate(costs, 1)

    def with_costs(self, costs: Sequence[float], first_place: int = -1) -> Clock:
        """The same step with other costs, the same as before until `first_place` of them."""
        # `copy.copy` takes as long as a tenth of a simulation.
        other = object.__new__(Clock)
        other.__dict__.update(self.__dict__)
        first = self._graph.first[first_place // self._ranks] if first_place >= 0 else 1
        other._simulate(costs, first)
        return other

    def _simulate(self, costs: Sequence[float], first: int) -> None:
        """Simulate from a number on; passes before it end as they did."""
        graph = self._graph
        self.num_passes = (len(self._shares) - first) * self._ranks
        if self._is_coupled:
            tables = (*graph.waits, graph.places, self._shares)
            times = self._times[:first]
            self._times = _run_coupled(*tables, costs, self._blocks, self._ranks, times)
            self.ends = self._times[-1]
        else:
            took = map(mul, graph.of_each([*costs, 0.0]), self._shares)
            self._line = _run(*graph.waits, took, self._line[:first])
            self.ends = self._line[-1:]
        self.end = max(self.ends)

    def weights(self) -> list[float]:
        """Weight of each cost on the critical path of the rank that ends last [slots * kinds *
        ranks]. A shared row has its weight at its first rank."""
        graph = self._graph
        weights = [0.0] * ((graph.no_place + 1) * self._ranks)
        tables = (*graph.waits, graph.places, self._shares)
        if self._is_coupled:
            _weigh_coupled_path(*tables, self._blocks, self._times, self._ranks, weights)
        else:
            _weigh_path(*tables, self._line, weights)
        return weights[: -self._ranks]

    def operations(self, rank: int = 0) -> list[Operation]:
        """All passes of a rank with their times: stage after stage, each in the order it runs."""
        made = []
        times = self._times if self._is_coupled else [[end] for end in self._line]
        for number, each in enumerate(self._graph.passes):
            if each is None:
                continue
            blocks = self._blocks[self._graph.places[number]] if self._is_coupled else ()
            shared = [range(*block) for block in blocks]
            together = next((block for block in shared if rank in block), (rank,))
            before = [times[waits[number]] for waits in self._graph.waits]
            start = max(ends[other] for ends in before for other in together)
            made.append(Operation(each[0], *each[1], start, times[number][rank]))
        return sorted(made, key=lambda each: each.stage)


def _run(
    waits: list[int], waits_too: list[int], took: Iterable[float], ends: list[float]
) -> list[float]:
    """Ends of all passes of one rank [numbers], from what each takes and the ends of the first."""
    add = ends.append
    passes = islice(zip(waits, waits_too, took, strict=True), len(ends), None)
    # A comparison: faster than `max`.
    for before, other, time in passes:
        start, ready = ends[before], ends[other]
        add((ready if ready > start else start) + time)
    return ends


def _run_coupled(
    waits: list[int],
    waits_too: list[int],
    places: list[int],
    shares: list[float],
    costs: Sequence[float],
    blocks: Sequence[Blocks],
    ranks: int,
    times: list[list[float]],
) -> list[list[float]]:
    """Ends of all passes of all ranks [numbers][ranks], from those of the first."""
    of_places = [costs[at : at + ranks] for at in range(0, len(costs), ranks)]
    of_places.append([0.0] * ranks)
    took = {share: [[cost * share for cost in each] for each in of_places] for share in set(shares)}
    for number in range(len(times), len(places)):
        before, other = times[waits[number]], times[waits_too[number]]
        place, took_here = places[number], took[shares[number]][places[number]]
        if not blocks[place]:
            ends = [
                (a if a > b else b) + t for a, b, t in zip(before, other, took_here, strict=True)
            ]
            times.append(ends)
            continue
        starts = [a if a > b else b for a, b in zip(before, other, strict=True)]
        for first, after in blocks[place]:
            # Ranks that share a row start with the last of them.
            starts[first:after] = [max(starts[first:after])] * (after - first)
        times.append([start + t for start, t in zip(starts, took_here, strict=True)])
    return times


def _weigh_path(
    waits: list[int],
    waits_too: list[int],
    places: list[int],
    shares: list[float],
    ends: list[float],
    weights: list[float],
) -> None:
    """Add each pass on the critical path to the weight of its place; a forward pass of a mean stage
    that holds one chunk counts 1."""
    number = len(places) - 1  # back from the end of the step, each time to the later of two waits
    while number > 0:
        weights[places[number]] += shares[number]
        before, other = waits[number], waits_too[number]
        number = other if ends[other] > ends[before] else before


def _weigh_coupled_path(
    waits: list[int],
    waits_too: list[int],
    places: list[int],
    shares: list[float],
    blocks: Sequence[Blocks],
    times: list[list[float]],
    ranks: int,
    weights: list[float],
) -> None:
    """`_weigh_path` for coupled ranks: the critical path changes rank where ranks share a row."""
    number, rank = len(places) - 1, times[-1].index(max(times[-1]))
    while number > 0:
        place, first, after = places[number], rank, rank + 1
        for block in blocks[place]:
            if block[0] <= rank < block[1]:
                first, after = block
        weights[place * ranks + first] += shares[number]
        # On to the pass, and the rank, that this one started after.
        latest, on = -1.0, number
        for before in (waits_too[number], waits[number]):
            for each in range(first, after):
                if times[before][each] > latest:
                    latest, on, rank = times[before][each], before, each
        number = on


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
