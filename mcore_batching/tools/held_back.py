"""The one thing that keeps a step from ending sooner, in words."""

from __future__ import annotations

from collections.abc import Sequence

from mcore_batching.planning import Problem, StepPlan, StepStatistics, step_problem, step_statistics
from mcore_batching.tools.pictures.timeline import step_timeline

# Shares from which on something counts as what holds a step back. They choose among sentences, no
# plan depends on them; other values name another cause first where two are about as strong.
_ALMOST_THE_STEP = 0.95  # one sample's way through all stages, of the step
_UNEVEN = 1.05  # the slowest rank over the mean
_ALMOST_FULL = 0.9  # tokens over the cap, or samples over the most per row
_COSTLY_STARTS = 0.05  # fixed costs of micro-batches, of all work
_FEW_SAMPLES_PER_STAGE = 8  # samples of a rank per pipeline stage


def what_holds_back(step: StepPlan, lengths: Sequence[int]) -> str:
    """The one thing that keeps a valid plan of one sample or more from ending sooner."""
    dims = step.dims
    problem, _ = step_problem(step, lengths)
    statistics = step_statistics(step, lengths)
    end = statistics.step_time
    if not end:
        return "nothing: by its cost model the step takes no time"
    # From the cause that no plan can mend to those that a larger batch or cap would.
    longest = longest_sample(problem)
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
    smallest = next(iter(usable_sizes(problem)))  # under dynamic CP: rows on one rank
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


def usable_sizes(problem: Problem) -> list[Problem]:
    """The problem by each context-parallel size that a micro-batch may have, ascending."""
    if problem.config.max_context_parallel is None:
        return [problem]  # `row_sizes` leaves out one whose cap holds no placeholder
    return [problem.on_ranks[size] for size in problem.row_sizes]


def longest_sample(problem: Problem) -> int:
    """The first of the longest samples."""
    return max(range(problem.num_samples), key=problem.lengths.__getitem__)


def _stages(step: StepPlan) -> str:
    number = step.dims.pipeline_parallel
    return f"{number} stages" if number > 1 else "the one stage"
