"""Single samples moved and swapped between micro-batches of ranks that share some of them.

Ranks that share a micro-batch in any slot wait for each other: together they are a group, which is
simulated as one, as `local_moves` simulates a rank. The moves are the same, but for

    a sample   costs and takes by the context-parallel size of the micro-batch that it is in
    columns    all that the ranks of a block have in one slot for all that they have in another

The latter changes who waits for whom, so that chains of passes found before say nothing of it.
"""

from __future__ import annotations

from mcore_batching.planning.cost import ordered_sum
from mcore_batching.planning.coupled_ranks import Ends, blocks_of
from mcore_batching.planning.search.local_moves import (
    BEYOND,
    EFFORT_OF_A_TRY,
    Counter,
    high_power,
)
from mcore_batching.planning.search.objective import Slots
from mcore_batching.planning.search.shared_rows import SharedObjective, SharedStep, Sizes

GIVE_UP_AFTER = 8000
"""Moves in a row of which none was kept."""
MOST_CHAINS = 24
COLUMNS = 10
"""One move in so many is of columns."""


def improve_shared(
    step: SharedStep, objective: SharedObjective, *, keep: float = 0.0
) -> SharedStep:
    """Improve a step until its effort is spent or nothing has helped for long.

    Args:
        step: the step, which is left as it is.
        objective: simulates; its effort is used.
        keep: effort that is left over.

    Returns:
        a step that ends no later.
    """
    if objective.lockstep:
        return step
    moved = _Moved(step, objective)
    in_vain = 0
    while objective.effort > keep and in_vain < GIVE_UP_AFTER:
        if objective.cannot_be_beaten(moved.end):
            break
        objective.spend(EFFORT_OF_A_TRY)
        in_vain = 0 if moved.try_one() else in_vain + 1
    best = objective.step(moved.rows, moved.sizes)
    return best if best.end < step.end else step


class _Group:
    """Ranks that wait for each other."""

    def __init__(
        self, first: int, after: int, costs: list[list[float]], sizes: Sizes, made: SharedObjective
    ) -> None:
        self.first, self.after = first, after
        self._objective = made
        self.costs = [list(slot) for slot in zip(*costs[first:after], strict=True)]
        """Of each micro-batch [slots][ranks of the group]."""
        self._blocks = blocks_of(sizes[first:after])
        self.chains: list[tuple[dict[tuple[int, int], float], list[float]]] = []
        """Weights, and how long the chain is."""
        self._tried: list[tuple[int, int]] = []
        self._passes: Ends = []
        self._tried_passes: Ends = []
        self.ends = self.simulated(self.costs, 0)
        self._passes = self._tried_passes
        self.newest = self._tried
        """Micro-batches of the longest chain, by first rank of the group and slot."""

    @property
    def end(self) -> float:
        return max(self.ends)

    def simulated(self, costs: list[list[float]], slot: int) -> list[float]:
        """Ends with other costs, the same below a slot; the chain found is remembered."""
        before = (self._passes, slot) if self._passes else None
        ends, weights, self._tried_passes = self._objective.coupled(
            costs, self._blocks, before=before
        )
        self._tried = list(weights)
        length = 0.0
        for (rank, slot), weight in weights.items():
            length += weight * self.costs[slot][rank]
        self.chains.insert(0, (weights, [length]))
        del self.chains[MOST_CHAINS:]
        return ends

    def soonest(self, changes: list[tuple[int, int, float]], limit: float) -> float:
        """A time before which the group does not end if micro-batches (first rank, slot) cost so
        much more; the first found beyond `limit`."""
        latest = 0.0
        for number, (weights, length) in enumerate(self.chains):
            end = length[0]
            for rank, slot, more in changes:
                end += more * weights.get((rank - self.first, slot), 0.0)
            if end > latest:
                latest = end
                if end > limit:
                    if number:
                        self.chains.insert(0, self.chains.pop(number))
                    return latest
        return latest

    def changed(self, changes: list[tuple[int, int, float]], sizes: Sizes) -> list[list[float]]:
        """Costs after changes."""
        costs = self.costs[:]
        for rank, slot, more in changes:
            costs[slot] = costs[slot][:]
            for each in range(rank, rank + sizes[rank][slot]):
                costs[slot][each - self.first] += more
        return costs

    def become(
        self, costs: list[list[float]], ends: list[float], changes: list[tuple[int, int, float]]
    ) -> None:
        """Take the costs that were simulated, and their ends."""
        for weights, length in self.chains:
            for rank, slot, more in changes:
                length[0] += more * weights.get((rank - self.first, slot), 0.0)
        self.costs, self.ends, self.newest = costs, ends, self._tried
        self._passes = self._tried_passes


class _Moved:
    """A step that is being changed."""

    def __init__(self, step: SharedStep, objective: SharedObjective) -> None:
        self._objective = objective
        self._problem = objective.problem
        self._random = Counter()
        self._scale = 1.0 / step.end if step.end else 1.0
        self.rows: list[Slots] = [[list(samples) for samples in slots] for slots in step.ranks]
        self.sizes: Sizes = [list(of_rank) for of_rank in step.sizes]
        self._group()

    def _group(self) -> None:
        """Simulate ranks in groups."""
        on_ranks = self._problem.on_ranks
        costs = [
            [on_ranks[size].cost(samples) for samples, size in zip(slots, own, strict=True)]
            for slots, own in zip(self.rows, self.sizes, strict=True)
        ]
        self._groups: list[_Group] = []
        self._group_of: list[_Group] = []
        while len(self._group_of) < len(self.rows):
            first = after = len(self._group_of)
            while after == first or any(
                after % max(of) for of in self.sizes[first:after] if max(of) > 1
            ):
                after += 1
            group = _Group(first, after, costs, self.sizes, self._objective)
            self._groups.append(group)
            self._group_of += [group] * (after - first)

    @property
    def end(self) -> float:
        """End of the step."""
        return max(group.end for group in self._groups)

    def _power(self, end: float) -> float:
        return high_power(end * self._scale)

    def _powers(self, ends: list[float]) -> float:
        total = 0.0
        for end in ends:
            total += self._power(end)
        return total

    def try_one(self) -> bool:
        """Try a move; True if it was kept."""
        below = self._random.below
        if below(COLUMNS) == 0:
            return self._swap_columns()
        count, ranks = len(self.rows[0]), len(self.rows)
        late, early = below(ranks), below(ranks)
        slot, other = below(count), below(count)
        if below(4):
            # A micro-batch that the step's end hangs on.
            slowest = max(self._groups, key=lambda group: group.end)
            late, slot = slowest.newest[below(len(slowest.newest))]
            late += slowest.first
        if below(3) == 0:
            early = late
        late -= late % self.sizes[late][slot]
        early -= early % self.sizes[early][other]
        if (late, slot) == (early, other):
            return False
        return self._move_sample(late, slot, early, other)

    def _move_sample(self, late: int, slot: int, early: int, other: int) -> bool:
        """Move a sample to a micro-batch, perhaps for one that comes back."""
        below = self._random.below
        mine, theirs = self.rows[late][slot], self.rows[early][other]
        if not mine:
            return False
        given, taken = mine[below(len(mine))], -1
        if below(3) == 0 and len(mine) > 1:
            if [] in self.rows[early]:
                other = self.rows[early].index([])
                theirs = []
        elif theirs:
            taken = theirs[below(len(theirs))]
        else:
            return False
        left = [sample for sample in mine if sample != given]
        joined = [sample for sample in theirs if sample != taken]
        joined.append(given)
        if taken >= 0:
            left.append(taken)
        late_size, early_size = self.sizes[late][slot], self.sizes[early][other]
        if not (self._holds(left, late_size) and self._holds(joined, early_size)):
            return False
        on_ranks = self._problem.on_ranks
        less, more = on_ranks[late_size].costs[given], on_ranks[early_size].costs[given]
        if taken >= 0:
            less -= on_ranks[late_size].costs[taken]
            more -= on_ranks[early_size].costs[taken]
        if not self._ends_sooner([(late, slot, -less), (early, other, more)]):
            return False
        for rank in range(late, late + late_size):
            self.rows[rank][slot] = left
        for rank in range(early, early + early_size):
            self.rows[rank][other] = joined
        return True

    def _holds(self, samples: list[int], size: int) -> bool:
        rows = self._problem.on_ranks[size]
        return (
            len(samples) <= rows.max_samples
            and sum(rows.tokens[sample] for sample in samples) <= rows.capacity
        )

    def _ends_sooner(self, changes: list[tuple[int, int, float]]) -> bool:
        """Make changes of costs if they lower the sum of powers of the ranks' ends."""
        by_group: dict[int, list[tuple[int, int, float]]] = {}
        for change in changes:
            by_group.setdefault(self._group_of[change[0]].first, []).append(change)
        groups = [(self._group_of[first], of_group) for first, of_group in by_group.items()]
        limit = latest = 0.0
        for group, _ in groups:
            limit += self._power(group.end)
        beyond = max(group.end for group, _ in groups) * BEYOND
        for group, of_group in groups:
            latest += self._power(group.soonest(of_group, beyond))
            if latest > limit:
                return False
        made, total = [], 0.0
        for group, of_group in groups:
            costs = group.changed(of_group, self.sizes)
            ends = group.simulated(costs, min(slot for _, slot, _ in of_group))
            total += self._power(max(ends))
            if total > limit:
                return False
            made.append((group, costs, ends, of_group))
        if total == limit and ordered_sum(
            self._powers(ends) for _, _, ends, _ in made
        ) > ordered_sum(self._powers(group.ends) for group, _ in groups):
            return False
        for group, costs, ends, of_group in made:
            group.become(costs, ends, of_group)
        return True

    def _swap_columns(self) -> bool:
        """Exchange all that the ranks of a block have in two slots."""
        below = self._random.below
        count, ranks = len(self.rows[0]), len(self.rows)
        slot, other = below(count), below(count)
        rank = below(ranks)
        size = max(self.sizes[rank][slot], self.sizes[rank][other])
        first = rank - rank % size
        block = range(first, first + size)
        if slot == other or any(
            self.sizes[each][at] > size for each in block for at in (slot, other)
        ):
            return False
        last = count - 1
        if last in (slot, other) and any(
            not self.rows[each][slot + other - last] for each in block
        ):
            return False
        before = self._powers([end for group in self._groups for end in group.ends])
        groups = self._groups, self._group_of
        self._exchange(block, slot, other)
        self._group()
        if self._powers([end for group in self._groups for end in group.ends]) <= before:
            return True
        self._exchange(block, slot, other)
        self._groups, self._group_of = groups
        return False

    def _exchange(self, block: range, slot: int, other: int) -> None:
        for rank in block:
            slots, sizes = self.rows[rank], self.sizes[rank]
            slots[slot], slots[other] = slots[other], slots[slot]
            sizes[slot], sizes[other] = sizes[other], sizes[slot]
