"""The simulated passes of a step on every rank."""

from __future__ import annotations

import pytest
from hypothesis import given
from planning_cases import Case, cases, examples, planned

from mcore_batching.planning import (
    CostModel,
    ParallelDims,
    PlannerConfig,
    WeighedStep,
    plan_step,
    step_statistics,
)
from mcore_batching.planning.clock import Clock
from mcore_batching.planning.schedule import Schedule
from mcore_batching.tools.picture import step_timeline

# A sample of n tokens costs n, a micro-batch nothing, a backward pass two forward ones.
PLAIN_COSTS = CostModel(linear=1, quadratic=0, per_micro_batch=0)
CONFIG = PlannerConfig(max_tokens_per_gpu=100, balance="none")


@given(case=cases(dynamic=True))
@examples(100)
def test_the_last_pass_ends_at_the_predicted_step_time(case: Case) -> None:
    """And ranks that share a row begin it together."""
    step = planned(case)
    timeline = step_timeline(step, case.lengths)
    predicted = step_statistics(step, case.lengths).step_time
    assert timeline.end == pytest.approx(predicted, rel=1e-12)
    assert timeline.end == max(rank.end for rank in timeline.ranks)
    dims, ranks = case.dims, WeighedStep.of(step, case.lengths).ranks
    for rank, slots in zip(timeline.ranks, ranks, strict=True):
        chunks = dims.pipeline_parallel * dims.virtual_pipeline
        assert len(rank.passes) == 2 * step.num_microbatches * chunks
        assert 0 <= rank.busy <= 1 + 1e-12
        if step.context_parallel is None and not dims.in_lockstep:
            costs = [step.cost_model.micro_batch([case.lengths[i] for i in row]) for row in slots]
            assert list(rank.passes) == Clock(costs, Schedule(dims=dims)).operations()
    for row in step.rows() if step.context_parallel is not None else ():
        together = timeline.ranks[row.rank : row.rank + row.size]
        starts = {tuple(p.start for p in rank.passes if p.slot == row.slot) for rank in together}
        assert len(starts) == 1
    assert 0 <= timeline.busy <= 1 + 1e-12


def test_with_expert_parallelism_ranks_wait_within_the_slot() -> None:
    lengths = [80, 20]
    dims = ParallelDims(data_parallel=2, pipeline_parallel=2, expert_parallel=2)
    step = plan_step(lengths, dims, CONFIG, PLAIN_COSTS)
    timeline = step_timeline(step, lengths)
    slow, fast = sorted(timeline.ranks, key=lambda rank: -rank.busy)
    assert [(p.start, p.end) for p in slow.passes] == [(0, 80), (320, 480), (80, 160), (160, 320)]
    assert [(p.start, p.end) for p in fast.passes] == [(0, 20), (320, 360), (80, 100), (160, 200)]
    assert (timeline.end, slow.busy, fast.busy) == (480, 0.5, 0.125)
    assert timeline.busy == 0.3125


def test_extremes_are_by_end() -> None:
    lengths = [50, 90, 10, 70]
    step = plan_step(lengths, ParallelDims(data_parallel=4), CONFIG, PLAIN_COSTS)
    ends = {rank.rank: rank.end for rank in step_timeline(step, lengths).ranks}
    assert sorted(ends.values()) == [30, 150, 210, 270]
    found = step_timeline(step, lengths).extremes()
    assert {name: rank.end for name, rank in found.items()} == {
        "slowest": 270,
        "median": 150,
        "fastest": 30,
    }


def test_a_step_that_costs_nothing_has_a_time_line() -> None:
    free = CostModel(linear=0, quadratic=0, per_micro_batch=0)
    timeline = step_timeline(plan_step([5], ParallelDims(), CONFIG, free), [5])
    assert (timeline.end, timeline.busy) == (0, 0)
