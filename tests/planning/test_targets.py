"""Target sizes of slots."""

from __future__ import annotations

import pytest

from mcore_batching.planning import CostModel, ParallelDims, PlannerConfig, Problem
from mcore_batching.planning.clock import Clock
from mcore_batching.planning.search.targets import (
    Targets,
    all_targets,
    lockstep_targets,
)


def targets_of(dims: ParallelDims, count: int, model: CostModel | None = None) -> Targets:
    config = PlannerConfig(max_tokens_per_gpu=100_000)
    return Targets(Problem.of([100], dims, config, model), count, 300.0)


PIPELINES = [
    ParallelDims(pipeline_parallel=2),
    ParallelDims(pipeline_parallel=4),
    ParallelDims(pipeline_parallel=8),
    ParallelDims(pipeline_parallel=4, virtual_pipeline=2),
    # 16 micro-batches in groups of 6: the last has 4.
    ParallelDims(pipeline_parallel=4, virtual_pipeline=2, microbatch_group_size=6),
]


@pytest.mark.parametrize("dims", PIPELINES)
@pytest.mark.parametrize("count", [4, 16, 44])
def test_targets_add_up_to_the_work_and_rise_and_fall(dims: ParallelDims, count: int) -> None:
    count = dims.round_up_num_microbatches(count)
    targets = targets_of(dims, count)
    sizes, long = targets.of_rank(10_000.0 * count, 500.0)
    assert not long
    assert sum(sizes) == pytest.approx(10_000.0 * count, rel=1e-6)
    peak = sizes.index(max(sizes))
    assert sizes[: peak + 1] == sorted(sizes[: peak + 1])
    assert sizes[peak:] == sorted(sizes[peak:], reverse=True)


@pytest.mark.parametrize("dims", PIPELINES)
@pytest.mark.parametrize("times", [1.5, 4.0, 20.0])
def test_a_long_sample_is_the_plateau(dims: ParallelDims, times: float) -> None:
    """Others add up to what is left, as long as each has a small sample; then some have none."""
    count = dims.round_up_num_microbatches(24)
    targets = targets_of(dims, count)
    work = 10_000.0 * count
    longest = times * targets.plateau(work)
    sizes, long = targets.of_rank(max(work, longest), longest)
    assert long
    assert max(sizes) == longest
    assert sizes.count(longest) == 1 or dims.virtual_pipeline == 1
    assert sum(sizes) == pytest.approx(max(work, longest + (count - 1) * 256.0), rel=0.05)
    assert min(sizes) >= 300.0 or longest + 300.0 * (count - 1) > work


def test_long_samples_share_a_rank() -> None:
    """The first rank's slots are made for those that are as long as its plateau, or nearly."""
    targets = targets_of(PIPELINES[1], 12)
    work = 12_000.0
    long = 3.0 * targets.plateau(work)
    first, second = all_targets(targets, [work, work], [long, 0.5 * long, 100.0])
    assert max(first) == long
    assert max(second) == pytest.approx(targets.plateau(work), rel=0.05)


def lockstep_problem(lengths: list[int], virtual_pipeline: int = 1, cap: int = 100) -> Problem:
    """A token costs 100."""
    dims = ParallelDims(
        data_parallel=4, pipeline_parallel=4, virtual_pipeline=virtual_pipeline, expert_parallel=4
    )
    model = CostModel(linear=100.0, quadratic=0.0, per_micro_batch=0.0)
    return Problem.of(lengths, dims, PlannerConfig(max_tokens_per_gpu=cap), model)


def test_slots_in_lockstep_are_as_large_as_their_costliest_sample() -> None:
    """Of 12 samples every rank has one of the four costliest, of the next four, of the last."""
    problem = lockstep_problem([90] * 4 + [60] * 4 + [20] * 4 + [1] * 400, cap=95)
    targets = Targets(problem, 8, 300.0)
    sizes = lockstep_targets(targets, 27_000.0, problem, range(412))
    assert sum(sizes) == pytest.approx(27_000.0, rel=0.01)
    first, second, third, *_ = sorted(sizes, reverse=True)
    assert first >= 9000.0
    assert second >= 6000.0
    assert third >= 2000.0
    assert max(sizes) <= 9500.0


def test_a_late_fall_is_made_of_any_number_of_slots() -> None:
    """The powers of its decay are 0 from some thousand slots on, and were divided by."""
    layers = (("a", 1.0, 0.0, 0.0, 1.0), ("V", 4.0, 0.0, 0.0, 2.0))
    model = CostModel(layers="aaaV", layer_costs=layers)
    sizes = targets_of(ParallelDims(pipeline_parallel=2), 1200, model).usual
    assert max(sizes) == sizes[600] == 1.0 > sizes[-1]


def test_sizes_are_reversed_where_backward_passes_are_the_cheaper_ones() -> None:
    """A step run backwards is one with forward and backward exchanged."""

    def sizes(ratio: float) -> list[float]:
        model = CostModel(per_micro_batch=0.0, backward_ratio=ratio)
        dims, config = ParallelDims(pipeline_parallel=4), PlannerConfig(max_tokens_per_gpu=100)
        problem = Problem.of([100], dims, config, model)
        return Targets(problem, 12, 1.0).of_rank(40_000.0, 0.0)[0]

    assert sizes(0.5) == sizes(2.0)[::-1] != sizes(2.0)


@pytest.mark.parametrize("stages", [4, 8])
@pytest.mark.parametrize("count", [10, 16, 24, 40])
@pytest.mark.parametrize("times", [2.0, 3.0, 5.0, 8.0])
def test_slots_around_a_long_sample_end_sooner_than_even_ones(
    stages: int, count: int, times: float
) -> None:
    """Ends over the work of even slots with the long one at any place: 0.4 to 2.7 % above."""
    targets = targets_of(ParallelDims(pipeline_parallel=stages), count)
    longest, schedule = 200_000.0, targets._schedule
    sizes, is_long = targets.of_rank(times * longest, longest)
    if not is_long:
        return
    rest = (times - 1.0) * longest / (count - 1)
    others = [[rest] * place + [longest] + [rest] * (count - 1 - place) for place in range(count)]
    assert Clock(sizes, schedule).end < min(Clock(each, schedule).end for each in others)


@pytest.mark.parametrize("virtual_pipeline", [1, 2])
def test_fitted_slots_in_lockstep_end_sooner(
    virtual_pipeline: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the largest as large as before, and no slot larger than the cap allows."""
    problem = lockstep_problem([90] + [20] * 30 + [5] * 60 + [1] * 800, virtual_pipeline, cap=60)
    schedule, work = problem.schedule, sum(problem.costs) / 4
    targets = Targets(problem, 12, 300.0)
    fitted = lockstep_targets(targets, work, problem, range(891))
    monkeypatch.setattr("mcore_batching.planning.search.targets.FIT_STEPS", 1)
    shaped = lockstep_targets(targets, work, problem, range(891))
    assert sum(fitted) == pytest.approx(sum(shaped), rel=0.001)
    assert Clock(fitted, schedule).end < 0.998 * Clock(shaped, schedule).end
    assert max(fitted) == 9000.0
    assert sorted(fitted)[-2] <= 6000.0 * (1 + 1e-9)
