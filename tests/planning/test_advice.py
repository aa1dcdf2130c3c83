"""What is said to hold a step back, and what is said to help."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from mcore_batching.planning import CostModel, ParallelDims, PlannerConfig, StepPlan, plan_step
from mcore_batching.planning.statistics import predicted_step_time
from mcore_batching.tools.advice import what_holds_back, what_would_help
from mcore_batching.tools.explain import explain

PP4 = ParallelDims(data_parallel=4, pipeline_parallel=4)
CONFIG = PlannerConfig(max_tokens_per_gpu=16384, plan_effort=200)
GENERATOR = random.Random(0)
MANY = [int(GENERATOR.lognormvariate(7, 0.8)) + 1 for _ in range(512)]


def held_back(lengths: list[int], dims: ParallelDims, **options: object) -> str:
    config = replace(CONFIG, **options)  # type: ignore[arg-type]
    return what_holds_back(plan_step(lengths, dims, config), lengths)


def test_the_longest_sample() -> None:
    assert held_back([200] * 64 + [12000], PP4).startswith("sample 64 (12000 tokens): its own way")


def test_the_slowest_rank() -> None:
    lengths = [1000] * 40
    step = plan_step(lengths, ParallelDims(data_parallel=2), CONFIG, owners=[0] * 30 + [1] * 10)
    assert what_holds_back(step, lengths).startswith("rank 0: it ends 1.49 x")


def test_slots_in_lockstep() -> None:
    dims = ParallelDims(data_parallel=8, expert_parallel=8)
    said = held_back(MANY, dims, balance="none", packing="first-fit")
    assert said.startswith("slots whose micro-batches differ over ranks")


def test_the_cap() -> None:
    assert held_back([1000] * 64, PP4, max_tokens_per_gpu=1000).startswith(
        "the cap of 1000 tokens: micro-batches are full"
    )


def test_too_few_samples() -> None:
    assert held_back([1000] * 32, PP4) == "too few samples for this pipeline: 8 a rank for 4 stages"


def test_the_pipeline_s_ends() -> None:
    assert held_back(MANY, PP4).startswith("filling and draining 4 stages with ")


def test_nothing_but_the_work() -> None:
    assert held_back(MANY, ParallelDims(data_parallel=4)).startswith("the work itself")


@pytest.mark.parametrize("forward_only", [False, True])
@pytest.mark.parametrize("bound", [None, 16000])
def test_gains_are_those_of_plans_made_so(forward_only: bool, bound: int | None) -> None:
    """What is suggested, planned and simulated by hand, ends the step so much sooner."""
    config = replace(CONFIG, max_inflight_tokens=bound)
    lengths = MANY[:160]
    step = plan_step(lengths, PP4, config, forward_only=forward_only)
    suggestions = {each.change: each.gain for each in what_would_help(step, lengths)}
    twice = replace(PP4, data_parallel=2, context_parallel=2)
    halved = CostModel(linear=0.5, quadratic=0.5 / 24576)
    # Twice the ranks hold the tokens of a micro-batch, so twice as many take the same memory.
    wider = replace(config, max_inflight_tokens=bound and 2 * bound)
    then = plan_step(lengths, twice, wider, halved, forward_only=forward_only)
    gain = predicted_step_time(step, lengths) / predicted_step_time(then, lengths)
    change = "context_parallel=2 and data_parallel=2"
    assert gain > 1.01
    assert suggestions[change] == pytest.approx(gain, rel=1e-12)
    # A cap can not help both by being larger and by being smaller.
    assert not {"max_tokens_per_gpu=8192", "max_tokens_per_gpu=32768"} <= set(suggestions)


def test_a_plan_for_forward_passes_is_explained_as_one() -> None:
    step = plan_step(MANY, PP4, CONFIG, forward_only=True)
    training = plan_step(MANY, PP4, CONFIG)
    text = explain(step, MANY)
    assert "predicted end of the forward passes" in text
    assert predicted_step_time(step, MANY) < 0.5 * predicted_step_time(training, MANY)
    assert f"{predicted_step_time(step, MANY):.0f} token units" in text


def test_a_step_that_costs_nothing_is_explained() -> None:
    step = plan_step([0, 0], ParallelDims(), CONFIG, CostModel(per_micro_batch=0))
    assert "held back by: nothing" in explain(step, [0, 0])
    assert isinstance(step, StepPlan)
