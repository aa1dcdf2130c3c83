"""Statistics of a step, by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from planning_cases import plan_locally

from mcore_batching.planning import (
    CostModel,
    LengthError,
    ParallelDims,
    PlannerConfig,
    StepPlan,
    plan_batch,
    plan_step,
    step_statistics,
)
from mcore_batching.planning.clock import Clock
from mcore_batching.planning.packing.bounds import step_time_floor
from mcore_batching.planning.plans.statistics import predicted_step_time, tokens_in_flight
from mcore_batching.planning.problem import Problem
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


@given(
    shards=st.lists(st.lists(st.integers(0, 40), max_size=8), min_size=2, max_size=4),
    pipeline=st.sampled_from([1, 2]),
    expert=st.sampled_from([1, 2]),
    samples_per_row=st.sampled_from([None, 2]),
    layers=st.sampled_from(["", "aabV"]),
)
@example(shards=[[40, 1], [1]], pipeline=2, expert=1, samples_per_row=None, layers="")
def test_tokens_in_flight_are_those_of_the_fullest_rank(
    shards: list[list[int]],
    pipeline: int,
    expert: int,
    samples_per_row: int | None,
    layers: str,
) -> None:
    ranks = len(shards) // 2 * 2
    shards = shards[:ranks]
    dims = ParallelDims(data_parallel=ranks, pipeline_parallel=pipeline, expert_parallel=expert)
    config = PlannerConfig(
        max_tokens_per_gpu=32,
        pad_each_to=2,
        max_samples_per_row=samples_per_row,
    )
    lengths = [length for shard in shards for length in shard]
    owners = [rank for rank, shard in enumerate(shards) for _ in shard]
    costs = (("a", 1.0, 0.1, 0.1, 1.0), ("b", 3.0, 0.0, 0.0, 1.0), ("V", 4.0, 0.0, 0.0, 2.0))
    model = CostModel(per_micro_batch=2.0, layers=layers, layer_costs=costs)
    step = plan_locally(lengths, dims, config, owners, model)
    in_flight = []
    for rank, shard in enumerate(shards):
        problem = Problem.of(shard, dims, config, model)
        first = owners.index(rank) if shard else 0
        rows = [[i - first for i in row] for row in step.micro_batches[rank]]
        ends = (0, pipeline - 1)
        held = [problem.held_tokens(row, 1) for row in rows]
        in_flight.append([tokens_in_flight(held, problem.schedule, stage) for stage in ends])
    whole = step_statistics(step, lengths)
    most = [max(of_stage) for of_stage in zip(*in_flight, strict=True)]
    assert [whole.peak_inflight_tokens, whole.last_stage_inflight_tokens] == most


def test_lengths_may_be_whatever_gives_them_once() -> None:
    lengths, groups = [5, 9, 3, 7], ["a", "a", "b", "b"]
    dims, config = ParallelDims(data_parallel=2), PlannerConfig(max_tokens_per_gpu=16)
    step = plan_step(lengths, dims, config)
    assert plan_step(iter(lengths), dims, config) == step
    assert step_statistics(step, iter(lengths)) == step_statistics(step, lengths)
    assert explain(step, map(int, lengths)) == explain(step, lengths)
    by_group = plan_batch(iter(lengths), dims, config, groups=iter(groups), groups_per_step=1)
    assert [plan.sample_indices for plan in by_group.steps] == [(0, 1), (2, 3)]


def test_too_few_lengths_are_refused() -> None:
    dims, config = ParallelDims(data_parallel=2), PlannerConfig(max_tokens_per_gpu=16)
    step = plan_batch([5, 9, 3, 7], dims, config, samples_per_step=2).steps[1]
    for reads in (step_statistics, predicted_step_time):
        with pytest.raises(LengthError, match="lengths has 2 entries, but the step runs sample 3"):
            reads(step, [3, 7])


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


@pytest.mark.parametrize("dims", [ParallelDims(), ParallelDims(data_parallel=4)])
def test_full_micro_batches_end_at_the_floor(dims: ParallelDims) -> None:
    config, lengths = PlannerConfig(max_tokens_per_gpu=100), [100] * 8
    end = predicted_step_time(plan_step(lengths, dims, config), lengths)
    assert step_time_floor(Problem.of(lengths, dims, config)) == pytest.approx(end)
