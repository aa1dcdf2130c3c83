"""Plans under dynamic CP, in which each micro-batch has a context-parallel size of its own.

On 4 ranks, with samples a that needs 4 of them, b that needs 2, and short ones c to g:

    rank 0   [c]  [b]×2  [a]×4
    rank 1   [d]  [b]×2  [a]×4
    rank 2   [e]  [f]    [a]×4
    rank 3   [g]  []     [a]×4
"""

from __future__ import annotations

import dataclasses
from itertools import chain

from mcore_batching.planning.config import PlannerConfig
from mcore_batching.planning.costs.cost import CostModel, ordered_sum
from mcore_batching.planning.local import pack_local
from mcore_batching.planning.parallel_dims import ParallelDims
from mcore_batching.planning.placement import deal, order_slots, split_until
from mcore_batching.planning.plans.plan import MicroBatches, Sizes, StepPlan
from mcore_batching.planning.problem import Problem
from mcore_batching.planning.search.dynamic_cp import layers_of


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
    ranks, least, alone = problem.num_ranks, problem.least_sizes, problem.on_ranks[1]
    layers = layers_of([sample for sample, size in enumerate(least) if size > 1], least, ranks)
    short = [sample for sample, size in enumerate(least) if size == 1]
    bins = [tuple(short[i] for i in samples) for samples in pack_local(alone.subset(short))]
    taken = sum(size for size in least if size > 1)  # places, one on each rank of a block
    count = problem.dims.round_up_num_microbatches(-(-(len(bins) + taken) // ranks))
    if problem.config.fill == "split":
        bins = [tuple(each) for each in split_until(bins, count * ranks - taken, alone.weight)]
    shared: list[list[int]] = [[] for _ in range(ranks)]  # of each rank, in the last slots
    for first, sample in chain.from_iterable(reversed(layers)):
        for rank in range(first, first + least[sample]):
            shared[rank].append(sample)
    # The others are evened out over ranks with shared ones counted.
    bins = sorted(bins)
    loads = [
        ordered_sum(problem.on_ranks[least[sample]].weight([sample]) for sample in own)
        for own in shared
    ]
    free = [count - len(own) for own in shared]
    dealt = deal([alone.weight(samples) for samples in bins], loads, free)
    weight = None if problem.config.balance == "none" else alone.weight
    micro_batches, sizes = [], []
    for own, of_rank, places in zip(shared, dealt, free, strict=True):
        rows = order_slots([bins[i] for i in of_rank], places, weight)
        micro_batches.append((*rows, *((sample,) for sample in own)))
        sizes.append((*(1,) * places, *(least[sample] for sample in own)))
    return tuple(micro_batches), tuple(sizes)
