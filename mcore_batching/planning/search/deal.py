"""Samples dealt to the targets of slots, and swapped until they come close.

Slots of all ranks are dealt to together, so that a deal is even over ranks as well. The cap and the
most samples of a micro-batch hold and an oversize sample is alone. `settle` fills slots that stay
empty while another of their rank holds two samples.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import chain

from mcore_batching.planning.costs.cost import ordered_sum
from mcore_batching.planning.problem import Problem
from mcore_batching.planning.search.objective import Objective, Slots

SWAPS = 2
"""Passes of swaps after each deal. With 6 the mean moves by less than 0.01 %."""
EFFORT_OF_DEAL = 6
"""Dealing one sample costs as much effort as 6 simulated passes, about its CPU time. Halved: no
change; doubled: steps end 0.06 % later in the mean."""
SMALLEST = 8
"""Only the 8 cheapest samples of a slot are tried in a swap: bounds the time for slots of hundreds.
With 4 or 16 no end moves by more than 0.03 %."""


def deal(
    order: Sequence[int],
    targets: Sequence[Sequence[float]],
    objective: Objective,
    *,
    passes: int = SWAPS,
) -> list[Slots] | None:
    """Samples, costliest first, each to the slot that lacks most of its target.

    Args:
        order: the samples, costliest first.
        targets: cost that each micro-batch is to have [ranks][slots]; one of no more than its
            overhead stays empty, if any is larger, and one below 0 in any case. What a slot gets
            beyond its target, others of its rank are to have less, but in lockstep.
        objective: of the step; its effort is used.
        passes: times that samples are swapped.

    Returns:
        samples of each slot [ranks][slots]; None if they do not fit.
    """
    problem, per_rank = objective.problem, len(targets[0])
    sizes = list(chain.from_iterable(targets))
    objective.effort -= EFFORT_OF_DEAL * (len(order) + passes * len(sizes))
    costs, tokens, most = problem.costs, problem.tokens, problem.max_samples
    fixed, capacity = problem.cost_model.per_micro_batch, problem.capacity
    # Of each slot the cost beyond its target, below 0 while it lacks some, and its number.
    heap = [(fixed - size, slot) for slot, size in enumerate(sizes) if size > fixed]
    if not heap:
        heap = [(fixed - size, slot) for slot, size in enumerate(sizes) if size >= 0.0]
    heapq.heapify(heap)
    waiting: list[tuple[int, float, int]] = []
    """Slots without room for the last sample, the most room first."""
    spills = per_rank > 1 and not problem.dims.in_lockstep
    spilt, counted = [0.0] * len(targets), [0.0] * len(sizes)
    """What each rank's slots got beyond their targets, and how much of it each slot has less."""
    slots: Slots = [[] for _ in sizes]
    room = [capacity] * len(sizes)
    # Written out, as every sample of every deal passes through.
    for sample in order:
        # An oversize sample asks for a whole slot, which then has room for no other.
        size = tokens[sample]
        wanted = size if size < capacity else capacity
        while waiting and -waiting[0][0] >= wanted:
            heapq.heappush(heap, heapq.heappop(waiting)[1:])
        while heap:
            beyond, slot = heap[0]
            if room[slot] < wanted:
                heapq.heappop(heap)
                heapq.heappush(waiting, (-room[slot], beyond, slot))
                continue
            if spills:
                # Counted only when a slot comes to the top: to sort a rank's slots anew at each
                # spill would take as long as the deal.
                less = spilt[slot // per_rank] - counted[slot]
                if less > 0.0:
                    counted[slot] += less
                    heapq.heapreplace(heap, (beyond + less, slot))
                    continue
            break
        else:
            return None
        own = slots[slot]
        own.append(sample)
        # Less than nothing in a slot that may take no further sample.
        room[slot] = -1 if len(own) >= most else room[slot] - size
        cost = costs[sample]
        after = beyond + cost
        if spills and after > 0.0:
            spill = (after if beyond < 0.0 else cost) / (per_rank - 1)
            spilt[slot // per_rank] += spill
            counted[slot] += spill
        heapq.heapreplace(heap, (after, slot))
    over = [
        fixed + ordered_sum([costs[sample] for sample in own]) - size
        for own, size in zip(slots, sizes, strict=True)
    ]
    for _ in range(passes):
        swap(slots, over, room, problem)
    return [slots[first : first + per_rank] for first in range(0, len(slots), per_rank)]


def swap(slots: Slots, over: list[float], room: list[int], problem: Problem) -> None:
    """Let slots that lack most take of those that are over most: a sample, or one for another.

    Args:
        slots: changed.
        over: cost of each beyond its target [slots], changed.
        room: tokens that fit into each [slots], changed.
        problem: gives costs and tokens.
    """
    costs, tokens, most = problem.costs, problem.tokens, problem.max_samples
    order = sorted(range(len(slots)), key=over.__getitem__)
    # The emptiest with the fullest, the next with the next: each slot takes part once at most.
    for taker, giver in zip(order[: len(order) // 2], reversed(order), strict=False):
        given, taken = slots[giver], slots[taker]
        if room[taker] < 0 or room[giver] < 0 or not given or not taken:
            continue
        # If so much cost goes over, both are as far from their targets.
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
