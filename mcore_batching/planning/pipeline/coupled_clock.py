"""The clock of ranks that share rows, and the choice of a step's clocks.

rank 0   [a]  [x]  [b]        x is one row over both ranks: in every pass of slot 1, on
rank 1   [c]  [x]  [d]        every stage, both start when the later one is ready
"""

from __future__ import annotations

from collections.abc import Sequence

from mcore_batching.planning.pipeline.clock import Changes, Clock
from mcore_batching.planning.pipeline.compiled import as_list
from mcore_batching.planning.pipeline.passes import Schedule

Blocks = Sequence[tuple[int, int]]
"""First rank, and the one after the last, of each row of a slot that ranks share."""


class CoupledClock(Clock):
    """The pipelines of all ranks under dynamic CP.

    All ranks run the same passes in the same order, so pass after pass is simulated for all ranks
    at once, with one list of ends per pass. A change simulates all passes from its first one on:
    tails as in `Clock` would be one for each pair of ranks that some later row joins.

    Weights are those of the straggler's critical path, which goes from rank to rank where these
    share a row; a shared row has its weight at the place of its first rank.

    Args:
        costs: forward cost of each micro-batch on a stage [slots * ranks]; place slot * ranks +
            rank. A shared one has its cost on each of its ranks. Where stages differ, a slot's
            costs on each kind of them follow each other [slots * kinds * ranks].
        schedule: order and relative costs of passes.
        blocks: the ranks that share a micro-batch [slots].
    """

    def __init__(
        self, costs: Sequence[float], schedule: Schedule, blocks: Sequence[Blocks]
    ) -> None:
        self._load(costs, schedule, len(blocks))
        blocks = [shared for shared in blocks for _ in range(schedule.num_costs)]
        ranks = self._ranks = len(costs) // len(blocks)
        self._shared = {
            slot * ranks + rank: (first, after)
            for slot, shared in enumerate(blocks)
            for first, after in shared
            for rank in range(first, after)
        }
        """First rank, and the one after the last, of the places that several ranks share."""
        rows = [self.costs[at : at + ranks] for at in range(0, len(costs), ranks)]
        rows.append([0.0] * ranks)
        shares = as_list(self._shares)
        self._took_of = {s: [[cost * s for cost in row] for row in rows] for s in set(shares)}
        """{share: times of the passes that take this share of their slot's cost [slots][ranks]}.
        Passes refer to these rows, so that a cost is changed in one row for each share."""
        took = [self._took_of[s][slot] for s, slot in zip(shares, self._slots, strict=True)]
        waits, waits_too = map(as_list, self._waits)
        # The slot after the last belongs to numbers without a micro-batch.
        parts = [[(slice(*block), block[1] - block[0]) for block in slot] for slot in [*blocks, []]]
        slots = as_list(self._slots)
        self._columns = waits, waits_too, slots, took, [parts[slot] for slot in slots]
        self._all_ends = self._all_tried = self._simulated([[0.0] * ranks], 1)
        """Ends of passes [numbers][ranks]: by the costs, and with the changes tried last."""

    @property
    def ends(self) -> list[float]:
        """End of the step on each rank."""
        return self._all_ends[-1]

    def end_with(self, changes: Changes) -> float:
        """As `Clock.end_with`; any of its places names a shared micro-batch."""
        first, _ = self._span(changes)
        before = self.costs[:]
        self._change(changes)
        self._all_tried = self._simulated(self._all_ends[:first], first)
        # Costs go back; the ends stay, for `become` of the same changes.
        for place, _ in changes:
            self._set_cost(place, before[place])
        self._tried = changes
        return max(self._all_tried[-1])

    def become(self, changes: Changes) -> None:
        """Make `changes`, without a simulation if they were tried last."""
        if changes != self._tried:
            self.end_with(changes)
        self._change(changes)
        self._all_ends, self._tried = self._all_tried, ()

    def weights(self) -> list[float]:
        """As `Clock.weights`."""
        return self._critical_path(self._all_ends)

    def weights_with(self) -> list[float]:
        """As `Clock.weights_with`."""
        return self._critical_path(self._all_tried)

    def _simulated(self, ends: list[list[float]], first: int) -> list[list[float]]:
        """Ends of all passes [numbers][ranks]; `ends` has those before `first`, and is extended."""
        self.passes_run += (len(self._slots) - first) * self._ranks
        waits, waits_too, _, took, blocks = self._columns
        steps = zip(waits[first:], waits_too[first:], took[first:], blocks[first:], strict=True)
        for before, other, row, shared in steps:
            passes = zip(ends[before], ends[other], row)  # noqa: B905
            ended = [(free if free > ready else ready) + time for free, ready, time in passes]
            for block, size in shared:
                # They start with the last of them and take as long, so they end with the last.
                ended[block] = [max(ended[block])] * size
            ends.append(ended)
        return ends

    def _critical_path(self, all_ends: list[list[float]]) -> list[float]:
        """Weights [places], from ends of all passes."""
        waits, waits_too, slots, _, _ = self._columns
        ranks, shared, shares = self._ranks, self._shared, as_list(self._shares)
        number, rank = len(slots) - 1, all_ends[-1].index(max(all_ends[-1]))
        weights = [0.0] * (len(self.costs) + ranks)
        while number > 0:
            at = slots[number] * ranks + rank
            before, other = waits[number], waits_too[number]
            if at not in shared:
                weights[at] += shares[number]
                number = before if all_ends[before][rank] > all_ends[other][rank] else other
                continue
            # On to the rank, and the pass, that this one started after.
            first, after = shared[at]
            weights[at - rank + first] += shares[number]
            ends, ends_too = all_ends[before][first:after], all_ends[other][first:after]
            latest, latest_too = max(ends), max(ends_too)
            if latest > latest_too:
                number, rank = before, first + ends.index(latest)
            else:
                number, rank = other, first + ends_too.index(latest_too)
        return weights[: len(self.costs)]

    def _members(self, number: int, rank: int) -> range:
        """The ranks that run a pass together with `rank`."""
        at = self._slots[number] * self._ranks + rank
        return range(*self._shared.get(at, (rank, rank + 1)))

    def _times(self, number: int, rank: int) -> tuple[float, float]:
        members = self._members(number, rank)
        start = max(self._all_ends[w[number]][each] for w in self._waits for each in members)
        return start, self._all_ends[number][rank]

    def _slot_of(self, place: int) -> int:
        return place // self._ranks

    def _set_cost(self, place: int, cost: float) -> None:
        slot, rank = divmod(place, self._ranks)
        first, after = self._shared.get(place, (rank, rank + 1))
        self.costs[place - rank + first : place - rank + after] = [cost] * (after - first)
        for share, rows in self._took_of.items():
            rows[slot][first:after] = [cost * share] * (after - first)


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
        a single clock for ranks in lockstep or under dynamic CP; else one for each rank, the same
        object for ranks with equal costs.
    """
    if schedule.dims.in_lockstep:  # every slot takes as long as its costliest micro-batch
        return [Clock([max(slot) for slot in zip(*costs, strict=True)], schedule)]
    if sizes is not None:
        flat = [cost for slot in zip(*costs, strict=True) for cost in slot]
        return [CoupledClock(flat, schedule, blocks_of(sizes))]
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
