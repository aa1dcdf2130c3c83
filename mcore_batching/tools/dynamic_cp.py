"""Gains of dynamic CP: over one context-parallel size for all, over Megatron's rule, row by row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from mcore_batching.planning import (
    ConfigError,
    CostModel,
    OversizeSampleError,
    ParallelDims,
    PlannerConfig,
    Problem,
    StepPlan,
    plan_step,
    predicted_step_time,
)
from mcore_batching.planning.dynamic_cp import of_one_size
from mcore_batching.tools.rules import RuleFailureError, megatron_dynamic_plan
from mcore_batching.tools.suggestions import EFFORT

PlanFunction = Callable[[Sequence[int], ParallelDims, PlannerConfig, CostModel], StepPlan]

MOST_ROWS = 4
SOONER = 1.005


def one_size(size: int) -> PlanFunction:
    """Plans by one context-parallel size for all, on the same ranks.

    The plan function raises OversizeSampleError where a sample does not fit, ConfigError where
    there are too few ranks.
    """

    def plan(
        lengths: Sequence[int], dims: ParallelDims, config: PlannerConfig, cost_model: CostModel
    ) -> StepPlan:
        strict = replace(config, on_oversize="error", max_context_parallel=None)
        rows_dims = dims.for_rows_on(size)
        model = cost_model.on_ranks(size)
        made = plan_step(lengths, rows_dims, strict, model)
        return of_one_size(made, dims, config, cost_model)

    return plan


def rivals(dims: ParallelDims, config: PlannerConfig) -> Iterator[tuple[str, PlanFunction]]:
    """Names and ways to plan that dynamic CP is held against: every size for all, and Megatron's
    rule."""
    for size in dims.row_sizes(config.max_context_parallel or 1):
        yield f"CP {size} for all", one_size(size)
    yield "Megatron default_dynamic_cp", megatron_dynamic_plan


def gains_line(step: StepPlan, lengths: Sequence[int]) -> str:
    """One line: how many times as soon the step ends as under each of `rivals`.

    Args:
        step: a plan under dynamic CP.
        lengths: total length of each sample of the whole batch [samples], in tokens.
    """
    own = [lengths[sample] for sample in step.sample_indices]
    end = predicted_step_time(step, lengths)
    config = replace(step.config, plan_effort=min(step.config.plan_effort, EFFORT))
    parts = []
    for name, plan in rivals(step.dims, config):
        try:
            made = plan(own, step.dims, config, step.cost_model)
        except (RuleFailureError, OversizeSampleError, ConfigError):
            parts.append(f"{name}: no plan")
            continue
        then = predicted_step_time(made, own, forward_only=step.forward_only)
        parts.append(f"{name}: {then / end if end else 1.0:.2f} x")
    return f"dynamic CP ends the step sooner than {'; '.join(parts)}"


def sizes_line(step: StepPlan) -> str:
    """One line: how many micro-batches have each context-parallel size."""
    sizes = [row.size for row in step.rows()]
    counts = ", ".join(f"{sizes.count(size)} of size {size}" for size in sorted(set(sizes)))
    return f"micro-batches by context-parallel size: {counts}"


def shared_lines(step: StepPlan, lengths: Sequence[int]) -> Iterator[str]:
    """A line for each of the few shared micro-batches without which the step would end latest.

    Args:
        step: a plan under dynamic CP.
        lengths: total length of each sample of the whole batch [samples], in tokens.
    """
    end = predicted_step_time(step, lengths)
    problem = Problem.of(
        [lengths[sample] for sample in step.sample_indices], step.dims, step.config, step.cost_model
    )
    least_of = dict(zip(step.sample_indices, problem.least_sizes, strict=True))
    found = []
    for row in step.rows():
        least = max((least_of[sample] for sample in row.samples), default=1)
        if row.size <= least or len(row.samples) > 1:
            continue
        then = predicted_step_time(_narrowed(step, row.rank, row.slot, least), lengths)
        if then >= SOONER * end:
            (sample,) = row.samples
            found.append((-then, sample, row.size, least))
    for then, sample, size, least in sorted(found)[:MOST_ROWS]:
        yield (
            f"sample {sample} ({lengths[sample]} tokens) on {size} ranks: {-then / end:.2f} x "
            f"sooner than on {least} in the same place"
        )


def _narrowed(step: StepPlan, rank: int, slot: int, size: int) -> StepPlan:
    """The step with a shared micro-batch on the first few of its ranks, placeholders on others."""
    assert step.context_parallel is not None
    rows = [list(slots) for slots in step.micro_batches]
    sizes = [list(of_rank) for of_rank in step.context_parallel]
    for each in range(rank, rank + sizes[rank][slot]):
        sizes[each][slot] = size if each < rank + size else 1
        if each >= rank + size:
            rows[each][slot] = ()
    return replace(
        step, micro_batches=tuple(map(tuple, rows)), context_parallel=tuple(map(tuple, sizes))
    )
