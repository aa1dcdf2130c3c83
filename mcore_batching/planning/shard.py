"""Planning for samples that stay where they are: what one data-parallel rank does with its shard.

    bins = shape_shard(pack_shard(lengths, layout, config), lengths, layout, config, cost_model)
    count = layout.round_up_num_microbatches(all_reduce_max(len(bins)))
    micro_batches = fill_shard(bins, lengths, count, layout, config, cost_model)

Guarantees: `plan_step(..., owners=...)` is these calls for each rank and nothing else, so a rank
that sees only its own lengths reaches the plan that one who sees all of them makes.
"""

from __future__ import annotations

from collections.abc import Sequence

from mcore_batching.planning.assignment import RankMicroBatches, order_slots
from mcore_batching.planning.bounds import bin_lower_bound
from mcore_batching.planning.candidates import BestStep
from mcore_batching.planning.checks import check_lengths
from mcore_batching.planning.config import PlannerConfig
from mcore_batching.planning.cost import CostModel
from mcore_batching.planning.errors import LengthError, OversizeSampleError
from mcore_batching.planning.layout import Layout
from mcore_batching.planning.packing import first_fit, first_fit_decreasing
from mcore_batching.planning.padding import (
    needed_max_tokens_per_gpu,
    padded_sample_tokens,
    row_capacity_tokens,
)
from mcore_batching.planning.search import best_slots, evaluate
from mcore_batching.planning.splitting import split_until
from mcore_batching.planning.step_work import step_work
from mcore_batching.planning.weights import micro_batch_weight


def oversize_samples(lengths: Sequence[int], layout: Layout, config: PlannerConfig) -> list[int]:
    """Indices of the samples that exceed the cap on their own.

    Raises:
        OversizeSampleError: there is one, and `config.on_oversize` is "error".
    """
    capacity = row_capacity_tokens(layout, config)
    oversize = [
        index
        for index, length in enumerate(lengths)
        if padded_sample_tokens(length, layout, config) > capacity
    ]
    if oversize and config.on_oversize == "error":
        worst = max(oversize, key=lambda index: (lengths[index], -index))
        raise OversizeSampleError(
            index=worst,
            length=lengths[worst],
            padded_length=padded_sample_tokens(lengths[worst], layout, config),
            cap=config.cap_tokens(layout),
            needed_max_tokens_per_gpu=needed_max_tokens_per_gpu(lengths[worst], layout, config),
            num_oversize=len(oversize),
        )
    return oversize


def pack_shard(lengths: Sequence[int], layout: Layout, config: PlannerConfig) -> list[list[int]]:
    """Pack samples under the cap.

    Args:
        lengths: total length of each sample [samples], in tokens.
        layout: gives alignment and the cap's context-parallel factor.
        config: cap, packing rule, padding and what to do with oversize samples.

    Returns:
        The micro-batches' sample indices, ascending inside each: packed ones in the order in which
        the packing opened them, then oversize samples, each alone. No samples give no
        micro-batches.

    Raises:
        LengthError: a length is no integer, or negative.
        ConfigError: the cap leaves no room for a single token.
        OversizeSampleError: a sample exceeds the cap under `on_oversize="error"`.
    """
    lengths = check_lengths(lengths)
    capacity = row_capacity_tokens(layout, config)
    oversize = oversize_samples(lengths, layout, config)
    alone = set(oversize)
    fitting = [index for index in range(len(lengths)) if index not in alone]
    sizes = [padded_sample_tokens(lengths[index], layout, config) for index in fitting]
    packed = [sorted(fitting[item] for item in items) for items in _pack(sizes, capacity, config)]
    return packed + [[index] for index in oversize]


def shape_shard(
    bins: Sequence[Sequence[int]],
    lengths: Sequence[int],
    layout: Layout,
    config: PlannerConfig,
    cost_model: CostModel | None = None,
    *,
    forward_only: bool = False,
) -> list[list[int]]:
    """Bring one rank's micro-batches to the number in which its own pipeline would end first.

    Where the planner does not search, or there is no pipeline, or ranks run in lockstep, the
    micro-batches stay as they were packed.

    Args:
        bins: what `pack_shard` gave for this rank.
        lengths: total length of each sample of the shard [samples], in tokens.
        layout: as in `pack_shard`.
        config: as in `pack_shard`.
        cost_model: the default `CostModel()` if None.
        forward_only: plan for forward passes alone.

    Returns:
        micro-batches, no fewer than a packing needs.
    """
    if not _shapes_slots(layout, config) or not bins:
        return [list(samples) for samples in bins]
    cost_model = cost_model or CostModel()
    work = step_work(lengths, layout, config, cost_model, forward_only=forward_only)
    slots = best_slots(range(len(lengths)), None, work) or []
    shaped = [sorted(samples) for samples in slots if samples]
    return shaped if len(shaped) > len(bins) else [list(samples) for samples in bins]


def _shapes_slots(layout: Layout, config: PlannerConfig) -> bool:
    return config.searches and layout.pipeline_parallel > 1 and layout.expert_parallel == 1


def _pack(sizes: Sequence[int], capacity: int, config: PlannerConfig) -> list[list[int]]:
    if config.packing == "first-fit":
        return first_fit(sizes, capacity)
    decreasing = first_fit_decreasing(sizes, capacity)
    if config.packing == "first-fit-decreasing":
        return decreasing
    if len(decreasing) == bin_lower_bound(sizes, capacity):
        return decreasing
    in_order = first_fit(sizes, capacity)
    return in_order if len(in_order) < len(decreasing) else decreasing


def fill_shard(
    bins: Sequence[Sequence[int]],
    lengths: Sequence[int],
    num_microbatches: int,
    layout: Layout,
    config: PlannerConfig,
    cost_model: CostModel | None = None,
    *,
    forward_only: bool = False,
) -> RankMicroBatches:
    """Bring one rank's micro-batches to the count that all ranks agreed on, in slot order.

    Args:
        bins: what `pack_shard` gave for this rank; may be empty.
        lengths: total length of each sample of the shard [samples], in tokens.
        num_microbatches: the common count, `len(bins)` or more.
        layout: as in `pack_shard`.
        config: `fill` says whether to split before adding placeholders, `balance` by what to order.
        cost_model: the default `CostModel()` if None.
        forward_only: plan for forward passes alone.

    Returns:
        Exactly `num_microbatches` tuples of sample indices; `()` is a placeholder. Order: in a
        pipeline small ones first and last, whatever ends soonest; else real ones by descending
        weight. Placeholders stand just before the last real one. With `balance="none"` real ones
        keep the order of packing.

    Raises:
        LengthError: there are more `bins` than `num_microbatches`.
    """
    if len(bins) > num_microbatches:
        raise LengthError(
            f"num_microbatches must be at least the {len(bins)} micro-batches this shard packs "
            f"into, got {num_microbatches}; set num_microbatches to the maximum over all ranks"
        )
    cost_model = cost_model or CostModel()
    weight = micro_batch_weight(lengths, layout, config, cost_model)
    if config.fill == "split":
        bins = split_until(bins, num_microbatches, weight)
    plain = order_slots(bins, num_microbatches, None if config.balance == "none" else weight)
    if not _shapes_slots(layout, config) or not lengths:
        return plain
    work = step_work(lengths, layout, config, cost_model, forward_only=forward_only)
    best = BestStep(work)
    for slots in (plain, best_slots(range(len(lengths)), num_microbatches, work)):
        if slots is not None:
            best.consider(evaluate([[list(samples) for samples in slots]], work))
    return tuple(tuple(sorted(samples)) for samples in best.result().ranks[0])
