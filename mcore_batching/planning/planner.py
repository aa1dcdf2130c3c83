"""From lengths to plans.

Guarantees: any number of samples, zero included, gives a plan on any layout; too few samples never
raise; no sample is left out unless `last="drop"` asks for it, and then the plan lists it; the same
input gives the same plan everywhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence

from mcore_batching.planning.checks import at_least, check_lengths, check_owners
from mcore_batching.planning.config import PlannerConfig
from mcore_batching.planning.cost import CostModel
from mcore_batching.planning.errors import LengthError
from mcore_batching.planning.groups import LastStep, group_steps
from mcore_batching.planning.parallel_dims import ParallelDims
from mcore_batching.planning.placement import RankMicroBatches, place
from mcore_batching.planning.plan import Plan, StepPlan
from mcore_batching.planning.search.lockstep_search import search_lockstep
from mcore_batching.planning.search.pipeline_search import search
from mcore_batching.planning.shard import (
    fill_shard,
    oversize_samples,
    pack_shard,
    shard_outlook,
    shard_packings,
    soonest_packing,
)
from mcore_batching.planning.splitting import split_until
from mcore_batching.planning.step_work import step_work
from mcore_batching.planning.weights import micro_batch_weight


def plan_step(
    lengths: Sequence[int],
    dims: ParallelDims,
    config: PlannerConfig,
    cost_model: CostModel | None = None,
    *,
    owners: Sequence[int] | None = None,
    forward_only: bool = False,
) -> StepPlan:
    """Plan one optimizer step.

    Without `owners` the plan is global: samples are packed together, split until every rank can
    have the same number of micro-batches, and spread evenly over ranks and slots. With `owners` it
    is local: every sample stays on the rank that holds it, each rank packs its own, and ranks with
    fewer micro-batches than the fullest one split theirs and then add placeholders.

    By default a search decides how many micro-batches there are, what is in them and in which order
    they run, so that the slowest rank's pipeline ends first (with expert parallelism: so that
    slots, each as slow as its slowest rank, do). With `balance="cost"` or "tokens" packed
    micro-batches are spread evenly, in the order of descending weight; with "none" they keep the
    order of packing. A rank's last micro-batch is real if it has any sample.

    Args:
        lengths: total length of each sample [samples], in tokens; may be empty.
        dims: sizes of the parallel groups.
        config: cap and policies.
        cost_model: what micro-batches cost; the default `CostModel()` if None.
        owners: the data-parallel rank that holds each sample [samples], or None.
        forward_only: plan for forward passes alone, as for old and reference log-probs.

    Raises:
        LengthError: a length or an owner is out of range.
        ConfigError: the cap leaves no room for a single token.
        OversizeSampleError: a sample exceeds the cap under `on_oversize="error"`.
        InflightBoundError: no plan was found that keeps to `max_inflight_tokens`.
    """
    plan = plan_batch(lengths, dims, config, cost_model, owners=owners, forward_only=forward_only)
    return plan.steps[0]


def plan_batch(
    lengths: Sequence[int],
    dims: ParallelDims,
    config: PlannerConfig,
    cost_model: CostModel | None = None,
    *,
    samples_per_step: int | None = None,
    owners: Sequence[int] | None = None,
    groups: Sequence[Hashable] | None = None,
    groups_per_step: int | None = None,
    last: LastStep = "keep",
    forward_only: bool = False,
) -> Plan:
    """Plan the steps of one batch: of so many samples each, of so many groups each, or one step.

    Args:
        lengths: total length of each sample of the batch [samples], in tokens; may be empty, which
            gives one step of placeholders.
        dims: sizes of the parallel groups.
        config: cap and policies.
        cost_model: what micro-batches cost; the default `CostModel()` if None.
        samples_per_step: samples of each step over all ranks, in the order of `lengths`; the last
            step takes what is left. None makes one step of all.
        owners: as in `plan_step`.
        groups: the group (uid) of each sample [samples], with `groups_per_step`.
        groups_per_step: groups of each step over all ranks, as in `group_steps`; not together with
            `samples_per_step`.
        last: what becomes of groups left over, as in `group_steps`; those dropped are listed in
            `Plan.dropped`.
        forward_only: as in `plan_step`.

    Raises:
        As `plan_step`; LengthError also for `samples_per_step` below 1, for groups that
            `group_steps` refuses or that are not one a sample, for arguments that exclude each
            other, and if `last="drop"` leaves no step.
    """
    lengths = check_lengths(lengths)
    cost_model = cost_model or CostModel()
    if owners is not None:
        owners = check_owners(owners, len(lengths), dims.data_parallel)
    if groups is None and groups_per_step is None and last == "keep":
        samples_of_steps = _slices(len(lengths), samples_per_step)
    else:
        samples_of_steps = _whole_groups(
            len(lengths), groups, groups_per_step, last, samples_per_step
        )
    # Before any planning, so that the error names the sample by its index in the batch.
    oversize_samples(lengths, dims, config)
    steps = tuple(
        _plan_samples(samples, lengths, dims, config, cost_model, owners, forward_only)
        for samples in samples_of_steps
    )
    covered = {sample for step in steps for sample in step.sample_indices}
    dropped = tuple(sample for sample in range(len(lengths)) if sample not in covered)
    return Plan(steps=steps, num_samples=len(lengths), dropped=dropped)


def _slices(num_samples: int, samples_per_step: int | None) -> list[Sequence[int]]:
    per_step = max(1, num_samples)
    if samples_per_step is not None:
        per_step = at_least("samples_per_step", samples_per_step, 1, LengthError)
    return [
        range(first, min(first + per_step, num_samples))
        for first in range(0, max(1, num_samples), per_step)
    ]


def _whole_groups(
    num_samples: int,
    groups: Sequence[Hashable] | None,
    groups_per_step: int | None,
    last: LastStep,
    samples_per_step: int | None,
) -> list[Sequence[int]]:
    if samples_per_step is not None:
        raise LengthError(
            "steps are cut either by samples_per_step or by groups and groups_per_step, got both; "
            "leave samples_per_step out to keep the samples of a prompt together"
        )
    if groups is None or groups_per_step is None:
        absent = "groups" if groups is None else "groups_per_step"
        raise LengthError(
            f"groups, groups_per_step and last go together, but {absent} is not set; set {absent}, "
            "or none of them"
        )
    if len(groups) != num_samples:
        raise LengthError(
            f"groups must name one group for each of the {num_samples} samples, got {len(groups)} "
            "entries; pass groups in the order of lengths"
        )
    steps: list[Sequence[int]] = list(group_steps(groups, groups_per_step, last=last))
    if num_samples and not steps:
        raise LengthError(
            f"the batch has fewer than groups_per_step={groups_per_step} groups, so dropping those "
            "left over leaves no step at all; set last=keep, or decrease groups_per_step"
        )
    return steps or [range(0)]


def _plan_samples(
    samples: Sequence[int],
    lengths: Sequence[int],
    dims: ParallelDims,
    config: PlannerConfig,
    cost_model: CostModel,
    owners: Sequence[int] | None,
    forward_only: bool,
) -> StepPlan:
    """Plan the step of these samples, ascending indices into `lengths` and `owners`."""
    if owners is None:
        micro_batches = _plan_global(
            [lengths[sample] for sample in samples], dims, config, cost_model, forward_only
        )
        ranks = tuple(_renamed(rank, samples) for rank in micro_batches)
    else:
        shards = [
            [sample for sample in samples if owners[sample] == rank]
            for rank in range(dims.data_parallel)
        ]
        shard_lengths = [[lengths[sample] for sample in shard] for shard in shards]
        local = _plan_local(shard_lengths, dims, config, cost_model, forward_only)
        ranks = tuple(_renamed(rank, shard) for rank, shard in zip(local, shards, strict=True))
    return StepPlan(
        micro_batches=ranks,
        num_microbatches=len(ranks[0]),
        sample_indices=tuple(samples),
        dims=dims,
        config=config,
        scope="global" if owners is None else "local",
        cost_model=cost_model,
        forward_only=forward_only,
    )


def _plan_global(
    lengths: Sequence[int],
    dims: ParallelDims,
    config: PlannerConfig,
    cost_model: CostModel,
    forward_only: bool,
) -> tuple[RankMicroBatches, ...]:
    plain = _packed_and_placed(lengths, dims, config, cost_model)
    if not config.searches or not lengths:
        if config.max_inflight_tokens is not None:
            outlooks = [
                shard_outlook(rank, lengths, dims, config, cost_model, forward_only=forward_only)
                for rank in plain
            ]
            soonest_packing([outlooks], config)
        return plain
    work = step_work(lengths, dims, config, cost_model, forward_only=forward_only)
    by_tokens = dataclasses.replace(config, balance="tokens")
    starts = (plain, _packed_and_placed(lengths, dims, by_tokens, cost_model))
    look = search_lockstep if dims.expert_parallel > 1 else search
    return tuple(tuple(tuple(sorted(samples)) for samples in slots) for slots in look(work, starts))


def _packed_and_placed(
    lengths: Sequence[int], dims: ParallelDims, config: PlannerConfig, cost_model: CostModel
) -> tuple[RankMicroBatches, ...]:
    """Micro-batches packed under the cap and spread over ranks, without a search."""
    bins = pack_shard(lengths, dims, config)
    count = dims.round_up_num_microbatches(-(-len(bins) // dims.data_parallel))
    weight = micro_batch_weight(lengths, dims, config, cost_model)
    if config.fill == "split":
        bins = split_until(bins, count * dims.data_parallel, weight)
    return place(bins, count, dims, config, weight)


def _plan_local(
    shards: Sequence[Sequence[int]],
    dims: ParallelDims,
    config: PlannerConfig,
    cost_model: CostModel,
    forward_only: bool,
) -> tuple[RankMicroBatches, ...]:
    packings = zip(
        *(
            shard_packings(shard, dims, config, cost_model, forward_only=forward_only)
            for shard in shards
        ),
        strict=True,
    )
    filled = []
    for bins_of_ranks in packings:
        count = dims.round_up_num_microbatches(max(map(len, bins_of_ranks)))
        filled.append(
            tuple(
                fill_shard(bins, shard, count, dims, config, cost_model, forward_only=forward_only)
                for bins, shard in zip(bins_of_ranks, shards, strict=True)
            )
        )
    outlooks = [
        [
            shard_outlook(rank, shard, dims, config, cost_model, forward_only=forward_only)
            for rank, shard in zip(ranks, shards, strict=True)
        ]
        for ranks in filled
    ]
    return filled[soonest_packing(outlooks, config)]


def _renamed(rank: RankMicroBatches, samples: Sequence[int]) -> RankMicroBatches:
    """The same micro-batches with positions in `samples` replaced by the indices found there."""
    return tuple(tuple(samples[position] for position in samples_of) for samples_of in rank)
