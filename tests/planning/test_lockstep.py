"""Steps in which every slot waits for its slowest rank."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from planning_cases import Case, cases, examples, log_normal

from mcore_batching.planning import (
    CostModel,
    ParallelDims,
    PlannerConfig,
    Problem,
    StepPlan,
    plan_step,
    step_statistics,
)
from mcore_batching.planning.clock import Clock
from mcore_batching.planning.packing.bounds import step_time_floor
from mcore_batching.planning.plans.statistics import predicted_step_time
from mcore_batching.planning.schedule import Schedule
from mcore_batching.planning.search import Objective

CONFIG = PlannerConfig(max_tokens_per_gpu=16384)
MODEL = CostModel()


def lengths_of(seed: int, count: int = 512) -> list[int]:
    return log_normal(count, seed, median=6000, sigma=1, cap=16384)


def slot_costs(step: StepPlan, lengths: list[int]) -> list[list[float]]:
    """Cost of every rank's micro-batch in each slot [slots][ranks]."""
    ranks = [
        [MODEL.micro_batch([lengths[i] for i in samples]) for samples in rank]
        for rank in step.micro_batches
    ]
    return [list(slot) for slot in zip(*ranks, strict=True)]


@pytest.mark.parametrize("seed", range(3))
def test_32_ranks_in_lockstep_are_even_and_lose_at_most_4_percent(seed: int) -> None:
    """Sum over slots of the slowest rank over the mean rank; evenly packed ones lose 6 to 10."""
    lengths = lengths_of(seed)
    step = plan_step(lengths, ParallelDims(data_parallel=32, expert_parallel=8), CONFIG)
    slots = slot_costs(step, lengths)
    lost = sum(map(max, slots)) / (sum(map(sum, slots)) / 32)
    assert lost <= 1.04
    statistics = step_statistics(step, lengths)
    assert lost == pytest.approx(statistics.slot_balance, rel=1e-12)
    assert statistics.rank_balance < 1.02


@pytest.mark.parametrize(
    ("num_samples", "sigma", "most"), [(64, 0.6, 1.4), (128, 1.0, 1.175), (256, 0.6, 1.125)]
)
def test_pipelines_in_lockstep_end_near_their_bound(
    num_samples: int, sigma: float, most: float
) -> None:
    """Over a bound that no plan reaches; with the shapes of ranks that run by themselves steps end
    1.4 % later."""
    generator = random.Random(5)
    lengths = [
        min(8192, round(1500 * generator.lognormvariate(0, sigma)) + 1) for _ in range(num_samples)
    ]
    dims = ParallelDims(data_parallel=4, pipeline_parallel=4, expert_parallel=4)
    config = PlannerConfig(max_tokens_per_gpu=8192)
    end = predicted_step_time(plan_step(lengths, dims, config), lengths)
    assert end <= most * step_time_floor(Problem.of(lengths, dims, config))


@examples(60)
@given(cases(fill=("split",)))
def test_lockstep_time_is_that_of_the_slowest_rank_of_every_slot(case: Case) -> None:
    dims = replace(case.dims, expert_parallel=2, data_parallel=2 * case.dims.data_parallel)
    step = plan_step(case.lengths, dims, case.config)
    objective = Objective(Problem.of(case.lengths, dims, case.config, MODEL))
    slowest = [max(slot) for slot in slot_costs(step, case.lengths)]
    expected = Clock(slowest, Schedule(dims=dims)).end
    assert objective.step(step.micro_batches).end == pytest.approx(expected, rel=1e-9)
    assert predicted_step_time(step, case.lengths) == pytest.approx(expected, rel=1e-9)
