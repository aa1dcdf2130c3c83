"""Plans in words.

Guarantees: what is said is computed from the plan at hand and its lengths; nothing is remembered
from planning, so a plan that was read from a file or made elsewhere is explained just the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mcore_batching.planning.bounds import micro_batch_lower_bound
from mcore_batching.planning.plan import Plan, StepPlan
from mcore_batching.planning.shard import pack_shard
from mcore_batching.planning.statistics import step_statistics
from mcore_batching.planning.sums import ordered_sum
from mcore_batching.planning.tokens import padded_sample_tokens, row_capacity_tokens
from mcore_batching.planning.validation import validate_plan
from mcore_batching.tools.advice import what_holds_back, what_would_help

_SHOWN = 16


def explain(plan: Plan | StepPlan, lengths: Sequence[int]) -> str:
    """Why this many micro-batches, and which rank, micro-batch and sample hold the step up.

    Args:
        plan: a plan, or one step of it.
        lengths: total length of each sample of the whole batch [samples], in tokens.

    Returns:
        a paragraph per step, and the samples that are in none.

    Raises:
        InvariantError: the plan is broken.
    """
    validate_plan(plan, lengths)
    if isinstance(plan, StepPlan):
        return _explain_step(plan, lengths)
    steps = [
        f"step {index}: {_explain_step(step, lengths)}" for index, step in enumerate(plan.steps)
    ]
    return "\n".join([*steps, *_dropped(plan)])


def _explain_step(step: StepPlan, lengths: Sequence[int]) -> str:
    return "\n".join(
        [
            f"{_some(step.num_samples, 'sample')} on {_ranks(step)}: "
            f"{_some(step.num_microbatches, 'micro-batch')} a rank",
            *(f"  {line}" for line in (_count(step, lengths), _filled(step))),
            *(f"  {line}" for line in _bottleneck(step, lengths)),
            *(f"  {line}" for line in _oversize(step, lengths)),
            *(f"  {line}" for line in _time(step, lengths)),
        ]
    )


def _dropped(plan: Plan) -> Iterable[str]:
    if plan.dropped:
        yield (
            f"dropped with the groups left over: {_some(len(plan.dropped), 'sample')}: "
            f"{_abbreviated(plan.dropped)}"
        )


def _count(step: StepPlan, lengths: Sequence[int]) -> str:
    """Where the number of micro-batches a rank comes from."""
    if not step.num_samples:
        reason = "no samples: one micro-batch a rank is the least a schedule runs"
        needed = 1
    elif step.scope == "global":
        num_bins = _num_bins(step, lengths, step.sample_indices)
        needed = -(-num_bins // step.dims.data_parallel)
        bound = _lower_bound(step, lengths, step.sample_indices)
        reason = (
            f"packing under the cap of {step.config.cap_tokens(step.dims)} tokens takes "
            f"{_some(num_bins, 'micro-batch')} (no packing takes fewer than {bound}), "
            f"{needed} a rank"
        )
    else:
        shards = [
            sorted(sample for samples in rank for sample in samples) for rank in step.micro_batches
        ]
        counts = [_num_bins(step, lengths, shard) for shard in shards]
        needed = max(1, *counts)
        rank = counts.index(max(counts))
        reason = (
            f"rank {rank} packs its own {_some(len(shards[rank]), 'sample')} into {counts[rank]} "
            f"micro-batches (no packing takes fewer than "
            f"{_lower_bound(step, lengths, shards[rank])}), the most of all ranks; the one with "
            f"the fewest packs {min(counts)}"
        )
    legal = step.dims.round_up_num_microbatches(needed)
    if legal > needed:
        reason += (
            f"; the interleaved schedule with groups of {step.dims.group_size} over "
            f"{step.dims.pipeline_parallel} stages makes it {legal}"
        )
    if step.num_microbatches > legal and step.config.searches:
        reason += f"; {step.num_microbatches} end the step sooner"
    elif step.num_microbatches != legal:
        reason += f"; this plan has {step.num_microbatches}"
    return f"count: {reason}"


def _time(step: StepPlan, lengths: Sequence[int]) -> Iterable[str]:
    """The predicted end of the step, what holds it back and what would help."""
    if not step.num_samples:
        return
    statistics = step_statistics(step, lengths)
    yield (
        f"predicted end of {'the forward passes' if step.forward_only else 'the step'}: "
        f"{statistics.step_time:.0f} token units, "
        f"{statistics.time_over_floor:.3f} x the time before which no plan's step ends; the first "
        f"stage holds {statistics.peak_inflight_tokens:.0f} tokens at most"
    )
    yield f"held back by: {what_holds_back(step, lengths)}"
    if step.scope == "global":
        suggestions = what_would_help(step, lengths)
        helps = [f"{each.change} ({each.gain:.2f} x as fast)" for each in suggestions]
        tried = "another cap, context or pipeline parallel size"
        yield f"would help: {'; '.join(helps) if helps else f'none of those tried ({tried})'}"


def _filled(step: StepPlan) -> str:
    """How the count was reached."""
    placeholders = sum(samples == () for rank in step.micro_batches for samples in rank)
    real = step.num_microbatches * len(step.micro_batches) - placeholders
    return f"filled by: {real} micro-batches with samples, {placeholders} placeholders"


def _bottleneck(step: StepPlan, lengths: Sequence[int]) -> Iterable[str]:
    """The rank, the micro-batch and the sample with the most work."""
    if not step.num_samples:
        return
    model = step.cost_model
    costs = {
        (rank, slot): model.micro_batch([lengths[sample] for sample in samples])
        for rank, micro_batches in enumerate(step.micro_batches)
        for slot, samples in enumerate(micro_batches)
    }
    rank_costs = [
        ordered_sum(costs[rank, slot] for slot in range(step.num_microbatches))
        for rank in range(len(step.micro_batches))
    ]
    statistics = step_statistics(step, lengths)
    rank = rank_costs.index(max(rank_costs))
    yield (
        f"slowest rank: {rank}, with {statistics.rank_balance:.3f} x the mean work; over slots the "
        f"costliest micro-batches add up to {statistics.slot_balance:.3f} x the mean"
    )
    place = max(costs, key=lambda key: (costs[key], -key[0], -key[1]))
    samples = step.micro_batches[place[0]][place[1]]
    yield (
        f"costliest micro-batch: rank {place[0]} slot {place[1]}, {_some(len(samples), 'sample')}, "
        f"{costs[place] / (max(rank_costs) or 1.0):.1%} of the slowest rank's work"
    )
    longest = max(step.sample_indices, key=lambda sample: (lengths[sample], -sample))
    owner = next(
        number
        for number, micro_batches in enumerate(step.micro_batches)
        if any(longest in held for held in micro_batches)
    )
    yield f"longest sample: {longest}, {lengths[longest]} tokens, on rank {owner}"


def _oversize(step: StepPlan, lengths: Sequence[int]) -> Iterable[str]:
    capacity = row_capacity_tokens(step.dims, step.config)
    oversize = [
        sample
        for sample in step.sample_indices
        if padded_sample_tokens(lengths[sample], step.dims, step.config) > capacity
    ]
    if oversize:
        yield (
            f"oversize, each alone in its micro-batch: {_some(len(oversize), 'sample')} over "
            f"{capacity} tokens: {_abbreviated(oversize)}"
        )


def _num_bins(step: StepPlan, lengths: Sequence[int], samples: Sequence[int]) -> int:
    return len(pack_shard([lengths[sample] for sample in samples], step.dims, step.config))


def _lower_bound(step: StepPlan, lengths: Sequence[int], samples: Sequence[int]) -> int:
    return micro_batch_lower_bound([lengths[sample] for sample in samples], step.dims, step.config)


def _ranks(step: StepPlan) -> str:
    return _some(len(step.micro_batches), "data-parallel rank")


def _some(count: int, noun: str) -> str:
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{count} {noun if count == 1 else plural}"


def _abbreviated(samples: Sequence[int]) -> str:
    return " ".join(map(str, samples[:_SHOWN])) + _more(len(samples))


def _more(count: int) -> str:
    return f" … {count - _SHOWN} more" if count > _SHOWN else ""
