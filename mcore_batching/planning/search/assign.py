"""Samples assigned to the target sizes of slots.

    targets   [[300, 900], [400, 800]]    cost that each micro-batch is to have, of 2 ranks
    samples   700 600 500 400 200         costliest first, each to the slot that lacks most
    slots     [[], [700, 200]], ...

Slots of all ranks are filled together, so that ranks are even as well. The cap and the most samples
of a micro-batch hold, and an oversize sample is alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import chain

from mcore_batching.planning.costs.cost import ordered_sum
from mcore_batching.planning.problem import Problem

Slots = list[list[int]]
"""One rank's micro-batches in slot order: samples each, an empty list for a placeholder."""


def by_cost(samples: Sequence[int], costs: Sequence[float]) -> list[int]:
    """The samples, costliest first, ties in index order."""
    return sorted(samples, key=lambda sample: (-costs[sample], sample))


def assign(
    order: Sequence[int], targets: Sequence[Sequence[float]], problem: Problem
) -> list[Slots] | None:
    """Samples, costliest first, each to the slot that lacks most of its target.

    Args:
        order: the samples, costliest first.
        targets: cost that each micro-batch is to have [ranks][slots]; one of no more than its
            overhead stays empty, if any is larger, and one below 0 in any case.
        problem: gives costs, tokens and the cap.

    Returns:
        samples of each slot [ranks][slots]; None if they do not fit.
    """
    # Slot by slot over all ranks: of equal targets no rank's come before the others'.
    sizes = list(chain.from_iterable(zip(*targets, strict=True)))
    costs, tokens, most = problem.costs, problem.tokens, problem.max_samples
    fixed, capacity = problem.cost_model.per_micro_batch, problem.capacity
    # Of each slot the cost beyond its target, below 0 while it lacks some, and its number.
    heap = [(fixed - size, slot) for slot, size in enumerate(sizes) if size > fixed]
    if not heap:
        heap = [(fixed - size, slot) for slot, size in enumerate(sizes) if size >= 0.0]
    heapq.heapify(heap)
    waiting: list[tuple[int, float, int]] = []
    """Slots without room for the last sample, the most room first."""
    slots: Slots = [[] for _ in sizes]
    room = [capacity] * len(sizes)
    for sample in order:
        # An oversize sample needs a whole slot, which then has room for no other.
        size = tokens[sample]
        wanted = size if size < capacity else capacity
        while waiting and -waiting[0][0] >= wanted:
            heapq.heappush(heap, heapq.heappop(waiting)[1:])
        while heap and room[heap[0][1]] < wanted:
            beyond, slot = heapq.heappop(heap)
            heapq.heappush(waiting, (-room[slot], beyond, slot))
        if not heap:
            return None
        beyond, slot = heap[0]
        own = slots[slot]
        own.append(sample)
        # Less than nothing in a slot that may take no further sample.
        room[slot] = -1 if len(own) >= most else room[slot] - size
        heapq.heapreplace(heap, (beyond + costs[sample], slot))
    return [slots[rank :: len(targets)] for rank in range(len(targets))]


def fill_empty_slots(slots: Slots, costs: Sequence[float]) -> Slots:
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
