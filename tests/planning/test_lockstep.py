"""Steps in which every slot waits for its slowest rank."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_cases import Case, broken_invariants, cases, examples

from mcore_batching.planning import (
    CostModel,
    ParallelDims,
    PlannerConfig,
    StepPlan,
    plan_step,
    step_statistics,
)
from mcore_batching.planning.pipeline import pipeline_operations
from mcore_batching.planning.search.lockstep_moves import improve_lockstep
from mcore_batching.planning.search.lockstep_search import lockstep_time, search_lockstep
from mcore_batching.planning.statistics import predicted_step_time
from mcore_batching.planning.step_work import step_work

CONFIG = PlannerConfig(max_tokens_per_gpu=16384)
MODEL = CostModel()


def log_normal(seed: int, count: int = 512) -> list[int]:
    generator = random.Random(seed)
    return [max(1, min(16384, int(6000 * generator.lognormvariate(0, 1)))) for _ in range(count)]


def slot_costs(step: StepPlan, lengths: list[int]) -> list[list[float]]:
    """Cost of every rank's micro-batch in each slot [slots][ranks]."""
    ranks = [
        [MODEL.micro_batch([lengths[i] for i in samples]) for samples in rank]
        for rank in step.micro_batches
    ]
    return [list(slot) for slot in zip(*ranks, strict=True)]


@pytest.mark.parametrize("seed", range(8))
def test_32_ranks_in_lockstep_lose_at_most_4_percent(seed: int) -> None:
    """Sum over slots of the slowest rank over the mean rank; evenly packed ones lose 6 to 10."""
    lengths = log_normal(seed)
    step = plan_step(lengths, ParallelDims(data_parallel=32, expert_parallel=8), CONFIG)
    slots = slot_costs(step, lengths)
    lost = sum(map(max, slots)) / (sum(map(sum, slots)) / 32)
    assert lost <= 1.04
    assert lost == pytest.approx(step_statistics(step, lengths).slot_balance, rel=1e-12)


@pytest.mark.parametrize("stages", [1, 4])
@pytest.mark.parametrize("seed", range(3))
def test_ends_sooner_than_evenly_packed_micro_batches(seed: int, stages: int) -> None:
    lengths = log_normal(seed)
    dims = ParallelDims(data_parallel=32, expert_parallel=8, pipeline_parallel=stages)
    searched = predicted_step_time(plan_step(lengths, dims, CONFIG), lengths)
    for balance in ("cost", "tokens"):
        plain = plan_step(lengths, dims, replace(CONFIG, balance=balance))
        assert 1.03 * searched < predicted_step_time(plain, lengths)


@pytest.mark.parametrize("seed", range(3))
def test_ranks_are_even_too(seed: int) -> None:
    lengths = log_normal(seed)
    step = plan_step(lengths, ParallelDims(data_parallel=32, expert_parallel=8), CONFIG)
    assert step_statistics(step, lengths).rank_balance < 1.02


def test_slots_are_small_at_both_ends_of_a_pipeline_s_step() -> None:
    lengths = [200 + 10 * (i % 40) for i in range(900)]
    dims = ParallelDims(data_parallel=4, expert_parallel=4, pipeline_parallel=4)
    costs = [max(slot) for slot in slot_costs(plan_step(lengths, dims, CONFIG), lengths)]
    assert max(costs[0], costs[-1]) < min(costs[4:-4])


@examples(300)
@given(cases(fill=("split",)), st.sampled_from([1, 30, 1500]))
def test_no_later_than_any_start_and_legal(case: Case, effort: int) -> None:
    dims = replace(case.dims, expert_parallel=2)
    config = replace(case.config, packing="auto", plan_effort=effort)
    starts = [
        plan_step(case.lengths, dims, replace(config, balance=balance)).micro_batches
        for balance in ("none", "tokens")
    ]
    work = step_work(case.lengths, dims, config, MODEL)
    found = search_lockstep(work, starts)
    step = StepPlan(
        micro_batches=tuple(tuple(tuple(sorted(s)) for s in slots) for slots in found),
        num_microbatches=len(found[0]),
        sample_indices=tuple(range(len(case.lengths))),
        dims=dims,
        config=config,
    )
    assert broken_invariants(step, case.lengths) == set()
    for slots in found:
        assert slots[-1] or not any(slots)
    end = lockstep_time(found, work)
    for start in starts:
        assert end <= lockstep_time([list(map(list, rank)) for rank in start], work)


@examples(200)
@given(cases(fill=("split",)))
def test_lockstep_time_is_that_of_the_slowest_rank_of_every_slot(case: Case) -> None:
    dims = replace(case.dims, expert_parallel=2)
    step = plan_step(case.lengths, dims, case.config)
    work = step_work(case.lengths, dims, case.config, MODEL)
    slowest = [max(slot) for slot in slot_costs(step, case.lengths)]
    expected = max(o.end for o in pipeline_operations(slowest, dims))
    ranks = [list(map(list, rank)) for rank in step.micro_batches]
    assert lockstep_time(ranks, work) == pytest.approx(expected, rel=1e-9)
    assert predicted_step_time(step, case.lengths) == pytest.approx(expected, rel=1e-9)


def test_no_effort_left_gives_the_best_start() -> None:
    """Not even one candidate of the search's own."""
    lengths = log_normal(0, count=64)
    dims = ParallelDims(data_parallel=4, expert_parallel=4)
    even = plan_step(lengths, dims, replace(CONFIG, balance="cost")).micro_batches
    uneven = plan_step(lengths, dims, replace(CONFIG, balance="none")).micro_batches
    work = step_work(lengths, dims, CONFIG, MODEL)
    work.effort = 0
    assert search_lockstep(work, [uneven, even]) == [[list(s) for s in rank] for rank in even]


@examples(100)
@given(cases(), st.sampled_from([1, 300]))
def test_improving_never_ends_a_step_later_and_keeps_it_legal(case: Case, effort: int) -> None:
    config = replace(case.config, balance="cost", plan_effort=effort)
    step = plan_step(case.lengths, case.dims, config)
    work = step_work(case.lengths, case.dims, config, MODEL)
    ranks = [[list(samples) for samples in rank] for rank in step.micro_batches]
    before = lockstep_time(ranks, work)
    end = improve_lockstep(ranks, before, work)
    assert end <= before
    assert end == pytest.approx(lockstep_time(ranks, work), rel=1e-12)
    improved = replace(
        step, micro_batches=tuple(tuple(tuple(sorted(s)) for s in rank) for rank in ranks)
    )
    assert broken_invariants(improved, case.lengths) == set()


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_improving_evens_out_slots_of_few_samples(seed: int, stages: int) -> None:
    """By a fiftieth of the step and more, over micro-batches packed full."""
    lengths = log_normal(seed, 48)
    dims = ParallelDims(data_parallel=4, expert_parallel=4, pipeline_parallel=stages)
    step = plan_step(lengths, dims, replace(CONFIG, balance="tokens"))
    work = step_work(lengths, dims, CONFIG, MODEL)
    ranks = [[list(samples) for samples in rank] for rank in step.micro_batches]
    assert improve_lockstep(ranks, lockstep_time(ranks, work), work) < 0.98 * predicted_step_time(
        step, lengths
    )
