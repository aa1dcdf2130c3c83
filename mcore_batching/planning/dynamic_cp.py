"""Plans under dynamic CP, in which each micro-batch has a context-parallel size of its own.

On 4 ranks, with samples a that needs 4 of them, b that needs 2, and short ones c to g:

    rank 0   [c]  [b]×2  [a]×4
    rank 1   [d]  [b]×2  [a]×4
    rank 2   [e]  [f]    [a]×4
    rank 3   [g]  []     [a]×4
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from mcore_batching.planning.config import PlannerConfig
from mcore_batching.planning.costs.cost import CostModel, ordered_sum
from mcore_batching.planning.parallel_dims import ParallelDims
from mcore_batching.planning.placement import deal, order_slots, split_until
from mcore_batching.planning.plans.plan import MicroBatches, StepPlan
from mcore_batching.planning.problem import Problem
from mcore_batching.planning.shard import pack_shard

Sizes = tuple[tuple[int, ...], ...]
"""Context-parallel size of each micro-batch [ranks][num_microbatches]."""


def of_one_size(
    step: StepPlan, dims: ParallelDims, config: PlannerConfig, cost_model: CostModel
) -> StepPlan:
    """A plan made for one context-parallel size, as a plan under dynamic CP.

    Args:
        step: planned for `dims.for_rows_on(size)`.
        dims: sizes of the parallel groups.
        config: under dynamic CP.
        cost_model: of micro-batches on one rank.
    """
    # A rank of the step becomes a block of `size` ranks that list the same samples; placeholders
    # are each rank's own, as the invariants have them.
    size = step.dims.context_parallel
    ranks = tuple(rank for rank in step.micro_batches for _ in range(size))
    return dataclasses.replace(
        step,
        micro_batches=ranks,
        context_parallel=tuple(tuple(size if each else 1 for each in rank) for rank in ranks),
        dims=dims,
        config=config,
        cost_model=cost_model,
    )


def packed_on_least_ranks(problem: Problem) -> tuple[tuple[MicroBatches, ...], Sizes]:
    """Micro-batches and their context-parallel sizes [ranks][num_microbatches], without a search.

    Every sample has the least size under which it fits the cap: above 1 in a micro-batch of its
    own, in the last slots; the others are packed and spread over the places left.
    """
    shared = [(size, (i,)) for i, size in enumerate(problem.least_sizes) if size > 1]
    short = [i for i, size in enumerate(problem.least_sizes) if size == 1]
    alone = problem.on_ranks[1]
    bins = [tuple(short[i] for i in samples) for samples in pack_shard(alone.subset(short))]
    ranks = problem.dims.data_context_parallel
    taken = sum(size for size, _ in shared)  # places, one on each rank of a block
    count = problem.dims.round_up_num_microbatches(-(-(len(bins) + taken) // ranks))
    if problem.config.fill == "split":
        bins = [
            tuple(samples) for samples in split_until(bins, count * ranks - taken, alone.weight)
        ]
    blocks = _last_slots(shared, ranks, count)
    dealt = _dealt(problem, bins, blocks)
    micro_batches, sizes = [], []
    for of_rank, own in zip(blocks, dealt, strict=True):
        weight = None if problem.config.balance == "none" else alone.weight
        rest = iter(order_slots(own, of_rank.count(None), weight))
        micro_batches.append(tuple(next(rest) if block is None else block[1] for block in of_rank))
        sizes.append(tuple(1 if block is None else block[0] for block in of_rank))
    return tuple(micro_batches), tuple(sizes)


def _last_slots(
    shared: Sequence[tuple[int, tuple[int, ...]]], ranks: int, count: int
) -> list[list[tuple[int, tuple[int, ...]] | None]]:
    """Size and samples of shared micro-batches [ranks][count], filled from the last slot on; None
    for the other places."""
    blocks: list[list[tuple[int, tuple[int, ...]] | None]] = [[None] * count for _ in range(ranks)]
    # Counts ranks through the slots. By descending size every row begins at a multiple of its size,
    # since all before it are multiples of that.
    place = 0
    for size, samples in sorted(shared, key=lambda block: (-block[0], block[1])):
        for rank in range(place % ranks, place % ranks + size):
            blocks[rank][count - 1 - place // ranks] = size, samples
        place += size
    return blocks


def _dealt(
    problem: Problem,
    bins: Sequence[tuple[int, ...]],
    blocks: Sequence[Sequence[tuple[int, tuple[int, ...]] | None]],
) -> list[list[tuple[int, ...]]]:
    """Unshared micro-batches of each rank, evened out with shared ones counted."""
    alone = problem.on_ranks[1]
    loads = [
        ordered_sum(problem.on_ranks[block[0]].weight(block[1]) for block in of_rank if block)
        for of_rank in blocks
    ]
    bins = sorted(bins)
    free = [of_rank.count(None) for of_rank in blocks]
    dealt = deal([alone.weight(samples) for samples in bins], loads, free)
    return [[bins[i] for i in own] for own in dealt]
