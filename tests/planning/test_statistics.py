"""Statistics of a step, by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from mcore_batching.planning import (
    CostModel,
    ParallelDims,
    PlannerConfig,
    StepPlan,
    plan_batch,
    plan_step,
    step_statistics,
)
from mcore_batching.planning.clock import Clock
from mcore_batching.planning.plans.statistics import (
    WeighedStep,
)
from mcore_batching.tools.explain import explain

PROPORTIONAL = CostModel(quadratic=0, per_micro_batch=0)


def test_by_hand() -> None:
    lengths = [6, 3, 9, 22]
    step = StepPlan(
        micro_batches=(((3,), (), (0, 1)), ((2,), (), ())),
        num_microbatches=3,
        sample_indices=(0, 1, 2, 3),
        dims=ParallelDims(data_parallel=2),
        config=PlannerConfig(max_tokens_per_gpu=16, pad_each_to=4, fill="placeholder"),
        cost_model=PROPORTIONAL,
    )
    statistics = step_statistics(step, lengths)
    assert statistics.num_samples == 4
    assert statistics.num_microbatches == 3
    assert statistics.num_placeholders == 3
    assert statistics.num_oversize == 1
    assert statistics.real_tokens == 40
    assert statistics.padded_tokens == 24 + 8 + 4 + 12
    assert statistics.offered_tokens == 6 * 16
    assert statistics.fill == 40 / 96
    assert statistics.padding == 8 / 48
    assert statistics.heaviest_rank_cost == 31
    assert statistics.mean_rank_cost == 20
    assert statistics.rank_balance == 31 / 20
    assert statistics.slot_maxima_cost == 22 + 0 + 9
    assert statistics.slot_balance == 31 / 20
    # Of the fuller rank; one stage is the first and the last.
    assert statistics.peak_inflight_tokens == statistics.last_stage_inflight_tokens == 24
    doubled = statistics + statistics
    assert (doubled.num_samples, doubled.real_tokens, doubled.fill) == (8, 80, 40 / 96)
    assert step_statistics(step, lengths, CostModel(quadratic=0)).mean_rank_cost == 20 + 3 * 256


def test_a_step_without_samples_has_all_ratios() -> None:
    step = plan_step(
        [], ParallelDims(data_parallel=2), PlannerConfig(max_tokens_per_gpu=8), PROPORTIONAL
    )
    statistics = step_statistics(step, [])
    assert (statistics.fill, statistics.padding) == (0, 0)
    assert (statistics.rank_balance, statistics.slot_balance) == (1, 1)
    assert statistics.num_placeholders == 2


def test_lengths_may_be_whatever_gives_them_once() -> None:
    lengths, groups = [5, 9, 3, 7], ["a", "a", "b", "c"]
    dims, config = ParallelDims(data_parallel=2), PlannerConfig(max_tokens_per_gpu=16)
    step = plan_step(lengths, dims, config)
    assert plan_step(iter(lengths), dims, config) == step
    assert step_statistics(step, iter(lengths)) == step_statistics(step, lengths)
    assert explain(step, map(int, lengths)) == explain(step, lengths)
    by_group = plan_batch(iter(lengths), dims, config, groups=iter(groups), groups_per_step=1)
    assert [plan.sample_indices for plan in by_group.steps] == [(0, 1), (2,), (3,)]
    assert len(plan_batch([], dims, config, groups=[], groups_per_step=1).steps) == 1


def test_ranks_without_samples_take_no_time_to_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are simulated once together, not each by itself, several times over."""
    simulated = []

    simulate = Clock._simulate

    def counting(clock: Clock, costs: Sequence[float], first: int) -> None:
        simulated.append(clock)
        simulate(clock, costs, first)

    monkeypatch.setattr(Clock, "_simulate", counting)
    few, many = (ParallelDims(data_parallel=ranks, pipeline_parallel=2) for ranks in (3, 4096))
    config, lengths = PlannerConfig(max_tokens_per_gpu=100), [50, 7, 90]
    placed = plan_step(lengths, few, config).micro_batches
    alone = len(simulated)
    step = plan_step(lengths, many, config)
    assert step.micro_batches == placed + (((),),) * 4093
    assert step_statistics(step, lengths).num_placeholders == 4093
    assert len(simulated) <= 2 * alone + 4


def test_statistics_count_a_shared_row_once() -> None:
    lengths, dims = (
        [*range(1, 1800, 45), 20_000],
        ParallelDims(data_parallel=4, pipeline_parallel=2),
    )
    config = PlannerConfig(max_tokens_per_gpu=20_000, max_context_parallel=4, plan_effort=30)
    step = plan_step(lengths, dims, config)
    found = step_statistics(step, lengths)
    assert found.real_tokens == sum(lengths)
    rows = [row for row in step.rows() if row.samples]
    assert max(row.size for row in rows) == 4
    problem = WeighedStep.of(step, lengths).problem
    assert found.padded_tokens == sum(
        sum(problem.on_ranks[row.size].tokens[i] for i in row.samples) for row in rows
    )
    assert found.offered_tokens == 4 * step.num_microbatches * 20_000
    assert found.num_placeholders == sum(not row.samples for row in step.rows())
    assert found.largest_row_tokens < 20_000
    assert found.time_over_floor >= 1.0
    said = explain(step, lengths, advice_seconds=0)
    assert "41 samples on 4 ranks: " in said
    shared = sum(row.size == 4 for row in rows)
    assert f"{shared} of size 4" in said.split("micro-batches by context-parallel size: ")[1]
