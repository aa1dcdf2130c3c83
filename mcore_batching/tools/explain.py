"""Plans in words: where the micro-batch count comes from, what holds the step up, what would help.

Everything said is computed from the plan and its lengths, so a plan read from a file is explained
like one made a moment ago.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from mcore_batching.planning import (
    Argument,
    Plan,
    Problem,
    StepPlan,
    StepStatistics,
    micro_batch_lower_bound,
    pack_shard,
    step_problem,
    step_statistics,
    validate_plan,
)
from mcore_batching.tools.report import counted
from mcore_batching.tools.suggestions import suggestions
from mcore_batching.tools.timeline import step_timeline

Spell = Callable[[Argument], str]

_SHOWN = 16

# Shares from which on something counts as what holds a step back. They only choose among sentences.
_ALMOST_THE_STEP = 0.95
_UNEVEN = 1.05
_ALMOST_FULL = 0.9
_COSTLY_STARTS = 0.05
_FEW_SAMPLES_PER_STAGE = 8


def explain(plan: Plan | StepPlan, lengths: Sequence[int], spell: Spell = str) -> str:
    """A plan in words.

    Args:
        plan: a plan, or one step of it.
        lengths: total length of each sample of the whole batch [samples], in tokens.
        spell: how to print the arguments that suggestions name.

    Returns:
        a paragraph per step, and the samples that are in none.

    Raises:
        InvariantError: the plan is broken.
    """
    validate_plan(plan, lengths)
    if isinstance(plan, StepPlan):
        return _explain_step(plan, lengths, spell)
    paragraphs = [
        f"step {index}: {_explain_step(step, lengths, spell)}"
        for index, step in enumerate(plan.steps)
    ]
    if plan.dropped:
        paragraphs.append(
            f"dropped with the groups left over: {counted(len(plan.dropped), 'sample')}: "
            f"{_abbreviated(plan.dropped)}"
        )
    return "\n".join(paragraphs)


def _explain_step(step: StepPlan, lengths: Sequence[int], spell: Spell) -> str:
    statistics = step_statistics(step, lengths)
    ranks = counted(len(step.micro_batches), "data-parallel rank")
    lines = [
        f"{counted(step.num_samples, 'sample')} on {ranks}: "
        f"{counted(step.num_microbatches, 'micro-batch')} per rank",
        f"count: {_count(step, lengths)}",
        _filled(step, statistics),
    ]
    if step.num_samples:
        lines += _bottleneck(step, lengths, statistics)
        lines += _oversize(step, lengths)
        lines += _time(step, lengths, statistics, spell)
    return "\n  ".join(lines)


def _count(step: StepPlan, lengths: Sequence[int]) -> str:
    """The origin of the number of micro-batches per rank."""
    if not step.num_samples:
        reason = "no samples: one micro-batch per rank is the least a schedule runs"
        needed = 1
    elif step.scope == "global":
        num_bins, bound = _bins_and_bound(step, lengths, step.sample_indices)
        needed = -(-num_bins // step.dims.data_parallel)
        reason = (
            f"packing under the cap of {step.config.cap_tokens(step.dims)} tokens takes "
            f"{counted(num_bins, 'micro-batch')} (no packing takes fewer than {bound}), "
            f"{needed} per rank"
        )
    else:
        shards = [
            sorted(sample for samples in rank for sample in samples) for rank in step.micro_batches
        ]
        counts = [_bins_and_bound(step, lengths, shard) for shard in shards]
        most, bound = max(counts, key=lambda count: count[0])
        rank = [num_bins for num_bins, _ in counts].index(most)
        needed = max(1, most)
        reason = (
            f"rank {rank} packs its own {counted(len(shards[rank]), 'sample')} into {most} "
            f"micro-batches (no packing takes fewer than {bound}), the most of all ranks; the one "
            f"with the fewest packs {min(counts)[0]}"
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
    return reason


def _bins_and_bound(
    step: StepPlan, lengths: Sequence[int], samples: Sequence[int]
) -> tuple[int, int]:
    """Micro-batches that packing these samples takes, and that any packing takes at least."""
    problem = Problem.of([lengths[sample] for sample in samples], step.dims, step.config)
    return len(pack_shard(problem)), micro_batch_lower_bound(problem)


def _filled(step: StepPlan, statistics: StepStatistics) -> str:
    placeholders = statistics.num_placeholders
    real = step.num_microbatches * len(step.micro_batches) - placeholders
    return f"filled by: {real} micro-batches with samples, {placeholders} placeholders"


def _bottleneck(
    step: StepPlan, lengths: Sequence[int], statistics: StepStatistics
) -> Iterator[str]:
    """The rank, the micro-batch and the sample with the most work."""
    costs = _costs(step, lengths)
    rank_costs = [sum(rank) for rank in costs]
    yield (
        f"slowest rank: {rank_costs.index(max(rank_costs))}, with {statistics.rank_balance:.3f} x "
        f"the mean work; over slots the costliest micro-batches add up to "
        f"{statistics.slot_balance:.3f} x the mean"
    )
    # The first of the costliest ones: `max` keeps the first of equals.
    cost, rank, slot = max(
        ((cost, rank, slot) for rank, slots in enumerate(costs) for slot, cost in enumerate(slots)),
        key=lambda place: place[0],
    )
    samples = counted(len(step.micro_batches[rank][slot]), "sample")
    yield (
        f"costliest micro-batch: rank {rank} slot {slot}, {samples}, "
        f"{cost / (max(rank_costs) or 1.0):.1%} of the slowest rank's work"
    )
    longest = _longest(step, lengths)
    owner = next(
        number
        for number, micro_batches in enumerate(step.micro_batches)
        if any(longest in held for held in micro_batches)
    )
    yield f"longest sample: {longest}, {lengths[longest]} tokens, on rank {owner}"


def _oversize(step: StepPlan, lengths: Sequence[int]) -> Iterator[str]:
    problem, _ = step_problem(step, lengths)
    oversize = [step.sample_indices[sample] for sample in sorted(problem.oversize)]
    if oversize:
        yield (
            f"oversize, each alone in its micro-batch: {counted(len(oversize), 'sample')} over "
            f"{problem.capacity} tokens: {_abbreviated(oversize)}"
        )


def _time(
    step: StepPlan, lengths: Sequence[int], statistics: StepStatistics, spell: Spell
) -> Iterator[str]:
    """The predicted end of the step, what holds it back and what would help."""
    yield (
        f"predicted end of {'the forward passes' if step.forward_only else 'the step'}: "
        f"{statistics.step_time:.0f} token units, {statistics.time_over_floor:.3f} x a lower bound "
        f"on any plan's; the first stage holds {statistics.peak_inflight_tokens:.0f} tokens at most"
    )
    yield f"held back by: {what_holds_back(step, lengths)}"
    if step.scope == "global":
        helps = [
            f"{' and '.join(map(spell, each.changes))} ({each.gain:.2f} x as fast)"
            for each in suggestions(step, lengths)
        ]
        tried = "another cap, context or pipeline parallel size"
        yield f"would help: {'; '.join(helps) if helps else f'none of those tried ({tried})'}"


def what_holds_back(step: StepPlan, lengths: Sequence[int]) -> str:
    """The one thing that keeps the step from ending sooner.

    Args:
        step: a valid plan of one sample or more.
        lengths: total length of each sample of the whole batch [samples], in tokens.
    """
    model, dims = step.cost_model, step.dims
    end = step_statistics(step, lengths).step_time
    if not end:
        return "nothing: by its cost model the step takes no time"
    longest = _longest(step, lengths)
    passes = 1.0 if step.forward_only else 1.0 + model.backward_ratio
    alone = passes * dims.pipeline_parallel * model.micro_batch([lengths[longest]])
    if alone >= _ALMOST_THE_STEP * end:
        back = "" if step.forward_only else " and back"
        return (
            f"sample {longest} ({lengths[longest]} tokens): its own way through "
            f"{_stages(step)}{back} takes {alone / end:.0%} of the step"
        )
    if uneven := _uneven_ranks(step, lengths):
        return uneven
    if _cap_binds(step, lengths):
        return (
            f"the cap of {step.config.cap_tokens(dims)} tokens: micro-batches are full, and "
            f"starting each of them costs as much as {model.per_micro_batch / model.sample(1):.0f} "
            "tokens"
        )
    if dims.pipeline_parallel == 1:
        return "the work itself: ranks are even and there is no pipeline to fill"
    samples_per_rank = step.num_samples / dims.data_parallel
    if samples_per_rank < _FEW_SAMPLES_PER_STAGE * dims.pipeline_parallel:
        few = f"{samples_per_rank:.0f} per rank for {_stages(step)}"
        return f"too few samples for this pipeline: {few}"
    return f"filling and draining {_stages(step)} with {step.num_microbatches} micro-batches"


def _uneven_ranks(step: StepPlan, lengths: Sequence[int]) -> str | None:
    """The straggler, or with expert parallelism the slots that wait for one."""
    if step.dims.expert_parallel > 1:
        balance = step_statistics(step, lengths).slot_balance
        if balance <= _UNEVEN:
            return None
        return (
            f"slots whose micro-batches differ over ranks: with expert parallelism each waits for "
            f"its slowest, which adds up to {balance:.2f} x the mean"
        )
    ends = [rank.end for rank in step_timeline(step, lengths).ranks]
    mean = sum(ends) / len(ends)
    if max(ends) <= _UNEVEN * mean:
        return None
    return (
        f"rank {ends.index(max(ends))}: it ends {max(ends) / mean:.2f} x as late as the mean rank"
    )


def _cap_binds(step: StepPlan, lengths: Sequence[int]) -> bool:
    """True if micro-batches are almost full and starting them is a good part of the work."""
    model, dims = step.cost_model, step.dims
    problem, _ = step_problem(step, lengths)
    tokens = sum(problem.tokens)
    room = problem.capacity * step.num_microbatches * dims.data_parallel
    starts = step.num_microbatches * dims.data_parallel * model.per_micro_batch
    work = starts + sum(problem.costs)
    return tokens > _ALMOST_FULL * room and starts > _COSTLY_STARTS * work and model.sample(1) > 0


def _costs(step: StepPlan, lengths: Sequence[int]) -> list[list[float]]:
    """Forward cost of each micro-batch [data_parallel][num_microbatches]."""
    return [
        [step.cost_model.micro_batch([lengths[i] for i in samples]) for samples in rank]
        for rank in step.micro_batches
    ]


def _longest(step: StepPlan, lengths: Sequence[int]) -> int:
    return max(step.sample_indices, key=lambda sample: (lengths[sample], -sample))


def _stages(step: StepPlan) -> str:
    number = step.dims.pipeline_parallel
    return f"{number} stages" if number > 1 else "the one stage"


def _abbreviated(samples: Sequence[int]) -> str:
    more = f" … {len(samples) - _SHOWN} more" if len(samples) > _SHOWN else ""
    return " ".join(map(str, samples[:_SHOWN])) + more
