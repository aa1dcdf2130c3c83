"""Placement of a step's micro-batches on ranks and slots, without a search.

A placeholder is never in a rank's last slot unless the rank has nothing else: the last micro-batch
must touch every parameter where gradients are reduced while the backward pass runs.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter

from mcore_batching.planning.costs.cost import ordered_sum
from mcore_batching.planning.plans.plan import MicroBatches
from mcore_batching.planning.problem import Problem

Weight = Callable[[Sequence[int]], float]
"""Weight of a micro-batch, given its samples in ascending order."""


def order_slots(
    bins: Sequence[Sequence[int]], num_microbatches: int, weight: Weight | None
) -> MicroBatches:
    """One rank's `num_microbatches` in slot order: by descending weight (None: as given), ties by
    lowest sample index, placeholders just before the last real one. Slot j then weighs about the
    same on every rank."""
    real = [*map(tuple, bins)] if weight is None else heaviest_first(bins, weight)
    placeholders: list[tuple[int, ...]] = [()] * (num_microbatches - len(real))
    return (*real[:-1], *placeholders, *real[-1:])


def heaviest_first(bins: Iterable[Sequence[int]], weight: Weight) -> list[tuple[int, ...]]:
    """Micro-batches by descending weight, ties by lowest sample index."""
    # A stable sort keeps ties in their order, also when reversed.
    return sorted(sorted(map(tuple, bins)), key=weight, reverse=True)


def largest_first(problem: Problem, ranks: tuple[MicroBatches, ...]) -> tuple[MicroBatches, ...]:
    """The same micro-batches, each rank's largest first, where their order takes no time."""
    # An allocator that meets the largest blocks first cuts the smaller ones out of them.
    if problem.schedule.order_matters:
        return ranks
    if not problem.dims.in_lockstep:
        found = []
        for rank in ranks:
            real = heaviest_first(filter(None, rank), problem.weight)
            if real:
                largest = max(real, key=problem.row_tokens)
                real.insert(0, real.pop(real.index(largest)))
            found.append(order_slots(real, len(rank), None))
        return tuple(found)
    # In lockstep whole slots move, or their makespan would change.
    slots = list(zip(*ranks, strict=True))
    stays_last = [slots.pop()] if any(() in rank for rank in ranks) else []
    if slots:
        sizes = [max(map(problem.row_tokens, slot)) for slot in slots]
        slots.insert(0, slots.pop(sizes.index(max(sizes))))
    return tuple(zip(*slots, *stays_last, strict=True))


def place(
    problem: Problem, bins: Sequence[Sequence[int]], num_microbatches: int
) -> tuple[MicroBatches, ...]:
    """Spread `bins` over ranks, [data_parallel][num_microbatches]; at most so many per rank."""
    ranks = problem.dims.data_parallel
    if problem.config.balance == "none":
        return tuple(
            order_slots(bins[rank::ranks], num_microbatches, None) for rank in range(ranks)
        )
    # All ranks run the same number of micro-batches, so their fixed weight makes no difference.
    empty = problem.weight(())
    weights = [problem.weight(samples) - empty for samples in bins]
    # The first evens out slots as well, the second ranks best.
    candidates = [by_folds(weights, ranks, num_microbatches)]
    # Ranks in lockstep wait in every slot, and no assignment has lighter slots than the folds.
    if not problem.dims.in_lockstep:
        candidates.append(deal(weights, [0.0] * ranks, [num_microbatches] * ranks))
    loads = [
        max(ordered_sum(weights[b] for b in rank_bins) for rank_bins in assigned)
        for assigned in candidates
    ]
    best = candidates[loads.index(min(loads))]  # the first wins ties
    return tuple(
        order_slots([bins[b] for b in rank_bins], num_microbatches, problem.weight)
        for rank_bins in best
    )


def deal(
    weights: Sequence[float], loads: Sequence[float], places: Sequence[int]
) -> list[list[int]]:
    """Items of each rank, heaviest first to the lightest rank with a free place; ties by lowest
    index. `loads` is what each rank holds before, `places` the most items it takes."""
    # A heap: the lightest rank is taken once per item.
    dealt: list[list[int]] = [[] for _ in loads]
    lightest = [(load, rank) for rank, load in enumerate(loads) if places[rank]]
    heapq.heapify(lightest)
    for index in sorted(range(len(weights)), key=weights.__getitem__, reverse=True):
        load, rank = heapq.heappop(lightest)  # a full rank is not pushed again
        dealt[rank].append(index)
        if len(dealt[rank]) < places[rank]:
            heapq.heappush(lightest, (load + weights[index], rank))
    return dealt


def by_folds(weights: Sequence[float], ranks: int, limit: int) -> list[list[int]]:
    """Karmarkar-Karp differencing in which every rank gets one of each `ranks` consecutive weights
    (Michiels et al., "Performance ratios for the differencing method applied to the balanced number
    partitioning problem", 2003)."""
    # The weights, descending, are cut into `limit` folds, one weight per rank in each.
    descending = sorted(range(len(weights)), key=weights.__getitem__, reverse=True)
    # Spread (negative, for the heap), a number that breaks ties, weight and bins of each rank.
    partials: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for fold in range(limit):
        members = descending[fold * ranks : (fold + 1) * ranks]
        parts = [(weights[index], [index]) for index in members]
        parts += [(0.0, []) for _ in range(ranks - len(members))]
        partials.append((parts[-1][0] - parts[0][0], fold, parts))
    heapq.heapify(partials)
    serial = limit
    # The two with the widest spread are merged, heaviest rank of one with lightest of the other.
    while len(partials) > 1:
        wide, narrow = heapq.heappop(partials)[2], heapq.heappop(partials)[2]
        merged = [
            (a_weight + b_weight, a + b)
            for (a_weight, a), (b_weight, b) in zip(wide, reversed(narrow), strict=True)
        ]
        merged.sort(key=itemgetter(1))
        merged.sort(key=itemgetter(0), reverse=True)  # stable: ties by bins
        heapq.heappush(partials, (merged[-1][0] - merged[0][0], serial, merged))
        serial += 1
    return [part for _, part in partials[0][2]]


def split_until(bins: Sequence[Sequence[int]], count: int, weight: Weight) -> list[list[int]]:
    """Split the heaviest of `bins` in two until there are `count`, or none holds two samples.
    Untouched ones come first as given, then halves, heaviest first; ties by lowest sample index."""
    if len(bins) >= count:
        return [list(samples) for samples in bins]
    # By first sample, which no two share. Halves only lose samples, so the cap holds as before.
    whole = {samples[0]: list(samples) for samples in bins}
    halves: dict[int, list[int]] = {}
    splittable = [(-weight(samples), samples[0]) for samples in bins if len(samples) > 1]
    heapq.heapify(splittable)
    while splittable and len(whole) + len(halves) < count:
        _, first = heapq.heappop(splittable)
        samples = halves.pop(first) if first in halves else whole.pop(first)
        for half in _halve(samples, weight):
            halves[half[0]] = half
            if len(half) > 1:
                heapq.heappush(splittable, (-weight(half), half[0]))
    return [*whole.values(), *map(list, heaviest_first(halves.values(), weight))]


def _halve(samples: Sequence[int], weight: Weight) -> list[list[int]]:
    """Deal samples, heaviest first, to the lighter half; on a tie to the one with fewer samples."""
    empty = weight(())
    alone = {sample: weight((sample,)) - empty for sample in samples}
    halves: list[list[int]] = [[], []]
    weights = [0.0, 0.0]
    for sample in sorted(sorted(samples), key=alone.__getitem__, reverse=True):
        lighter = int((weights[1], len(halves[1])) < (weights[0], len(halves[0])))
        halves[lighter].append(sample)
        weights[lighter] += alone[sample]
    return list(map(sorted, halves))
