"""Planning for samples that stay where they are: what one data-parallel rank does with its shard.

    for bins in shard_packings(lengths, layout, config, cost_model):
        count = layout.round_up_num_microbatches(all_reduce_max(len(bins)))
        micro_batches = fill_shard(bins, lengths, count, layout, config, cost_model)
        outlooks = all_gather(shard_outlook(micro_batches, lengths, layout, config, cost_model))

and the micro-batches that `soonest_packing` picks by the outlooks.

Guarantees: `plan_step(..., owners=...)` is these calls for each rank and nothing else, so a rank
that sees only its own lengths reaches the plan that one who sees all of them makes; where there is
a search, the step ends no later than with bins packed full and ordered by tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mcore_batching.planning.bounds import bin_lower_bound
from mcore_batching.planning.checks import check_lengths
from mcore_batching.planning.config import PlannerConfig
from mcore_batching.planning.cost import CostModel
from mcore_batching.planning.errors import LengthError, OversizeSampleError
from mcore_batching.planning.packing import first_fit, first_fit_decreasing
from mcore_batching.planning.parallel_dims import ParallelDims
from mcore_batching.planning.pipeline import inflight_tokens, pipeline_time
from mcore_batching.planning.placement import RankMicroBatches, order_slots
from mcore_batching.planning.search.best_step import inflight_error
from mcore_batching.planning.search.pipeline_search import best_slots
from mcore_batching.planning.splitting import split_until
from mcore_batching.planning.step_work import step_work
from mcore_batching.planning.tokens import (
    needed_max_tokens_per_gpu,
    padded_sample_tokens,
    row_capacity_tokens,
)
from mcore_batching.planning.weights import micro_batch_weight, row_tokens


def oversize_samples(
    lengths: Sequence[int], dims: ParallelDims, config: PlannerConfig
) -> list[int]:
    """Indices of the samples that exceed the cap on their own.

    Raises:
        OversizeSampleError: there is one, and `config.on_oversize` is "error".
    """
    capacity = row_capacity_tokens(dims, config)
    oversize = [
        index
        for index, length in enumerate(lengths)
        if padded_sample_tokens(length, dims, config) > capacity
    ]
    if oversize and config.on_oversize == "error":
        worst = max(oversize, key=lambda index: (lengths[index], -index))
        raise OversizeSampleError(
            index=worst,
            length=lengths[worst],
            padded_length=padded_sample_tokens(lengths[worst], dims, config),
            cap=config.cap_tokens(dims),
            needed_max_tokens_per_gpu=needed_max_tokens_per_gpu(lengths[worst], dims, config),
            num_oversize=len(oversize),
        )
    return oversize


def pack_shard(
    lengths: Sequence[int], dims: ParallelDims, config: PlannerConfig
) -> list[list[int]]:
    """Pack samples under the cap.

    Args:
        lengths: total length of each sample [samples], in tokens.
        dims: gives alignment and the cap's context-parallel factor.
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
    capacity = row_capacity_tokens(dims, config)
    oversize = oversize_samples(lengths, dims, config)
    alone = set(oversize)
    fitting = [index for index in range(len(lengths)) if index not in alone]
    sizes = [padded_sample_tokens(lengths[index], dims, config) for index in fitting]
    packed = [sorted(fitting[item] for item in items) for items in _pack(sizes, capacity, config)]
    return packed + [[index] for index in oversize]


def shard_packings(
    lengths: Sequence[int],
    dims: ParallelDims,
    config: PlannerConfig,
    cost_model: CostModel | None = None,
    *,
    forward_only: bool = False,
) -> list[list[list[int]]]:
    """What one rank's samples may be packed into: as few micro-batches as hold them, and as many as
    its own pipeline would end first with.

    The latter need not be best for ranks that hold other samples, hence both. Where the planner
    does not search, or there is no pipeline, or ranks run in lockstep, there is the former alone.

    Args:
        lengths: total length of each sample of the shard [samples], in tokens.
        dims: as in `pack_shard`.
        config: as in `pack_shard`.
        cost_model: the default `CostModel()` if None.
        forward_only: plan for forward passes alone.

    Returns:
        one or two lists of micro-batches, equally many on every rank of a job.

    Raises:
        As `pack_shard`.
    """
    packed = pack_shard(lengths, dims, config)
    if not _shapes_slots(dims, config):
        return [packed]
    work = step_work(lengths, dims, config, cost_model or CostModel(), forward_only=forward_only)
    slots = best_slots(range(len(lengths)), None, work) or []
    shaped = [sorted(samples) for samples in slots if samples]
    return [packed, shaped if len(shaped) > len(packed) else packed]


@dataclass(frozen=True, slots=True)
class ShardOutlook:
    """What to expect of one rank's micro-batches."""

    end: float
    """When its step ends by itself, in units of cost."""
    inflight_tokens: float
    """Most padded tokens whose activations its first pipeline stage holds at a time."""


def shard_outlook(
    micro_batches: Sequence[Sequence[int]],
    lengths: Sequence[int],
    dims: ParallelDims,
    config: PlannerConfig,
    cost_model: CostModel | None = None,
    *,
    forward_only: bool = False,
) -> ShardOutlook:
    """When one rank's step ends, and what it holds meanwhile.

    Args:
        micro_batches: what `fill_shard` gave.
        lengths: total length of each sample of the shard [samples], in tokens.
        dims: as in `pack_shard`.
        config: as in `pack_shard`.
        cost_model: the default `CostModel()` if None.
        forward_only: of the forward passes alone.
    """
    model = cost_model or CostModel()
    costs = [model.micro_batch([lengths[i] for i in samples]) for samples in micro_batches]
    tokens = [
        row_tokens(samples, lengths, dims, config) if samples else 0 for samples in micro_batches
    ]
    return ShardOutlook(
        end=pipeline_time(
            costs, dims, backward_ratio=model.backward_ratio, forward_only=forward_only
        ),
        inflight_tokens=inflight_tokens(tokens, dims, forward_only=forward_only),
    )


def soonest_packing(packings: Sequence[Sequence[ShardOutlook]], config: PlannerConfig) -> int:
    """Which of several packings ends the step first.

    Args:
        packings: every rank's outlook under each packing [packings][ranks].
        config: `max_inflight_tokens` is what a first stage may hold.

    Returns:
        its index; the first of equals.

    Raises:
        InflightBoundError: under each of them some rank holds more tokens in flight than it may.
    """
    bound = math.inf if config.max_inflight_tokens is None else config.max_inflight_tokens
    held = [max(rank.inflight_tokens for rank in ranks) for ranks in packings]
    if min(held) > bound:
        raise inflight_error(config.max_inflight_tokens, min(held))
    ends = [max(rank.end for rank in ranks) for ranks in packings]
    return min(range(len(packings)), key=lambda index: (held[index] > bound, ends[index], index))


def _shapes_slots(dims: ParallelDims, config: PlannerConfig) -> bool:
    return config.searches and dims.pipeline_parallel > 1 and dims.expert_parallel == 1


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
    dims: ParallelDims,
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
        dims: as in `pack_shard`.
        config: `fill` says whether to split before adding placeholders, `balance` by what to order.
        cost_model: the default `CostModel()` if None.
        forward_only: plan for forward passes alone.

    Returns:
        Exactly `num_microbatches` tuples of sample indices; `()` is a placeholder. Order: in a
        pipeline small ones first and last, whatever ends soonest; else real ones by descending
        weight, or with `balance="none"` in the order of packing. The last is real if there is a
        sample.

    Raises:
        LengthError: there are more `bins` than `num_microbatches`.
    """
    if len(bins) > num_microbatches:
        raise LengthError(
            f"num_microbatches must be at least the {len(bins)} micro-batches this shard packs "
            f"into, got {num_microbatches}; set num_microbatches to the maximum over all ranks"
        )
    cost_model = cost_model or CostModel()
    plain = _split_and_order(bins, num_microbatches, lengths, dims, config, cost_model)
    if not _shapes_slots(dims, config) or not lengths:
        return plain
    by_tokens = replace(config, balance="tokens")
    work = step_work(lengths, dims, config, cost_model, forward_only=forward_only)
    candidates = [
        plain,
        _split_and_order(bins, num_microbatches, lengths, dims, by_tokens, cost_model),
        best_slots(range(len(lengths)), num_microbatches, work),
    ]
    bound = math.inf if config.max_inflight_tokens is None else config.max_inflight_tokens
    found = []
    for number, slots in enumerate(candidates):
        if slots is not None:
            outlook = shard_outlook(
                slots, lengths, dims, config, cost_model, forward_only=forward_only
            )
            found.append((max(outlook.inflight_tokens, bound), outlook.end, number))
    best = candidates[min(found)[2]] or ()
    return tuple(tuple(sorted(samples)) for samples in best)


def _split_and_order(
    bins: Sequence[Sequence[int]],
    num_microbatches: int,
    lengths: Sequence[int],
    dims: ParallelDims,
    config: PlannerConfig,
    cost_model: CostModel,
) -> RankMicroBatches:
    weight = micro_batch_weight(lengths, dims, config, cost_model)
    if config.fill == "split":
        bins = split_until(bins, num_microbatches, weight)
    return order_slots(bins, num_microbatches, None if config.balance == "none" else weight)
