"""Which rank and which slot each micro-batch of a step gets.

The number of micro-batches a rank is fixed before, so this only permutes: it cannot break the cap.
`place` is the whole interface to the planner; a search over counts and orders can stand in its
stead.

Guarantees: every micro-batch is placed once; each rank gets at most `num_microbatches`, and exactly
as many where there are that many a rank; a placeholder is never in a rank's last slot unless the
rank has nothing else, because the last micro-batch must touch every parameter when gradients are
reduced while the backward pass still runs.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mcore_batching.planning.sums import ordered_sum

if TYPE_CHECKING:
    from mcore_batching.planning.config import PlannerConfig
    from mcore_batching.planning.parallel_dims import ParallelDims
    from mcore_batching.planning.splitting import Weight

MicroBatch = tuple[int, ...]
RankMicroBatches = tuple[MicroBatch, ...]


def order_slots(
    bins: Sequence[Sequence[int]], num_microbatches: int, weight: Weight | None
) -> RankMicroBatches:
    """One rank's micro-batches in slot order, `num_microbatches` of them.

    Real ones come by descending weight, ties by lowest sample index, so that slot j weighs about
    the same on every rank; placeholders sit just before the last real one. `weight=None` keeps the
    given order.
    """
    real = [tuple(samples) for samples in bins]
    if weight is not None:
        real.sort(key=lambda samples: (-weight(samples), samples))
    placeholders: list[MicroBatch] = [()] * (num_microbatches - len(real))
    return (*real[:-1], *placeholders, *real[-1:])


def place(
    bins: Sequence[Sequence[int]],
    num_microbatches: int,
    dims: ParallelDims,
    config: PlannerConfig,
    weight: Weight,
) -> tuple[RankMicroBatches, ...]:
    """Spread a step's micro-batches over ranks [data_parallel][num_microbatches].

    Two assignments are tried, one that evens out ranks best and one that also keeps slots even.
    With experts spread over ranks every slot waits for its slowest rank, so the sum over slots of
    the heaviest decides; without, ranks run on their own and the heaviest rank decides.
    """
    ranks = dims.data_parallel
    if config.balance == "none":
        return tuple(
            order_slots(bins[rank::ranks], num_microbatches, None) for rank in range(ranks)
        )
    # Every rank runs as many: only what a micro-batch weighs beyond an empty one differs.
    empty = weight(())
    weights = [weight(samples) - empty for samples in bins]
    # The first candidate wins ties.
    candidates = [
        by_folds(weights, ranks, num_microbatches),
        _longest_first(weights, ranks, num_microbatches),
    ]

    def slowest(candidate: list[list[int]]) -> float:
        if dims.expert_parallel > 1:
            return _sum_of_slot_maxima(candidate, weights)
        return max(ordered_sum(weights[b] for b in rank_bins) for rank_bins in candidate)

    best = min(candidates, key=slowest)
    return tuple(
        order_slots([bins[b] for b in rank_bins], num_microbatches, weight) for rank_bins in best
    )


def _longest_first(weights: Sequence[float], ranks: int, limit: int) -> list[list[int]]:
    """Heaviest first to the lightest rank that holds fewer than `limit`; ties to the lowest
    rank."""
    assigned: list[list[int]] = [[] for _ in range(ranks)]
    lightest = [(0.0, rank) for rank in range(ranks)]
    for index in sorted(range(len(weights)), key=lambda i: (-weights[i], i)):
        load, rank = heapq.heappop(lightest)
        assigned[rank].append(index)
        if len(assigned[rank]) < limit:
            heapq.heappush(lightest, (load + weights[index], rank))
    return assigned


def by_folds(weights: Sequence[float], ranks: int, limit: int) -> list[list[int]]:
    """Karmarkar-Karp differencing in which every rank gets one of each `ranks` consecutive weights.

    The weights, descending, are cut into `limit` folds. The two folds or partial sums with the
    widest spread are merged, heaviest rank of one with lightest of the other, until one is left
    (Michiels, Korst, Aarts, van Leeuwen: "Performance ratios for the differencing method applied to
    the balanced number partitioning problem", 2003).
    """
    descending = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
    partials: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for fold in range(limit):
        members = descending[fold * ranks : (fold + 1) * ranks]
        parts = [(weights[index], [index]) for index in members]
        parts += [(0.0, []) for _ in range(ranks - len(members))]
        partials.append((parts[-1][0] - parts[0][0], fold, parts))
    heapq.heapify(partials)
    serial = limit
    while len(partials) > 1:
        wide, narrow = heapq.heappop(partials)[2], heapq.heappop(partials)[2]
        merged = [
            (a_weight + b_weight, a + b)
            for (a_weight, a), (b_weight, b) in zip(wide, reversed(narrow), strict=True)
        ]
        merged.sort(key=lambda part: (-part[0], part[1]))
        heapq.heappush(partials, (merged[-1][0] - merged[0][0], serial, merged))
        serial += 1
    return [part for _, part in partials[0][2]]


def _sum_of_slot_maxima(assigned: list[list[int]], weights: Sequence[float]) -> float:
    columns = [sorted((weights[b] for b in rank_bins), reverse=True) for rank_bins in assigned]
    depth = max(map(len, columns))
    return ordered_sum(
        max(column[slot] for column in columns if slot < len(column)) for slot in range(depth)
    )
