"""Samples dealt to the targets of slots, and swapped until they come close.

Slots of all ranks are dealt to together, so that a deal is even over ranks as well. The cap and the
most samples of a micro-batch hold, an oversize sample is alone, and a slot stays empty only if no
other of its rank holds two samples, and then it is not the last.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from mcore_batching.planning.costs.cost import ordered_sum
from mcore_batching.planning.problem import Problem
from mcore_batching.planning.search.objective import Objective, Slots

EFFORT_OF_DEAL = 6
"""Dealing one sample costs as much effort as 6 simulated passes, about its CPU time. Halved: no
change; doubled: steps end 0.06 % later in the mean."""
SMALLEST = 8
"""Only the 8 cheapest samples of a slot are tried in a swap: bounds the time for slots of hundreds.
With 4 or 16 no end moves by more than 0.03 %."""


def deal(
    order: Sequence[int],
    targets: Sequence[float],
    objective: Objective,
    *,
    passes: int,
    per_rank: int,
) -> Slots | None:
    """Samples, costliest first, each to the slot that lacks most of its target.

    Args:
        order: the samples, costliest first.
        targets: cost that each micro-batch is to have [slots of all ranks]; one of no more than its
            overhead stays empty, if any is larger, and one below 0 in any case.
        objective: of the step; its effort is used.
        passes: times that samples are swapped.
        per_rank: slots of each rank. What one of them gets beyond its target, its others are to
            have less, but where ranks run in lockstep.

    Returns:
        samples of each slot; None if they do not fit.
    """
    problem = objective.problem
    objective.effort -= EFFORT_OF_DEAL * (len(order) + passes * len(targets))
    costs, tokens, most = problem.costs, problem.tokens, problem.max_samples
    fixed, capacity = problem.cost_model.per_micro_batch, problem.capacity
    lacking = _Lacking(targets, objective, per_rank)
    empty = len(lacking.heap)
    slots: Slots = [[] for _ in targets]
    room = lacking.room
    for number, sample in enumerate(order):
        if len(order) - number <= empty:
            _fill_empty(order[number:], slots, room, targets, objective, per_rank)
            break
        size = tokens[sample]
        slot = lacking.most(size if size < capacity else capacity)
        if slot < 0:
            return None
        own = slots[slot]
        empty -= not own
        own.append(sample)
        # Less than nothing in a slot that may take no further sample.
        room[slot] = -1 if len(own) >= most else room[slot] - size
        lacking.give(costs[sample])
    over = [
        fixed + ordered_sum(costs[sample] for sample in own) - size
        for own, size in zip(slots, targets, strict=True)
    ]
    for turn in range(passes):
        swap(slots, over, room, problem, turn // 2)
    return slots


class _Lacking:
    """Slots while samples are dealt to them, the one that lacks most of its target first.

    Args:
        targets, objective, per_rank: as in `deal`.
    """

    def __init__(self, targets: Sequence[float], objective: Objective, per_rank: int) -> None:
        fixed = objective.problem.cost_model.per_micro_batch
        heap = [(fixed - size, slot) for slot, size in enumerate(targets) if size > fixed]
        if not heap:
            heap = [(fixed - size, slot) for slot, size in enumerate(targets) if size >= 0.0]
        heapq.heapify(heap)
        self.heap = heap
        """Of each slot the cost beyond its target, below 0 while it lacks some, and its number."""
        self.room = [objective.problem.capacity] * len(targets)
        """Tokens that fit [slots]."""
        # Slots without room for the last sample, the most room first.
        self._waiting: list[tuple[int, float, int]] = []
        self._per_rank = per_rank
        self._spills = per_rank > 1 and not objective.lockstep
        self._spilt = [0.0] * (len(targets) // per_rank)
        self._counted = [0.0] * len(targets)

    def most(self, wanted: int) -> int:
        """The slot that lacks most of those with room for `wanted` tokens; -1 if none has."""
        heap, waiting, room = self.heap, self._waiting, self.room
        while waiting and -waiting[0][0] >= wanted:
            _, beyond, slot = heapq.heappop(waiting)
            heapq.heappush(heap, (beyond, slot))
        while heap:
            beyond, slot = heap[0]
            less = self._spilt[slot // self._per_rank] - self._counted[slot]
            if room[slot] < wanted:
                heapq.heappop(heap)
                heapq.heappush(waiting, (-room[slot], beyond, slot))
            elif less > 0.0:
                self._counted[slot] += less
                heapq.heapreplace(heap, (beyond + less, slot))
            else:
                return slot
        return -1

    def give(self, cost: float) -> None:
        """So much to the slot that `most` found; what it gets beyond its target, the other slots of
        its rank are to have less."""
        before, slot = self.heap[0]
        beyond = before + cost
        if beyond > 0.0 and self._spills:
            spill = (beyond if before < 0.0 else cost) / (self._per_rank - 1)
            self._spilt[slot // self._per_rank] += spill
            self._counted[slot] += spill
        heapq.heapreplace(self.heap, (beyond, slot))


def _fill_empty(
    samples: Sequence[int],
    slots: Slots,
    room: list[int],
    targets: Sequence[float],
    objective: Objective,
    per_rank: int,
) -> None:
    """The last samples, one to each of the slots that are still empty: the costliest to the rank
    that lacks most, and there to the largest slot; in lockstep to the largest slots."""
    problem = objective.problem
    fixed = problem.cost_model.per_micro_batch
    empty = [slot for slot, own in enumerate(slots) if not own and targets[slot] > fixed]
    if len(empty) < len(samples):
        empty = [slot for slot, own in enumerate(slots) if not own and targets[slot] >= 0.0]
    empty.sort(key=lambda slot: (targets[slot], -(slot % per_rank)))
    of_rank: list[list[int]] = [empty]
    if not objective.lockstep:
        of_rank = [[] for _ in range(len(slots) // per_rank)]
        for slot in empty:
            of_rank[slot // per_rank].append(slot)
    lacking = [
        (-ordered_sum(targets[slot] for slot in own), rank)
        for rank, own in enumerate(of_rank)
        if own
    ]
    heapq.heapify(lacking)
    for sample in samples:
        while not of_rank[lacking[0][1]]:
            heapq.heappop(lacking)
        lack, rank = lacking[0]
        slot = of_rank[rank].pop()
        slots[slot].append(sample)
        room[slot] -= problem.tokens[sample]
        if problem.max_samples == 1:
            room[slot] = -1
        heapq.heapreplace(lacking, (lack + fixed + problem.costs[sample], rank))


def swap(slots: Slots, over: list[float], room: list[int], problem: Problem, skip: int) -> None:
    """Let slots that lack most take of those that are over most: a sample, or one for another.

    Args:
        slots: changed.
        over: cost of each beyond its target [slots], changed.
        room: tokens that fit into each [slots], changed.
        problem: gives costs and tokens.
        skip: number of slots, those that lack most, that are left as they are: nothing may be found
            for them.
    """
    costs, tokens, most = problem.costs, problem.tokens, problem.max_samples
    order = sorted(range(len(slots)), key=over.__getitem__)
    for taker, giver in zip(order[skip : (len(order) + skip) // 2], reversed(order), strict=False):
        given, taken = slots[giver], slots[taker]
        if room[taker] < 0 or room[giver] < 0 or not given or not taken:
            continue
        half = (over[giver] - over[taker]) / 2.0
        back = [(costs[sample], sample) for sample in taken[-SMALLEST:]]
        if len(given) > 1 and len(taken) < most - 1:
            back.append((0.0, -1))
        off, found = half, (-1, -1)
        for sample in given[-SMALLEST:]:
            cost = costs[sample] - half
            for less, other in back:
                if -off < cost - less < off:
                    off, found = abs(cost - less), (sample, other)
        sample, other = found
        if sample < 0:
            continue
        more, size = costs[sample], tokens[sample]
        if other >= 0:
            more, size = more - costs[other], size - tokens[other]
        if room[taker] < size or room[giver] < -size:
            continue
        given.remove(sample)
        taken.append(sample)
        if other >= 0:
            taken.remove(other)
            given.append(other)
        over[taker], room[taker] = over[taker] + more, room[taker] - size
        over[giver], room[giver] = over[giver] - more, room[giver] + size


def settle(slots: Slots, costs: Sequence[float]) -> Slots:
    """A rank's slots without needless placeholders, the last one real: an empty slot takes the
    cheapest sample of the costliest slot that holds two or more."""
    if all(slots):
        return slots

    def cost(number: int) -> float:
        return ordered_sum(costs[sample] for sample in slots[number])

    for own in slots:
        if own:
            continue
        shared = [number for number, other in enumerate(slots) if len(other) > 1]
        if not shared:
            break
        giver = slots[max(shared, key=cost)]
        cheapest = min(giver, key=lambda sample: (costs[sample], sample))
        giver.remove(cheapest)
        own.append(cheapest)
    if not slots[-1] and any(slots):
        last = min((number for number, own in enumerate(slots) if own), key=cost)
        slots[last], slots[-1] = slots[-1], slots[last]
    return slots


def spread(slots: Slots, objective: Objective) -> Slots:
    """The same slots in an order in which few tokens are in flight at a time.

    As many slots in a row as there are stages are in flight: dealing them out by size, to every
    stage-th place first up and then down again, gives each run of them about as much.
    """
    problem = objective.problem
    stages = problem.dims.pipeline_parallel

    def tokens(number: int) -> int:
        return sum(problem.tokens[sample] for sample in slots[number])

    by_size = sorted(range(len(slots)), key=lambda number: (-tokens(number), number))
    places: list[int] = []
    for first in range(min(stages, len(slots))):
        column = range(first, len(slots), stages)
        places += column if first % 2 else reversed(column)
    ordered: Slots = [[] for _ in slots]
    for place, number in zip(places, by_size, strict=True):
        ordered[place] = slots[number]
    return settle(ordered, problem.costs)
