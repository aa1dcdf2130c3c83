"""From lengths to plans.

Guarantees: any number of samples, zero included, gives a plan on any layout; too few samples never
raise and no sample is dropped; the same input gives the same plan everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

from mcore_batching.planning.assignment import RankMicroBatches, place
from mcore_batching.planning.checks import at_least, check_lengths, check_owners
from mcore_batching.planning.config import PlannerConfig
from mcore_batching.planning.cost import CostModel
from mcore_batching.planning.errors import LengthError
from mcore_batching.planning.layout import Layout
from mcore_batching.planning.plan import Plan, StepPlan
from mcore_batching.planning.shard import fill_shard, oversize_samples, pack_shard
from mcore_batching.planning.splitting import split_until
from mcore_batching.planning.weights import micro_batch_weight


def plan_step(
    lengths: Sequence[int],
    layout: Layout,
    config: PlannerConfig,
    cost_model: CostModel | None = None,
    *,
    owners: Sequence[int] | None = None,
) -> StepPlan:
    """Plan one optimizer step.

    Without `owners` the plan is global: samples are packed together, split until every rank can
    have the same number of micro-batches, and spread evenly over ranks and slots. With `owners` it
    is local: every sample stays on the rank that holds it, each rank packs its own, and ranks with
    fewer micro-batches than the fullest one split theirs and then add placeholders.

    Order inside a rank: real micro-batches by descending weight, placeholders just before the last
    real one; with `balance="none"`, the order of packing.

    Args:
        lengths: total length of each sample [samples], in tokens; may be empty.
        layout: sizes of the parallel groups.
        config: cap and policies.
        cost_model: what micro-batches cost; the default `CostModel()` if None.
        owners: the data-parallel rank that holds each sample [samples], or None.

    Raises:
        LengthError: a length or an owner is out of range.
        ConfigError: the cap leaves no room for a single token.
        OversizeSampleError: a sample exceeds the cap under `on_oversize="error"`.
    """
    plan = plan_batch(lengths, layout, config, cost_model, owners=owners)
    return plan.steps[0]


def plan_batch(
    lengths: Sequence[int],
    layout: Layout,
    config: PlannerConfig,
    cost_model: CostModel | None = None,
    *,
    samples_per_step: int | None = None,
    owners: Sequence[int] | None = None,
) -> Plan:
    """Plan the consecutive steps of one batch.

    Args:
        lengths: total length of each sample of the batch [samples], in tokens; may be empty, which
            gives one step of placeholders.
        layout: sizes of the parallel groups.
        config: cap and policies.
        cost_model: what micro-batches cost; the default `CostModel()` if None.
        samples_per_step: samples of each step over all ranks, in the order of `lengths`; the last
            step takes what is left. None makes one step of all.
        owners: as in `plan_step`.

    Raises:
        As `plan_step`; LengthError also for `samples_per_step` below 1.
    """
    lengths = check_lengths(lengths)
    cost_model = cost_model or CostModel()
    if owners is not None:
        owners = check_owners(owners, len(lengths), layout.data_parallel)
    per_step = max(1, len(lengths))
    if samples_per_step is not None:
        per_step = at_least("samples_per_step", samples_per_step, 1, LengthError)
    # Before any planning, so that the error names the sample by its index in the batch.
    oversize_samples(lengths, layout, config)
    steps = tuple(
        _plan_samples(
            range(first, min(first + per_step, len(lengths))),
            lengths,
            layout,
            config,
            cost_model,
            owners,
        )
        for first in range(0, max(1, len(lengths)), per_step)
    )
    return Plan(steps=steps, num_samples=len(lengths))


def _plan_samples(
    samples: Sequence[int],
    lengths: Sequence[int],
    layout: Layout,
    config: PlannerConfig,
    cost_model: CostModel,
    owners: Sequence[int] | None,
) -> StepPlan:
    """Plan the step of these samples, ascending indices into `lengths` and `owners`."""
    if owners is None:
        micro_batches = _plan_global(
            [lengths[sample] for sample in samples], layout, config, cost_model
        )
        ranks = tuple(_renamed(rank, samples) for rank in micro_batches)
    else:
        shards = [
            [sample for sample in samples if owners[sample] == rank]
            for rank in range(layout.data_parallel)
        ]
        shard_lengths = [[lengths[sample] for sample in shard] for shard in shards]
        local = _plan_local(shard_lengths, layout, config, cost_model)
        ranks = tuple(_renamed(rank, shard) for rank, shard in zip(local, shards, strict=True))
    return StepPlan(
        micro_batches=ranks,
        num_microbatches=len(ranks[0]),
        sample_indices=tuple(samples),
        layout=layout,
        config=config,
        scope="global" if owners is None else "local",
        cost_model=cost_model,
    )


def _plan_global(
    lengths: Sequence[int], layout: Layout, config: PlannerConfig, cost_model: CostModel
) -> tuple[RankMicroBatches, ...]:
    bins = pack_shard(lengths, layout, config)
    count = layout.round_up_num_microbatches(-(-len(bins) // layout.data_parallel))
    weight = micro_batch_weight(lengths, layout, config, cost_model)
    if config.fill == "split":
        bins = split_until(bins, count * layout.data_parallel, weight)
    return place(bins, count, layout, config, weight)


def _plan_local(
    shards: Sequence[Sequence[int]], layout: Layout, config: PlannerConfig, cost_model: CostModel
) -> tuple[RankMicroBatches, ...]:
    packed = [pack_shard(shard, layout, config) for shard in shards]
    count = layout.round_up_num_microbatches(max(map(len, packed)))
    return tuple(
        fill_shard(bins, shard, count, layout, config, cost_model)
        for bins, shard in zip(packed, shards, strict=True)
    )


def _renamed(rank: RankMicroBatches, samples: Sequence[int]) -> RankMicroBatches:
    """The same micro-batches with positions in `samples` replaced by the indices found there."""
    return tuple(tuple(samples[position] for position in samples_of) for samples_of in rank)
