"""Plans in words: where the micro-batch count comes from, what holds the step up, what would help.

Every sentence is computed from the plan and its lengths, so a plan read from a file is explained
like one made a moment ago.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from mcore_batching.planning import (
    CostModel,
    ParallelDims,
    ParallelDimsError,
    Plan,
    PlannerConfig,
    PlanningError,
    Problem,
    StepPlan,
    StepStatistics,
    micro_batch_lower_bound,
    pack_local,
    plan_step,
    predicted_step_time,
    step_problem,
    step_statistics,
    validate_plan,
)
from mcore_batching.planning.errors import named, shortened
from mcore_batching.planning.plans.plan import counted, rank_noun
from mcore_batching.planning.plans.statistics import micro_batch_costs
from mcore_batching.tools.picture import step_timeline
from mcore_batching.tools.report import FLOOR

Changes = tuple[tuple[str, int], ...]  # arguments to set together, with their new values
# What changes, and what to plan with.
Setup = tuple[Changes, ParallelDims, PlannerConfig, CostModel]
# Samples of each micro-batch [ranks][num_microbatches], numbered as in a problem.
Ranks = Sequence[Sequence[Sequence[int]]]

# Shares from which on something counts as what holds a step back. They choose among sentences, no
# plan depends on them; other values name another cause first where two are about as strong.
_ALMOST_THE_STEP = 0.95  # one sample's way through all stages, of the step
_UNEVEN = 1.05  # the slowest rank over the mean
_ALMOST_FULL = 0.9  # tokens over the cap, or samples over the most per row
_COSTLY_STARTS = 0.05  # fixed costs of micro-batches, of all work
_FEW_SAMPLES_PER_STAGE = 8  # samples of a rank per pipeline stage

# Of a plan that is only compared, at most. Steps of 512 samples on DP8 x PP4 end 1.5 % later than
# by the default, which takes 8 times as long; with 20, which takes a third, 12 % later.
COMPARED_PLAN_EFFORT = 100
LEAST_GAIN = 1.01  # less is not worth changing a job's parallel dims for
# A try takes at most this many times as long as the longest before it: twice the stages, or half
# the cap, are twice the passes. The first is compared with the time to predict the present step.
_LONGER = 2.0

_NEXT_LINE = "\n" + " " * len("  would help: ")


def explain(
    plan: Plan | StepPlan,
    lengths: Sequence[int],
    *,
    advice_seconds: float = math.inf,
) -> str:
    """A plan in words, a paragraph per step, or one step of it.

    Args:
        plan: what to explain.
        lengths: total length of each sample of the whole batch [samples], in tokens.
        advice_seconds: most processor time to look for caps and parallel sizes that would end a
            step sooner, for each step: the time that its plan took, say; 0 to leave them out.

    Raises:
        InvariantError: the plan is broken.
    """
    lengths = list(lengths)
    validate_plan(plan, lengths)
    if isinstance(plan, StepPlan):
        return _explain_step(plan, lengths, advice_seconds)
    return "\n".join(
        f"step {index}: {_explain_step(step, lengths, advice_seconds)}"
        for index, step in enumerate(plan.steps)
    )


def _explain_step(step: StepPlan, lengths: Sequence[int], advice_seconds: float) -> str:
    statistics = step_statistics(step, lengths)
    problem, ranks = step_problem(step, lengths)
    placeholders = statistics.num_placeholders
    real = step.num_microbatches * len(ranks) - placeholders
    lines = [
        f"{counted(step.num_samples, 'sample')} on {counted(len(ranks), rank_noun(step))}: "
        f"{counted(step.num_microbatches, 'micro-batch')} per rank",
        *filter(None, [statistics.sharing]),
        *(["below, samples that share tokens count as one"] if step.trees else []),
        f"count: {_count(step, problem, ranks)}",
        f"filled by: {real} micro-batches with samples, {placeholders} placeholders",
    ]
    if not step.num_samples:
        return "\n  ".join(lines)
    lines += _bottleneck(step, problem, ranks, statistics)
    if problem.oversize:
        samples = [step.sample_indices[position] for position in sorted(problem.oversize)]
        lines.append(
            f"oversize, each alone in its micro-batch: {counted(len(samples), 'sample')} over "
            f"{max(problem.on_ranks[size].capacity for size in problem.row_sizes)} tokens: "
            f"{shortened(samples)}"
        )
    lines += [
        f"predicted end of {'the forward passes' if step.forward_only else 'the step'}: "
        f"{statistics.step_time:.0f} token units, {statistics.time_over_floor:.3f} x the floor "
        f"({FLOOR}; no plan ends sooner); the first stage holds "
        f"{statistics.peak_inflight_tokens:.0f} tokens at most",
        f"held back by: {what_holds_back(step, lengths)}",
    ]
    if step.context_parallel is not None:
        sizes = [row.size for row in step.rows()]
        of_size = [f"{sizes.count(size)} of size {size}" for size in sorted(set(sizes))]
        lines.append(f"micro-batches by context-parallel size: {', '.join(of_size)}")
    # Advice plans anew with samples on any rank, which a local plan may not do.
    # Other settings would be planned without what samples share.
    if step.scope == "global" and advice_seconds > 0 and not step.trees:
        lines.append(f"would help: {_advice(step, lengths, advice_seconds)}")
    return "\n  ".join(lines)


def _count(step: StepPlan, problem: Problem, ranks: Ranks) -> str:
    if not step.num_samples:
        reason = "no samples: one micro-batch per rank is the least a schedule runs"
        needed = 1
    elif step.context_parallel is not None:
        needed = -(-problem.fewest_rows // problem.num_ranks)
        reason = (
            f"under a cap of {step.config.max_tokens_per_gpu} tokens per rank samples take "
            f"{counted(problem.fewest_rows, 'micro-batch')} at least, a shared one counted for "
            f"each of its ranks, {needed} per rank"
        )
    elif step.scope == "global":
        num_bins, bound = len(pack_local(problem)), micro_batch_lower_bound(problem)
        needed = -(-num_bins // step.dims.data_parallel)
        reason = (
            f"packing under the cap of {step.config.cap_tokens(step.dims)} tokens takes "
            f"{counted(num_bins, 'micro-batch')} (no packing takes fewer than {bound}), "
            f"{needed} per rank"
        )
    else:
        shards = [problem.subset(sorted(i for samples in rank for i in samples)) for rank in ranks]
        counts = [len(pack_local(shard)) for shard in shards]
        needed = max(1, *counts)
        rank = counts.index(max(counts))
        reason = (
            f"rank {rank} packs its own {counted(shards[rank].num_samples, 'sample')} into "
            f"{counts[rank]} micro-batches (no packing takes fewer than "
            f"{micro_batch_lower_bound(shards[rank])}), the most of all ranks; the one with the "
            f"fewest packs {min(counts)}"
        )
    # `needed` is what packing takes; the schedule and the search may have made it more.
    legal = step.dims.round_up_num_microbatches(needed)
    if legal > needed:
        reason += (
            f"; the interleaved schedule with groups of {step.dims.group_size} over "
            f"{step.dims.pipeline_parallel} stages makes it {legal}"
        )
    if step.num_microbatches > legal and step.config.searches:
        reason += f"; {step.num_microbatches} end the step sooner, less full"
    elif step.num_microbatches != legal:
        reason += f"; this plan has {step.num_microbatches}"
    return reason


def _bottleneck(
    step: StepPlan, problem: Problem, ranks: Ranks, statistics: StepStatistics
) -> Iterator[str]:
    costs = micro_batch_costs(step, problem, ranks)
    rank_costs = [sum(rank) for rank in costs]
    slowest = max(rank_costs)
    yield (
        f"slowest rank: {rank_costs.index(slowest)}, with {statistics.rank_balance:.3f} x "
        f"the mean work; over slots the costliest micro-batches add up to "
        f"{statistics.slot_balance:.3f} x the mean"
    )
    places = ((rank, slot) for rank, of_rank in enumerate(costs) for slot in range(len(of_rank)))
    # `max` keeps the first of equals.
    rank, slot = max(places, key=lambda place: costs[place[0]][place[1]])
    samples = counted(len(ranks[rank][slot]), "sample")
    yield (
        f"costliest micro-batch: rank {rank} slot {slot}, {samples}, "
        f"{costs[rank][slot] / (slowest or 1.0):.1%} of the slowest rank's work"
    )
    longest = _longest_sample(problem)
    owner = next(n for n, rank in enumerate(ranks) if any(longest in samples for samples in rank))
    yield (
        f"longest sample: {step.sample_indices[longest]}, {problem.lengths[longest]} tokens, on "
        f"rank {owner}"
    )


def what_holds_back(step: StepPlan, lengths: Sequence[int]) -> str:
    """The one thing that keeps a valid plan of one sample or more from ending sooner."""
    dims = step.dims
    problem, _ = step_problem(step, lengths)
    statistics = step_statistics(step, lengths)
    end = statistics.step_time
    if not end:
        return "nothing: by its cost model the step takes no time"
    # From the cause that no plan can mend to those that a larger batch or cap would.
    longest = _longest_sample(problem)
    sample = step.sample_indices[longest]
    size = next(row.size for row in step.rows() if sample in row.samples)
    passes = problem.schedule.cost_of_passes * dims.pipeline_parallel
    alone = passes * problem.on_ranks[size].cost([longest])
    if alone >= _ALMOST_THE_STEP * end:
        back = "" if step.forward_only else " and back"
        return (
            f"sample {sample} ({problem.lengths[longest]} tokens): its own "
            f"way through {_stages(step)}{back} takes {alone / end:.0%} of the step"
        )
    if uneven := _uneven_ranks(step, lengths, statistics):
        return uneven
    rows, most = step.num_microbatches * problem.num_ranks, step.config.max_samples_per_row
    if most is not None and step.num_samples > _ALMOST_FULL * rows * most:
        return f"the most samples that may share a micro-batch, {most}: almost all hold as many"
    smallest = problem.on_ranks[problem.row_sizes[0]]  # under dynamic CP: rows on one rank
    slots = step.num_microbatches * smallest.dims.data_parallel
    model, starts = smallest.cost_model, slots * smallest.cost_model.per_micro_batch
    is_full = sum(smallest.tokens) > _ALMOST_FULL * slots * smallest.capacity
    if is_full and starts > _COSTLY_STARTS * (starts + sum(smallest.costs)) and model.sample(1):
        cap, start = step.config.cap_tokens(smallest.dims), model.per_micro_batch / model.sample(1)
        return (
            f"the cap of {cap} tokens: micro-batches are full, and "
            f"starting each of them costs as much as {start:.0f} tokens"
        )
    # From here on nothing is uneven and nothing is full.
    if dims.pipeline_parallel == 1:
        return "the work itself: ranks are even and there is no pipeline to fill"
    samples_per_rank = step.num_samples / problem.num_ranks
    if samples_per_rank < _FEW_SAMPLES_PER_STAGE * dims.pipeline_parallel:
        few = f"{samples_per_rank:.0f} per rank for {_stages(step)}"
        return f"too few samples for this pipeline: {few}"
    return f"filling and draining {_stages(step)} with {step.num_microbatches} micro-batches"


def _uneven_ranks(step: StepPlan, lengths: Sequence[int], statistics: StepStatistics) -> str | None:
    """The straggler, or with expert parallelism the slots that wait for one."""
    if step.dims.in_lockstep:
        # No rank is late by itself here: each slot ends with its slowest micro-batch.
        balance = statistics.slot_balance
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


def _longest_sample(problem: Problem) -> int:
    """The first of the longest samples."""
    return max(range(problem.num_samples), key=problem.lengths.__getitem__)


def _stages(step: StepPlan) -> str:
    number = step.dims.pipeline_parallel
    return f"{number} stages" if number > 1 else "the one stage"


def _advice(step: StepPlan, lengths: Sequence[int], seconds: float) -> str:
    found, untried = suggestions(step, lengths, seconds)
    helps = [f"{changes_text(changes)} ({gain:.2f} x as fast)" for changes, gain in found]
    if untried:
        names = ", ".join(map(changes_text, untried))
        helps.append(f"not tried, as it would take longer than planning did: {names}")
    none = "none of the other caps, context-parallel sizes and numbers of stages that were tried"
    return _NEXT_LINE.join(helps) or none


def changes_text(changes: Changes) -> str:
    """The changes as errors name arguments."""
    return " and ".join(named(name, value) for name, value in changes)


def suggestions(
    step: StepPlan, lengths: Sequence[int], seconds: float = math.inf
) -> tuple[list[tuple[Changes, float]], list[Changes]]:
    """Changes that let the step of a plan for all ranks end sooner, and times as fast as now, the
    largest gain first; then the changes that `seconds` of processor time leave no time to try.

    Each is planned with little effort: with more, a job gains as much or more.
    """
    started = time.process_time()
    own = [lengths[sample] for sample in step.sample_indices]
    now = predicted_step_time(step, lengths)
    found, untried = [], []
    spent = longest = time.process_time() - started
    for changes, dims, config, model in alternatives(step):
        if spent + _LONGER * longest > seconds:
            untried.append(changes)
            continue
        started = time.process_time()
        quick = replace(config, plan_effort=min(config.plan_effort, COMPARED_PLAN_EFFORT))
        # A sample may not fit.
        with contextlib.suppress(PlanningError):
            plan = plan_step(own, dims, quick, model, forward_only=step.forward_only)
            then = predicted_step_time(plan, own)
            if then and now >= LEAST_GAIN * then:
                found.append((changes, now / then))
        taken = time.process_time() - started
        spent, longest = spent + taken, max(longest, taken)
    return sorted(found, key=lambda each: -each[1]), untried


def alternatives(step: StepPlan) -> Iterator[Setup]:
    """Other caps and parallel dims for a plan's GPUs, those that are planned soonest first."""
    dims, config, model = step.dims, step.config, step.cost_model
    cap, ranks = config.max_tokens_per_gpu, dims.data_parallel
    stages, size = dims.pipeline_parallel, dims.context_parallel

    def capped(tokens: int) -> Setup:
        changes = (("max_tokens_per_gpu", tokens),)
        return changes, dims, replace(config, max_tokens_per_gpu=tokens), model

    def moved(share: float, **sizes: int) -> Iterator[Setup]:
        """Sizes changed so that a rank has this share of a token's work and memory."""
        changes = tuple(sizes.items())
        fixed, others = 1.0, dict[str, Any](sizes)
        if "pipeline_parallel" in sizes:
            # Stages hold other layers: a micro-batch's fixed part is theirs, and chunks are gone.
            fixed, others = share, others | {"virtual_pipeline": 1, "microbatch_group_size": None}
        costs = replace(
            model,
            linear=share * model.linear,
            quadratic=share * model.quadratic,
            per_micro_batch=fixed * model.per_micro_batch,
        )
        # More stages than any model has, or ranks over which the experts cannot be spread.
        with contextlib.suppress(ParallelDimsError):
            yield changes, replace(dims, **others), config, costs

    yield capped(2 * cap)
    if ranks % 2 == 0 and config.max_context_parallel is None:
        yield from moved(0.5, context_parallel=2 * size, data_parallel=ranks // 2)
    if stages % 2 == 0:
        yield from moved(2.0, pipeline_parallel=stages // 2, data_parallel=2 * ranks)
    if cap > 1:
        yield capped(cap // 2)
    if ranks % 2 == 0:
        yield from moved(0.5, pipeline_parallel=2 * stages, data_parallel=ranks // 2)
