"""From lengths to plans: any number of samples, 0 included, gives a plan on any `ParallelDims`
up to `MAX_SEARCHED_PASSES`, none is left out, and the same input gives the same plan everywhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from itertools import chain

from mcore_batching.planning.config import PlannerConfig
from mcore_batching.planning.costs.cost import CostModel, ordered_sum
from mcore_batching.planning.errors import ConfigError, named
from mcore_batching.planning.groups import steps_of_batch
from mcore_batching.planning.local import pack_local
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

    Raises:
        LengthError: a length is out of range.
        ConfigError: the cap leaves no room for a single token, or the search would take hours.
        OversizeSampleError: a sample exceeds the cap under `on_oversize="error"`.
    """
    plan = plan_batch(lengths, dims, config, cost_model, forward_only=forward_only)
    return plan.steps[0]


def plan_batch(
    lengths: Sequence[int],
    dims: ParallelDims,
    config: PlannerConfig,
    cost_model: CostModel | None = None,
    *,
    samples_per_step: int | None = None,
    groups: Sequence[Hashable] | None = None,
    groups_per_step: int | None = None,
    forward_only: bool = False,
    on_step: Callable[[int, int], None] | None = None,
) -> Plan:
    """Plan the steps of one batch, cut by `samples_per_step` or by `groups_per_step`; else one
    step.

    Args:
        lengths, dims, config, cost_model, forward_only: as in `plan_step`, of the batch.
        samples_per_step: samples of each step over all ranks; the last step takes the rest.
        groups: the group (uid) of each sample [samples], with `groups_per_step`.
        groups_per_step: groups of each step over all ranks, as in `group_steps`.
        on_step: called after each step with the number of steps planned, and of all steps.

    Raises:
        As `plan_step`; LengthError also for steps or groups that do not fit the samples.
    """
    problem = Problem.of(lengths, dims, config, cost_model, forward_only=forward_only)
    samples_of_steps = steps_of_batch(
        problem.num_samples, samples_per_step, groups, groups_per_step
    )
    check_search(config, max(map(len, samples_of_steps)))
    return plan_steps(samples_of_steps, partial(plan_samples, problem), on_step)


def plan_steps(
    samples_of_steps: Sequence[Sequence[int]],
    plan_samples_of: Callable[[Sequence[int]], StepPlan],
    on_step: Callable[[int, int], None] | None,
) -> Plan:
    """The plan of a batch, step by step; `on_step` as in `plan_batch`."""
    steps: list[StepPlan] = []
    for samples in samples_of_steps:
        steps.append(plan_samples_of(samples))
        if on_step is not None:
            on_step(len(steps), len(samples_of_steps))
    return Plan(steps=tuple(steps), num_samples=sum(map(len, samples_of_steps)))


def check_search(config: PlannerConfig, num_samples: int) -> None:
    """Refuse a search that would take hours (`ConfigError`)."""
    if config.searches and num_samples * config.plan_effort > MAX_SEARCHED_PASSES:
        raise ConfigError(
            f"{named('plan_effort', config.plan_effort)} is too much for {num_samples} samples in "
            f"a step; set it to {MAX_SEARCHED_PASSES // num_samples}, or set "
            f"{named('balance', 'cost')}"
        )


def plan_samples(batch: Problem, samples: Sequence[int]) -> StepPlan:
    """The plan of one step: of `samples` of the batch, ascending."""
    problem, sizes = batch.subset(samples), None
    if batch.config.max_context_parallel is None:
        micro_batches = _plan_global(problem)
    else:
        micro_batches, sizes = _plan_dynamic(problem)
    return StepPlan(
        micro_batches=tuple(renamed(rank, samples) for rank in micro_batches),
        num_microbatches=len(micro_batches[0]),
        sample_indices=tuple(samples),
        dims=batch.dims,
        config=batch.config,
        context_parallel=sizes,
        cost_model=batch.cost_model,
        forward_only=batch.forward_only,
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
    # The packed plan is the result without a search, and otherwise the search's start.
    plain = _packed_and_placed(problem)
    if not problem.config.searches or not problem.num_samples:
        return plain
    found = tuple(
        tuple(tuple(sorted(samples)) for samples in slots) for slots in _searched(problem, plain)
    )
    return largest_first(problem, found)


def _searched(problem: Problem, plain: tuple[MicroBatches, ...] | None = None) -> list[Slots]:
    """Slots of each rank by the search, which starts from the packed plan."""
    return search(Objective(problem), [plain or _packed_and_placed(problem)])


def _plan_dynamic(problem: Problem) -> tuple[tuple[MicroBatches, ...], Sizes]:
    """Micro-batches of all ranks under dynamic CP, and their context-parallel sizes."""
    plain = packed_on_least_ranks(problem)
    if not problem.config.searches or not problem.num_samples:
        return plain
    # `_searched` also plans with one size for all, which is sometimes best.
    found = search_dynamic(problem, plain, _searched)
    ranks = tuple(tuple(tuple(sorted(samples)) for samples in slots) for slots in found.ranks)
    return ranks, tuple(map(tuple, found.sizes or []))


def _packed_and_placed(problem: Problem) -> tuple[MicroBatches, ...]:
    """Micro-batches packed under the cap and spread over ranks, without a search."""
    bins = pack_local(problem)
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


def renamed(rank: MicroBatches, samples: Sequence[int]) -> MicroBatches:
    """Micro-batches of positions in `samples`, as micro-batches of the samples there."""
    return tuple(tuple(samples[position] for position in samples_of) for samples_of in rank)
