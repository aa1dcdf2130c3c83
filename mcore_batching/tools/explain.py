"""A step's plan in words: where the micro-batch count comes from, what holds the step up, what
would help.

Every sentence is computed from the plan and its lengths, so a plan read from a file is explained
like one made a moment ago.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mcore_batching.planning import (
    CostModel,
    ParallelDims,
    ParallelDimsError,
    PlannerConfig,
    PlanningError,
    Problem,
    StepPlan,
    StepStatistics,
    WeighedStep,
    micro_batch_lower_bound,
    pack_local,
    plan_step,
    predicted_step_time,
    step_statistics,
    validate_plan,
)
from mcore_batching.planning.errors import named, shortened
from mcore_batching.planning.forest import PrefixTree
from mcore_batching.planning.plans.plan import counted, rank_noun
from mcore_batching.tools.report import FLOOR

# The arguments to change, as errors name them, and what to plan with.
Setup = tuple[str, ParallelDims, PlannerConfig, CostModel]

# Share from which on something counts as what holds a step back: a sample's way of the step, the
# mean rank of the slowest, rows of their limit. It chooses among sentences, no plan depends on it.
_ALMOST = 0.95

# Of a plan that is only compared, at most. Steps of 512 samples on DP8 x PP4 end 1.5 % later than
# by the default, which takes 8 times as long; with 20, which takes a third, 12 % later.
COMPARED_PLAN_EFFORT = 100

_NEXT_LINE = "\n" + " " * len("  would help: ")


def explain(step: StepPlan, lengths: Sequence[int], *, advice_seconds: float = math.inf) -> str:
    """One step's plan in words.

    Args:
        step: what to explain.
        lengths: total length of each sample of the whole batch [samples], in tokens.
        advice_seconds: most processor time to look for caps and parallel sizes that would end the
            step sooner: the time that its plan took, say; 0 to leave them out.

    Raises:
        InvariantError: the plan is broken.
    """
    lengths = list(lengths)
    validate_plan(step, lengths)
    statistics, weighed = step_statistics(step, lengths), WeighedStep.of(step, lengths)
    problem, ranks = weighed.problem, weighed.ranks
    lines = [
        f"{counted(step.num_samples, 'sample')} on {counted(len(ranks), rank_noun(step))}: "
        f"{counted(step.num_microbatches, 'micro-batch')} per rank",
        *filter(None, [statistics.sharing]),
        f"count: {_count(step, problem)}",
    ]
    if not step.num_samples:
        return "\n  ".join(lines)
    names = [_name(unit) for unit in step.units(step.sample_indices)]
    longest = max(range(problem.num_samples), key=problem.lengths.__getitem__)  # the first of them
    name = f"{names[longest]} ({problem.lengths[longest]} tokens)"
    rank = next(n for n, slots in enumerate(ranks) if any(longest in row for row in slots))
    lines.append(f"longest: {name}, on rank {rank}")
    if problem.oversize:
        largest = max(problem.on_ranks[size].capacity for size in problem.row_sizes)
        lines.append(
            f"oversize, each alone in its micro-batch: {len(problem.oversize)} over {largest} "
            f"tokens: {shortened([names[each] for each in sorted(problem.oversize)])}"
        )
    lines += [
        f"predicted end of {'the forward passes' if step.forward_only else 'the step'}: "
        f"{statistics.step_time:.0f} token units, {statistics.time_over_floor:.3f} x the floor "
        f"({FLOOR}; no plan ends sooner); the first stage holds "
        f"{statistics.peak_inflight_tokens:.0f} tokens at most",
        f"held back by: {_what_holds_back(weighed, statistics, longest, name)}",
    ]
    if step.context_parallel is not None:
        sizes = [row.size for row in step.rows()]
        of_size = [f"{sizes.count(size)} of size {size}" for size in sorted(set(sizes))]
        lines.append(f"micro-batches by context-parallel size: {', '.join(of_size)}")
    # Advice plans anew with samples on any rank, which a local plan may not do, and without what
    # samples share.
    if step.scope == "global" and advice_seconds > 0 and not step.trees:
        found, untried = suggestions(step, lengths, advice_seconds)
        helps = [f"{changes} ({gain:.2f} x as fast)" for changes, gain in found]
        if untried:
            left = ", ".join(untried)
            helps.append(f"not tried, as it would take longer than planning did: {left}")
        none = (
            "none of the other caps, context-parallel sizes and numbers of stages that were tried"
        )
        lines.append(f"would help: {_NEXT_LINE.join(helps) or none}")
    return "\n  ".join(lines)


def _name(unit: int | PrefixTree) -> str:
    """The name of a unit of the plan: a sample, or samples that share tokens."""
    if isinstance(unit, int):
        return f"sample {unit}"
    return f"the tree of samples {shortened(unit.samples)}"


def _count(step: StepPlan, problem: Problem) -> str:
    """Micro-batches that packing takes, and what the schedule and the search make of them."""
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
    else:
        num_bins, bound = len(pack_local(problem)), micro_batch_lower_bound(problem)
        needed = -(-num_bins // step.dims.data_parallel)
        reason = (
            f"packing under the cap of {step.config.cap_tokens(step.dims)} tokens takes "
            f"{counted(num_bins, 'micro-batch')} (no packing takes fewer than {bound}), "
            f"{needed} per rank"
        )
    legal = step.dims.round_up_num_microbatches(needed)
    if legal > needed:
        reason += (
            f"; the interleaved schedule with groups of {step.dims.group_size} over "
            f"{step.dims.pipeline_parallel} stages makes it {legal}"
        )
    if step.num_microbatches > legal and step.scope == "local":
        reason += f"; samples that stay on their rank take {step.num_microbatches}"
    elif step.num_microbatches > legal and step.config.searches:
        reason += f"; {step.num_microbatches} end the step sooner, less full"
    elif step.num_microbatches != legal:
        reason += f"; this plan has {step.num_microbatches}"
    return reason


def _what_holds_back(
    weighed: WeighedStep, statistics: StepStatistics, longest: int, name: str
) -> str:
    """The one thing that keeps a step from ending sooner: from what no plan can mend, as its
    longest sample by its `name`, to what a larger batch or cap would."""
    step, problem = weighed.step, weighed.problem
    dims, end = step.dims, statistics.step_time
    if not end:
        return "nothing: by its cost model the step takes no time"
    stages = counted(dims.pipeline_parallel, "stage")
    place = next(row for row in step.rows() if longest in weighed.ranks[row.rank][row.slot])
    passes = problem.schedule.cost_of_passes * dims.pipeline_parallel
    alone = passes * problem.on_ranks[place.size].cost([longest])
    if alone >= _ALMOST * end:
        back = "" if step.forward_only else " and back"
        return f"{name}: its own way through {stages}{back} takes {alone / end:.0%} of the step"
    if dims.in_lockstep:
        # No rank is late by itself here: each slot ends with its slowest micro-batch.
        if statistics.slot_balance * _ALMOST > 1:
            return (
                "slots with micro-batches that differ over ranks: with expert parallelism each "
                f"waits for its slowest, which adds up to {statistics.slot_balance:.2f} x the mean"
            )
    else:
        ends = [each for clock in weighed.clocks for each in clock.ends]
        late = max(ends) * len(ends) / sum(ends)
        if late * _ALMOST > 1:
            rank = ends.index(max(ends))
            return f"rank {rank}: it ends {late:.2f} x as late as the mean rank"
    rows, most = step.num_microbatches * problem.num_ranks, step.config.max_samples_per_row
    if most is not None and problem.num_samples >= _ALMOST * rows * most:
        return f"the most samples that may share a micro-batch, {most}: almost all hold as many"
    smallest = problem.on_ranks[problem.row_sizes[0]]  # under dynamic CP: rows on one rank
    slots = step.num_microbatches * smallest.dims.data_parallel
    starts = slots * smallest.cost_model.per_micro_batch
    is_full = sum(smallest.tokens) >= _ALMOST * slots * smallest.capacity
    if is_full and sum(smallest.costs) < _ALMOST * (starts + sum(smallest.costs)):
        return (
            f"the cap of {step.config.cap_tokens(smallest.dims)} tokens: micro-batches are full, "
            f"and starting them is {starts / (starts + sum(smallest.costs)):.0%} of the work"
        )
    # From here on nothing is uneven and nothing is full.
    if dims.pipeline_parallel == 1:
        return "the work itself: ranks are even and there is no pipeline to fill"
    per_rank = problem.num_samples / problem.num_ranks
    return (
        f"filling and draining {stages} with {step.num_microbatches} micro-batches of "
        f"{per_rank:.0f} samples per rank"
    )


def suggestions(
    step: StepPlan, lengths: Sequence[int], seconds: float = math.inf
) -> tuple[list[tuple[str, float]], list[str]]:
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
        # A try takes at most twice as long as the longest before it: twice the stages, or half the
        # cap, are twice the passes. The first is compared with the time to predict the step.
        if spent + 2 * longest > seconds:
            untried.append(changes)
            continue
        started = time.process_time()
        quick = replace(config, plan_effort=min(config.plan_effort, COMPARED_PLAN_EFFORT))
        # A sample may not fit.
        with contextlib.suppress(PlanningError):
            plan = plan_step(own, dims, quick, model, forward_only=step.forward_only)
            then = predicted_step_time(plan, own)
            if then and now >= 1.01 * then:  # less is not worth changing a job's dims for
                found.append((changes, now / then))
        taken = time.process_time() - started
        spent, longest = spent + taken, max(longest, taken)
    return sorted(found, key=lambda each: -each[1]), untried


def alternatives(step: StepPlan) -> list[Setup]:
    """Other caps and parallel dims for a plan's GPUs, those that are planned soonest first."""
    cap, ranks = step.config.max_tokens_per_gpu, step.dims.data_parallel
    stages, size = step.dims.pipeline_parallel, step.dims.context_parallel
    # With each the share of a token's work that a rank then has, and of a micro-batch's fixed part,
    # which is its stage's.
    tries: list[tuple[dict[str, int], float, float]] = [({"max_tokens_per_gpu": 2 * cap}, 1, 1)]
    if ranks % 2 == 0 and step.config.max_context_parallel is None:
        tries.append(({"context_parallel": 2 * size, "data_parallel": ranks // 2}, 0.5, 1))
    if stages % 2 == 0:
        tries.append(({"pipeline_parallel": stages // 2, "data_parallel": 2 * ranks}, 2, 2))
    if cap > 1:
        tries.append(({"max_tokens_per_gpu": cap // 2}, 1, 1))
    if ranks % 2 == 0:
        tries.append(({"pipeline_parallel": 2 * stages, "data_parallel": ranks // 2}, 0.5, 0.5))
    setups: list[Setup] = []
    for changes, share, fixed in tries:
        config = replace(step.config, max_tokens_per_gpu=changes.get("max_tokens_per_gpu", cap))
        sizes: dict[str, Any] = {n: v for n, v in changes.items() if n != "max_tokens_per_gpu"}
        if "pipeline_parallel" in changes:  # stages hold other layers, and chunks are gone
            sizes |= {"virtual_pipeline": 1, "microbatch_group_size": None}
        model = step.cost_model
        costs = replace(
            model,
            linear=share * model.linear,
            quadratic=share * model.quadratic,
            per_micro_batch=fixed * model.per_micro_batch,
        )
        # More stages than any model has, or ranks over which the experts cannot be spread.
        with contextlib.suppress(ParallelDimsError):
            text = " and ".join(named(*change) for change in changes.items())
            setups.append((text, replace(step.dims, **sizes), config, costs))
    return setups
