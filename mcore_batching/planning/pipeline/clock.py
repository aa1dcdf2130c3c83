"""When the passes of a step end: the one simulation of pipelines, kept for changes of their costs.

After a change of few micro-batches only the passes from the first of theirs to the last run anew.
What comes before ends as it did, and for what comes after the longest chain of passes from each on
is known: the step ends at the largest sum of both over all waits across the cut.

A step's end is the length of the longest of many chains of passes, each the sum over micro-batches
of a weight times a cost. So with the weights of any chain found once,

    end(costs) >= sum(weight * cost)        for all costs, with equality for those it was found for

and a change of costs that does not shorten this sum cannot make the step end sooner: most changes
need no simulation to be refused.

Guarantees: the same times on every platform, because only IEEE `+`, `*` and comparisons are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import add
from typing import Any

from mcore_batching.planning.compiled import Integers, Numbers, as_list, kernel, numbers
from mcore_batching.planning.pipeline.passes import Kind, Schedule
from mcore_batching.planning.pipeline.program import program

Changes = Sequence[tuple[int, float]]
"""Places of micro-batches, and how much more each costs; one may be named twice."""
Blocks = Sequence[tuple[int, int]]
"""First rank, and the one after the last, of each micro-batch of a slot that ranks share."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One pass of one micro-batch through one model chunk, with its times."""

    stage: int
    """Pipeline rank."""
    kind: Kind
    """Forward or backward, see `passes`."""
    chunk: int
    """Model chunk of the stage."""
    slot: int
    """Number of the micro-batch on its data-parallel rank."""
    start: float
    """In units of cost since the step began."""
    end: float
    """Likewise."""


class Clock:
    """A pipeline by itself; that of ranks in lockstep has the costliest micro-batch of each slot.

    Args:
        costs: forward cost of each micro-batch on a mean stage [slots]; its place is its slot.
        schedule: what runs in which order.
        transfer: time that a transfer between stages takes, if the schedule has any.

    Attributes:
        costs: likewise [places].
        passes_run: passes simulated up to now.

    Raises:
        ParallelDimsError: the schedule cannot run this many micro-batches.
    """

    def __init__(
        self, costs: Sequence[float], schedule: Schedule, *, transfer: float = 0.0
    ) -> None:
        self._load(costs, schedule, len(costs))
        of_slots = [*costs, transfer, 0.0]
        took = [
            of_slots[slot] * share for slot, share in zip(self._slots, self._shares, strict=True)
        ]
        self._took, self._ends = numbers(took), numbers([0.0] * len(took))
        self._tails, self._tails_from = numbers(took), len(took)
        """Longest chain from each pass on, where it is known; and from which on it is."""
        self._run(0, len(took))

    def _load(self, costs: Sequence[float], schedule: Schedule, slots: int) -> None:
        self.costs = list(costs)
        self._program, self._shares = program(schedule, slots)
        self._waits, self._slots = self._program.waits, self._program.slots
        self._tried: Changes = ()
        self.passes_run = 0

    @property
    def end(self) -> float:
        """End of the step."""
        return max(self.ends)

    @property
    def ends(self) -> list[float]:
        """Likewise of each rank; of a pipeline by itself a single one."""
        return [float(self._ends[-1])]

    def end_with(self, changes: Changes) -> float:
        """End of the step after changes, exact but for rounding; they are not kept."""
        first, stop = self._span(changes)
        self._bring_tails(stop)
        kept = self._kept(first, stop)
        self._change(changes)
        self._run(first, stop)
        end = _joined(*self._program.crossing(stop), self._ends, self._tails)
        self._keep(first, stop, kept)
        self._tried = changes
        return float(end)

    def become(self, changes: Changes) -> None:
        """Make changes."""
        first, stop = self._span(changes)
        self._change(changes)
        self._tails_from = max(self._tails_from, stop)
        self._run(first, len(self._slots))

    def weights(self) -> list[float]:
        """Weight of each micro-batch on a chain that is as long as the step [places]."""
        weights = numbers([0.0] * (len(self.costs) + 2))
        _weigh(*self._waits, self._slots, self._shares, self._ends, weights)
        return as_list(weights)[:-2]

    def weights_with(self) -> list[float]:
        """Likewise after the changes that `end_with` tried last."""
        first, stop = self._span(self._tried)[0], len(self._slots)
        kept = self._kept(first, stop)
        self._change(self._tried)
        self._run(first, stop)
        weights = self.weights()
        self._keep(first, stop, kept)
        return weights

    def operations(self, rank: int = 0) -> list[Operation]:
        """All passes of a rank with their times, stage after stage, each in its order."""
        made = []
        for number, place in enumerate(self._program.places):
            if place is not None:
                stage, what = place
                start, end = self._times(number, rank)
                made.append(Operation(stage, *what, start, end))
        return sorted(made, key=lambda each: each.stage)

    def _times(self, number: int, rank: int) -> tuple[float, float]:
        """Start and end of a pass on a rank."""
        del rank
        start = max(self._ends[waits[number]] for waits in self._waits)
        return float(start), float(self._ends[number])

    def _span(self, changes: Changes) -> tuple[int, int]:
        """The first pass that changes concern, and the one after the last."""
        spans = [self._program.spans[self._slot_of(place)] for place, _ in changes]
        return min(first for first, _ in spans), max(stop for _, stop in spans)

    def _change(self, changes: Changes) -> None:
        for place, more in changes:
            self._set_cost(place, self.costs[place] + more)

    def _kept(self, first: int, stop: int) -> tuple[list[float], Any, Any]:
        """What changes that concern some passes write over, for `_keep`."""
        took: Any = self._took[first:stop]
        ends: Any = self._ends[first:stop]
        return self.costs[:], took.copy(), ends.copy()

    def _keep(self, first: int, stop: int, kept: tuple[list[float], Any, Any]) -> None:
        self.costs[:], self._took[first:stop], self._ends[first:stop] = kept

    def _slot_of(self, place: int) -> int:
        return place

    def _set_cost(self, place: int, cost: float) -> None:
        self.costs[place] = cost
        _fill(self._program.of_slot[place], cost, self._shares, self._took)

    def _run(self, first: int, stop: int) -> None:
        self.passes_run += stop - first
        _run(*self._waits, self._took, self._ends, first, stop)

    def _bring_tails(self, first: int) -> None:
        """Have the longest chains from all passes on, from `first` on."""
        stop = self._tails_from
        if first < stop:
            crossing, after = self._program.crossing(stop), numbers([0.0] * stop)
            _run_back(*self._waits, self._took, after, self._tails, first, stop, *crossing)
            self.passes_run += stop - first
            self._tails_from = first


@kernel
def _fill(passes: Integers, cost: float, shares: Numbers, took: Numbers) -> None:
    """Times of the passes of a slot."""
    for number in passes:
        took[number] = cost * shares[number]


@kernel
def _run(
    waits: Integers, waits_too: Integers, took: Numbers, ends: Numbers, first: int, stop: int
) -> None:
    """Ends of passes."""
    number = first
    passes = zip(waits[first:stop], waits_too[first:stop], took[first:stop])  # noqa: B905
    for before, other, time in passes:
        start, ready = ends[before], ends[other]
        ends[number] = (ready if ready > start else start) + time
        number += 1


@kernel
def _run_back(
    waits: Integers,
    waits_too: Integers,
    took: Numbers,
    after: Numbers,
    tails: Numbers,
    first: int,
    stop: int,
    early: Integers,
    late: Integers,
) -> None:
    """Tails of passes, from those of `stop` on; `after`, of all passes before it, is 0."""
    for number, other in zip(early, late):  # noqa: B905
        if tails[other] > after[number]:
            after[number] = tails[other]
    for number in range(stop - 1, first - 1, -1):
        tail = after[number] + took[number]
        tails[number] = tail
        if tail > after[waits[number]]:
            after[waits[number]] = tail
        if tail > after[waits_too[number]]:
            after[waits_too[number]] = tail


@kernel
def _joined(early: Integers, late: Integers, ends: Numbers, tails: Numbers) -> float:
    """The largest sum across a cut."""
    end = 0.0
    for number, other in zip(early, late):  # noqa: B905
        if ends[number] + tails[other] > end:
            end = ends[number] + tails[other]
    return end


@kernel
def _weigh(
    waits: Integers,
    waits_too: Integers,
    slots: Integers,
    shares: Numbers,
    ends: Numbers,
    weights: Numbers,
) -> None:
    """The way back from the end: how often each slot is on it, forward passes counting 1."""
    number = len(slots) - 1
    while number > 0:
        weights[slots[number]] += shares[number]
        before, other = waits[number], waits_too[number]
        number = other if ends[other] > ends[before] else before


class CoupledClock(Clock):
    """Ranks that wait for each other in micro-batches that they share.

        rank 0   [a]  [x]  [b]        x is one row over both ranks: in every pass of slot 1, on
        rank 1   [c]  [x]  [d]        every stage, both begin when the later one is ready

    Ranks run the same passes in the same order, so one pass of all ranks is simulated after the
    other. Its weights are those of the latest rank's chain, of a shared micro-batch at the place of
    its first rank.

    Args:
        costs: forward cost of each micro-batch on a mean stage, that of a shared one on each of its
            ranks [slots * ranks]; its place is its slot times the ranks, plus its rank.
        schedule: what runs in which order.
        blocks: which ranks share a micro-batch [slots].
    """

    def __init__(
        self, costs: Sequence[float], schedule: Schedule, blocks: Sequence[Blocks]
    ) -> None:
        self._load(costs, schedule, len(blocks))
        ranks = self._ranks = len(costs) // len(blocks)
        self._blocks = [*blocks, (), ()]
        """Of each slot, and of what is none's."""
        self._shared = [range(place, place + 1) for place in range(len(costs))]
        """Places that share each one's micro-batch."""
        for slot, shared in enumerate(blocks):
            for first, after in shared:
                places = range(slot * ranks + first, slot * ranks + after)
                self._shared[places.start : places.stop] = [places] * len(places)
        rows = [self.costs[at : at + ranks] for at in range(0, len(costs), ranks)]
        rows += [[0.0] * ranks, [0.0] * ranks]
        shares = as_list(self._shares)
        self._took_of = {s: [[cost * s for cost in row] for row in rows] for s in set(shares)}
        """Times of passes, by their share of a slot's costs [slots][ranks]."""
        took = [self._took_of[s][slot] for s, slot in zip(shares, self._slots, strict=True)]
        waits, waits_too = map(as_list, self._waits)
        self._columns = waits, waits_too, as_list(self._slots), took
        self._all_ends = self._all_tried = self._simulated([[0.0] * ranks], 1)
        """Ends of passes, as the costs are and as tried last [numbers][ranks]."""

    @property
    def ends(self) -> list[float]:
        """End of each rank's step."""
        return self._all_ends[-1]

    def ends_with(self) -> list[float]:
        """Likewise after the changes that `end_with` tried last."""
        return self._all_tried[-1]

    def end_with(self, changes: Changes) -> float:
        """As for a pipeline; a shared micro-batch may be named by any of its ranks."""
        first, _ = self._span(changes)
        before = self.costs[:]
        self._change(changes)
        self._all_tried = self._simulated(self._all_ends[:first], first)
        for place, _ in changes:
            self._set_cost(place, before[place])
        self._tried = changes
        return max(self._all_tried[-1])

    def become(self, changes: Changes) -> None:
        """Make changes; those that were tried last need no simulation."""
        if changes != self._tried:
            self.end_with(changes)
        self._change(changes)
        self._all_ends, self._tried = self._all_tried, ()

    def weights(self) -> list[float]:
        """As for a pipeline."""
        return self._chain(self._all_ends)

    def weights_with(self) -> list[float]:
        """As for a pipeline."""
        return self._chain(self._all_tried)

    def _simulated(self, ends: list[list[float]], first: int) -> list[list[float]]:
        """Ends of all passes, given those before `first`."""
        self.passes_run += (len(self._slots) - first) * self._ranks
        ended, blocks, ranks = ends.append, self._blocks, self._ranks
        waits, waits_too, slots, took = self._columns
        columns = waits[first:], waits_too[first:], slots[first:], took[first:]
        for before, other, slot, row in zip(*columns, strict=True):
            free, ready, shared = ends[before], ends[other], blocks[slot]
            if not shared:
                passes = zip(free, ready, row)  # noqa: B905
                ended([(a if a > b else b) + time for a, b, time in passes])
            elif shared[0][1] - shared[0][0] == ranks:
                ended([max(max(free), max(ready)) + row[0]] * ranks)
            else:
                start = list(map(max, free, ready))
                for own, after in shared:
                    start[own:after] = [max(start[own:after])] * (after - own)
                ended(list(map(add, start, row)))
        return ends

    def _chain(self, all_ends: list[list[float]]) -> list[float]:
        waits, waits_too, slots, _ = self._columns
        number, rank = len(slots) - 1, all_ends[-1].index(max(all_ends[-1]))
        weights = [0.0] * (len(self.costs) + 2 * self._ranks)
        while number > 0:
            members = self._members(number, rank)
            weights[slots[number] * self._ranks + members.start] += float(self._shares[number])
            _, number, rank = max(
                (all_ends[before][each], before, each)
                for before in (waits[number], waits_too[number])
                for each in members
            )
        return weights[: len(self.costs)]

    def _members(self, number: int, rank: int) -> range:
        """The ranks that wait for each other in a pass, of which one is given."""
        for first, after in self._blocks[self._slots[number]]:
            if first <= rank < after:
                return range(first, after)
        return range(rank, rank + 1)

    def _times(self, number: int, rank: int) -> tuple[float, float]:
        members = self._members(number, rank)
        start = max(self._all_ends[w[number]][each] for w in self._waits for each in members)
        return start, self._all_ends[number][rank]

    def _slot_of(self, place: int) -> int:
        return place // self._ranks

    def _set_cost(self, place: int, cost: float) -> None:
        for each in self._shared[place]:
            self.costs[each] = cost
            slot, rank = divmod(each, self._ranks)
            for share, rows in self._took_of.items():
                rows[slot][rank] = cost * share


def clocks_of(
    costs: Sequence[Sequence[float]],
    schedule: Schedule,
    sizes: Sequence[Sequence[int]] | None = None,
) -> list[Clock]:
    """The clocks of a step: one of all ranks where these wait for each other, else one of each.

    Args:
        costs: forward cost of each micro-batch [ranks][slots], of a shared one on each of its
            ranks.
        schedule: what runs in which order.
        sizes: under dynamic CP, how many ranks share each micro-batch [ranks][slots].

    Returns:
        a single one of ranks in lockstep or under dynamic CP; ranks with the same costs, such as
        those without samples, have the same one.
    """
    if schedule.dims.in_lockstep:
        return [Clock([max(slot) for slot in zip(*costs, strict=True)], schedule)]
    if sizes is not None:
        flat = [cost for slot in zip(*costs, strict=True) for cost in slot]
        return [CoupledClock(flat, schedule, blocks_of(sizes))]
    ranks = [tuple(rank) for rank in costs]
    of_costs = {rank: Clock(rank, schedule) for rank in dict.fromkeys(ranks)}
    return [of_costs[rank] for rank in ranks]


def blocks_of(sizes: Sequence[Sequence[int]]) -> list[Blocks]:
    """The ranks that share a micro-batch [slots], from context-parallel sizes [ranks][slots]."""
    return [
        [(rank, rank + size) for rank, size in enumerate(slot) if size > 1 and rank % size == 0]
        for slot in zip(*sizes, strict=True)
    ]
