"""The clock of ranks that share rows, and the choice of a step's clocks.

rank 0   [a]  [x]  [b]        x is one row over both ranks: in every pass of slot 1, on
rank 1   [c]  [x]  [d]        every stage, both start when the later one is ready
"""

from __future__ import annotations

from collections.abc import Sequence

from mcore_batching.planning.pipeline.clock import Changes, Clock
from mcore_batching.planning.pipeline.passes import Schedule

Blocks = Sequence[tuple[int, int]]
"""First rank, and the one after the last, of each row of a slot that ranks share."""


def members_of(blocks: Sequence[Blocks], ranks: int, kinds: int) -> tuple[list[int], list[int]]:
    """First rank, and the one after the last, that run a place together [(slots * kinds + 1) *
    ranks]; nobody shares the slot after the last, which joints have."""
    firsts: list[int] = []
    afters: list[int] = []
    for shared in (*(each for each in blocks for _ in range(kinds)), ()):
        first, after = list(range(ranks)), list(range(1, ranks + 1))
        for begin, end in shared:
            first[begin:end], after[begin:end] = [begin] * (end - begin), [end] * (end - begin)
        firsts += first
        afters += after
    return firsts, afters


class CoupledClock(Clock):
    """The pipelines of all ranks under dynamic CP.

    All ranks run the same passes in the same order, so pass after pass is simulated for all ranks
    at once. A change simulates all passes from its first one on.

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
        kinds = schedule.num_costs
        ranks = len(costs) // (len(blocks) * kinds)
        self._load(costs, schedule, len(blocks), ranks)
        self._firsts, self._afters = members_of(blocks, ranks, kinds)
        self._took = [*costs, *([0.0] * ranks)]
        count = len(self._slots) * ranks
        self._ends, self._ends_tried = [0.0] * count, [0.0] * count
        """Ends of passes [numbers * ranks]: by the costs, and with the changes tried last."""
        self._simulate(self._ends, 1)

    def end_with(self, changes: Changes) -> float:
        """As `Clock.end_with`; any of its places names a shared micro-batch."""
        first, _ = self._span(changes)
        before, known = self.costs[:], first * self._ranks
        self._change(changes)
        self._ends_tried[:known] = self._ends[:known]
        self._simulate(self._ends_tried, first)
        # Costs go back; the ends stay, for `become` of the same changes.
        for place, _ in changes:
            self._set_cost(place, before[place])
        self._tried = changes
        return max(self._ends_tried[-self._ranks :])

    def become(self, changes: Changes) -> None:
        """Make `changes`, without a simulation if they were tried last."""
        if changes != self._tried:
            self.end_with(changes)
        self._change(changes)
        # Swapped, not copied: the ends of before are overwritten by the next `end_with`.
        self._ends, self._ends_tried, self._tried = self._ends_tried, self._ends, ()

    def weights(self) -> list[float]:
        """As `Clock.weights`."""
        return self._critical_path(self._ends)

    def weights_with(self) -> list[float]:
        """As `Clock.weights_with`."""
        return self._critical_path(self._ends_tried)

    def _simulate(self, ends: list[float], first: int) -> None:
        """Ends of all passes from number `first` on."""
        self.passes_run += (len(self._slots) - first) * self._ranks
        tables = *self._waits, self._slots, self._shares, self._afters, self._took
        _run_together(*tables, ends, self._ranks, first)

    def _critical_path(self, ends: list[float]) -> list[float]:
        """Weights [places], from ends of all passes."""
        weights = [0.0] * len(self._took)
        of_ranks = ends[-self._ranks :]
        late = of_ranks.index(max(of_ranks))
        tables = *self._waits, self._slots, self._shares, self._firsts, self._afters
        _weigh_path_over_ranks(*tables, ends, self._ranks, late, weights)
        return weights[: len(self.costs)]

    def _together(self, number: int, rank: int) -> range:
        at = self._slots[number] * self._ranks + rank
        return range(self._firsts[at], self._afters[at])

    def _set_cost(self, place: int, cost: float) -> None:
        slot = place - place % self._ranks
        for each in range(slot + self._firsts[place], slot + self._afters[place]):
            self.costs[each] = self._took[each] = cost


def _run_together(
    waits: list[int],
    waits_too: list[int],
    slots: list[int],
    shares: list[float],
    afters: list[int],
    costs: list[float],
    ends: list[float],
    ranks: int,
    first: int,
) -> None:
    """Ends of the passes of all ranks from number `first` on, from the ends before it."""
    for number in range(first, len(slots)):
        before, other, at = waits[number] * ranks, waits_too[number] * ranks, number * ranks
        place, share = slots[number] * ranks, shares[number]
        rank = 0
        while rank < ranks:
            after = afters[place + rank]
            # Ranks that share a row start with the last of them.
            start = 0.0
            for each in range(rank, after):
                if ends[before + each] > start:
                    start = ends[before + each]
                if ends[other + each] > start:
                    start = ends[other + each]
            start += costs[place + rank] * share
            for each in range(rank, after):
                ends[at + each] = start
            rank = after


def _weigh_path_over_ranks(
    waits: list[int],
    waits_too: list[int],
    slots: list[int],
    shares: list[float],
    firsts: list[int],
    afters: list[int],
    ends: list[float],
    ranks: int,
    rank: int,
    weights: list[float],
) -> None:
    """Add the shares on the critical path that ends on a rank to the weights of their places."""
    number = len(slots) - 1
    while number > 0:
        place = slots[number] * ranks
        first, after = firsts[place + rank], afters[place + rank]
        weights[place + first] += shares[number]
        # On to the pass, and the rank, that this one started after.
        latest, on = -1.0, number
        for before in (waits_too[number], waits[number]):
            for each in range(first, after):
                if ends[before * ranks + each] > latest:
                    latest, on, rank = ends[before * ranks + each], before, each
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
