"""From lengths to plans: any number of samples, 0 included, gives a plan on any `ParallelDims`
up to `MAX_SEARCHED_PASSES`, none is left out, and the same input gives the same plan everywhere."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import chain
from operator import itemgetter

from mcore_batching.planning.config import PlannerConfig
from mcore_batching.planning.costs.cost import CostModel, ordered_sum
from mcore_batching.planning.errors import ConfigError, LengthError, named
from mcore_batching.planning.forest import (
    Forest,
    PrefixTree,
    forest_of_groups,
    ways_to_cut,
)
from mcore_batching.planning.groups import group_key, steps_of_batch
from mcore_batching.planning.integers import check_lengths, one_per_sample
from mcore_batching.planning.local import pack_local
from mcore_batching.planning.packing.bounds import step_time_floor
from mcore_batching.planning.parallel_dims import ParallelDims
from mcore_batching.planning.placement import deal, largest_first, order_slots, place, split_until
from mcore_batching.planning.plans.plan import MicroBatches, Plan, Sizes, StepPlan
from mcore_batching.planning.problem import Problem
from mcore_batching.planning.search import Objective, search, search_dynamic
from mcore_batching.planning.search.assign import Slots
from mcore_batching.planning.search.dynamic_cp import layers_of

MAX_SEARCHED_PASSES = 2 * 10**8
"""Limit on samples of a step times `plan_effort`: 130,000 samples at the default effort. At about a
microsecond per pass such a search ends within minutes; doubled, within twice as many."""


def plan_step(
    lengths: Sequence[int],
    dims: ParallelDims,
    config: PlannerConfig,
    cost_model: CostModel | None = None,
    *,
    forward_only: bool = False,
    forest: Forest | None = None,
) -> StepPlan:
    """Plan one optimizer step.

    By default a search chooses the number, the samples and the order of micro-batches for the
    shortest makespan; `PlannerConfig.balance` has other ways. A rank's last micro-batch is never a
    placeholder if it has a sample.

    Args:
        lengths: total length of each sample [samples], in tokens; may be empty.
        dims: sizes of the parallel groups.
        config: cap and policies.
        cost_model: costs of samples and micro-batches; `CostModel()` if None.
        forward_only: plan forward passes alone, as for old and reference log-probs.
        forest: the prefix trees of these samples; the plan's `trees` are those that are computed
            together. None: samples share nothing.

    Raises:
        LengthError: a length is out of range, or the forest is of others.
        ConfigError: the cap leaves no room for a single token, or the search would take hours.
        OversizeSampleError: a sample exceeds the cap under `on_oversize="error"`.
    """
    problem = Problem.of(lengths, dims, config, cost_model, forward_only=forward_only)
    # Samples that it lacks would be in no micro-batch, longer ones beyond the cap.
    if forest is not None and forest.lengths != problem.lengths:
        raise LengthError(
            f"the forest is of {len(forest.lengths)} samples, or of other lengths than those of "
            f"the {problem.num_samples} to plan; make it of these lengths"
        )
    return _plan_samples(problem, range(problem.num_samples), forest)


def plan_batch(
    lengths: Sequence[int],
    dims: ParallelDims,
    config: PlannerConfig,
    cost_model: CostModel | None = None,
    *,
    samples_per_step: int | None = None,
    groups: Sequence[Hashable] | None = None,
    groups_per_step: int | None = None,
    prompts: Sequence[int] | None = None,
    forward_only: bool = False,
    on_step: Callable[[int, int], None] | None = None,
) -> Plan:
    """Plan the steps of one batch, cut by `samples_per_step` or by `groups_per_step`; else one
    step.

    Args:
        lengths, dims, config, cost_model, forward_only: as in `plan_step`, of the batch.
        samples_per_step: samples of each step over all ranks; the last step takes the rest.
        groups: the group (uid) of each sample [samples], with `groups_per_step` or `prompts`.
        groups_per_step: groups of each step over all ranks, as in `group_steps`.
        prompts: tokens of each sample's prompt [samples], which samples of a group and a step with
            equal ones have in common; None: samples share nothing.
        on_step: called after each step with the number of steps planned, and of all steps.

    Raises:
        As `plan_step`; LengthError also for steps, groups or prompts that do not fit the samples.
    """
    problem = Problem.of(lengths, dims, config, cost_model, forward_only=forward_only)
    if prompts is not None:
        groups, prompts = _check_prompts(problem.lengths, prompts, groups)
    cuts = groups if prompts is None or groups_per_step is not None else None
    samples_of_steps = steps_of_batch(problem.num_samples, samples_per_step, cuts, groups_per_step)
    if prompts is None:  # trees are fewer than their samples, and checked one step at a time
        _check_search(config, max(map(len, samples_of_steps)))
    steps, forest = list[StepPlan](), None
    for samples in samples_of_steps:
        if groups is not None and prompts is not None:
            forest = forest_of_groups(
                [problem.lengths[i] for i in samples],
                [prompts[i] for i in samples],
                [groups[i] for i in samples],
            )
        steps.append(_plan_samples(problem, samples, forest))
        if on_step is not None:
            on_step(len(steps), len(samples_of_steps))
    return Plan(steps=tuple(steps), num_samples=sum(map(len, samples_of_steps)))


def _check_prompts(
    lengths: Sequence[int], prompts: Sequence[int], groups: Sequence[Hashable] | None
) -> tuple[Sequence[Hashable], Sequence[int]]:
    of_samples = enumerate(one_per_sample("groups", groups, len(lengths)))
    groups = [group_key(group, sample) for sample, group in of_samples]
    prompts = check_lengths(one_per_sample("prompts", prompts, len(lengths)), "prompt")
    for sample, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        if prompt > length:
            raise LengthError(
                f"sample {sample} has {length} tokens, its prompt {prompt}; give total lengths",
                index=sample,
            )
    return groups, prompts


def _plan_samples(batch: Problem, samples: Sequence[int], forest: Forest | None) -> StepPlan:
    """The plan of one step: of `samples` of the batch, ascending, and of the forest of these."""
    problem, trees = batch.subset(samples), list[PrefixTree]()
    if forest is None:
        micro_batches, sizes = _planned(problem)
    else:
        micro_batches, sizes, trees = _plan_forest(problem, forest)
    return StepPlan(
        micro_batches=tuple(
            tuple(tuple(samples[position] for position in row) for row in rank)
            for rank in micro_batches
        ),
        num_microbatches=len(micro_batches[0]),
        sample_indices=tuple(samples),
        dims=batch.dims,
        config=batch.config,
        context_parallel=sizes,
        cost_model=batch.cost_model,
        forward_only=batch.forward_only,
        trees=tuple(tree.renumbered(samples) for tree in trees),
    )


def _plan_forest(
    problem: Problem, forest: Forest
) -> tuple[tuple[MicroBatches, ...], Sizes | None, list[PrefixTree]]:
    """Micro-batches and sizes of the plan that ends first of those tried, and the trees that are
    computed together.

    Larger parts of the trees save more tokens, smaller ones leave the search more to choose from.
    So several ways to cut the trees are planned. One of them is not to share any branches, and one
    not to share anything, so that no step ends later for its trees.
    """
    given, ways = (problem.dims, problem.config, problem.cost_model), []
    for trees in ways_to_cut(forest, *given):
        sizes_of_trees = tuple(tree.size for tree in trees)
        units = dataclasses.replace(problem, lengths=sizes_of_trees, trees=tuple(trees))
        ways.append((step_time_floor(units), units, trees))
    best, earliest = None, math.inf
    # The most promising first: those that cannot end sooner are not planned.
    for floor, units, trees in sorted(ways, key=itemgetter(0)):
        if floor < earliest:
            micro_batches, sizes = _planned(units)
            end = Objective(units).step(micro_batches, sizes).end
            if end < earliest:
                best, earliest = (micro_batches, sizes, trees), end
    assert best is not None
    micro_batches, sizes, trees = best
    of_samples = [
        [[i for unit in row for i in trees[unit].samples] for row in rank] for rank in micro_batches
    ]
    return _sorted(of_samples), sizes, [tree for tree in trees if len(tree.samples) > 1]


def _planned(problem: Problem) -> tuple[tuple[MicroBatches, ...], Sizes | None]:
    """Micro-batches of all ranks; under dynamic CP with their context-parallel sizes."""
    _check_search(problem.config, problem.num_samples)
    if problem.config.max_context_parallel is None:
        return _plan_global(problem), None
    plain = packed_on_least_ranks(problem)
    if not problem.config.searches or not problem.num_samples:
        return plain
    # `_searched` also plans with one size for all, which is sometimes best.
    found = search_dynamic(problem, plain, _searched)
    return _sorted(found.ranks), tuple(map(tuple, found.sizes or []))


def _sorted(ranks: Iterable[Iterable[Iterable[int]]]) -> tuple[MicroBatches, ...]:
    """Micro-batches with their samples ascending."""
    return tuple(tuple(tuple(sorted(samples)) for samples in slots) for slots in ranks)


def _check_search(config: PlannerConfig, num_samples: int) -> None:
    """Refuse a search that would take hours (`ConfigError`)."""
    if config.searches and num_samples * config.plan_effort > MAX_SEARCHED_PASSES:
        raise ConfigError(
            f"{named('plan_effort', config.plan_effort)} is too much for {num_samples} samples in "
            f"a step; set it to {MAX_SEARCHED_PASSES // num_samples}, or set "
            f"{named('balance', 'cost')}"
        )


def _plan_global(problem: Problem) -> tuple[MicroBatches, ...]:
    dims = problem.dims
    # With fewer samples than ranks, plan as many ranks as there are samples; the others get
    # placeholders alone. Experts must still divide the ranks planned.
    together = dims.expert_parallel
    useful = -(-max(problem.num_samples, 1) // together) * together
    if dims.data_parallel > useful:
        fewer = dataclasses.replace(problem, dims=dataclasses.replace(dims, data_parallel=useful))
        found = _plan_global(fewer)
        return *found, *(((),) * len(found[0]),) * (dims.data_parallel - useful)
    if not problem.config.searches or not problem.num_samples:
        return _placed(problem, pack_local(problem))
    return largest_first(problem, _sorted(_searched(problem)))


def _searched(problem: Problem) -> list[Slots]:
    """Slots of each rank by the search, which starts from two packed plans."""
    # Evened out by cost and by tokens: the result ends no later than either.
    config, bins = dataclasses.replace(problem.config, balance="tokens"), pack_local(problem)
    by_tokens = dataclasses.replace(problem, config=config)
    return search(Objective(problem), [_placed(each, bins) for each in (problem, by_tokens)])


def _placed(problem: Problem, bins: list[list[int]]) -> tuple[MicroBatches, ...]:
    """Packed micro-batches spread over ranks, without a search."""
    ranks = problem.dims.data_parallel
    count = problem.dims.round_up_num_microbatches(-(-len(bins) // ranks))
    # Splits are cheaper than placeholders: half of a row on each of two ranks, not all on one.
    if problem.config.fill == "split":
        bins = split_until(bins, count * ranks, problem.weight)
    return place(problem, bins, count)


def packed_on_least_ranks(problem: Problem) -> tuple[tuple[MicroBatches, ...], Sizes]:
    """Micro-batches and their context-parallel sizes [ranks][num_microbatches], without a search.

    On 4 ranks, with samples a that needs 4 of them, b that needs 2, and short ones c to g:

        rank 0   [c]  [b]×2  [a]×4
        rank 1   [d]  [b]×2  [a]×4
        rank 2   [e]  [f]    [a]×4
        rank 3   [g]  []     [a]×4

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
