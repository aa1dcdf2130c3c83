"""Plans in words, and what is suggested to end a step sooner."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from planning_cases import SIX_LENGTHS as LENGTHS
from planning_cases import SIX_SAMPLES as STEP
from planning_cases import Case, plan_locally, planned

from mcore_batching.planning import (
    CostModel,
    ParallelDims,
    PlannerConfig,
    StepPlan,
    plan_step,
    predicted_step_time,
)
from mcore_batching.planning.forest import forest_of_groups
from mcore_batching.tools import explain as explaining
from mcore_batching.tools.explain import COMPARED_PLAN_EFFORT, alternatives, explain, suggestions

PP4 = ParallelDims(data_parallel=4, pipeline_parallel=4)
CONFIG = PlannerConfig(max_tokens_per_gpu=16384, plan_effort=200)
GENERATOR = random.Random(0)
MANY = [int(GENERATOR.lognormvariate(7, 0.8)) + 1 for _ in range(512)]

DP2, DP4 = ParallelDims(data_parallel=2), ParallelDims(data_parallel=4)
DP8 = ParallelDims(data_parallel=8, expert_parallel=8)
IN_ORDER = replace(CONFIG, balance="none", packing="first-fit")
SMALL = replace(CONFIG, max_tokens_per_gpu=1000)
HELD_BACK_BY = {
    "sample 64 (12000 tokens): its own way": Case([200] * 64 + [12000], PP4, CONFIG, None),
    "rank 0: it ends 1.49 x": Case([1000] * 40, DP2, CONFIG, [0] * 30 + [1] * 10),
    "slots with micro-batches that differ over ranks": Case(MANY, DP8, IN_ORDER, None),
    "the cap of 1000 tokens: micro-batches are full": Case([1000] * 64, PP4, SMALL, None),
    "the most samples that may share a m": Case(
        [1000] * 8, PP4, replace(CONFIG, max_samples_per_row=1), None
    ),
    "filling and draining 4 stages with ": Case(MANY, PP4, CONFIG, None),
    "the work itself": Case(MANY, DP4, CONFIG, None),
}


@pytest.mark.parametrize("reason", HELD_BACK_BY)
def test_what_holds_a_step_back(reason: str) -> None:
    case = HELD_BACK_BY[reason]
    text = explain(planned(case), case.lengths, advice_seconds=0)
    assert f"held back by: {reason}" in text


SHARED = "context_parallel=2 (--cp 2) and data_parallel=2 (--dp 2)"


@pytest.mark.parametrize("forward_only", [False, True])
def test_gains_are_those_of_plans_made_so(forward_only: bool) -> None:
    """Suggestions, planned and simulated by hand, end the step so much sooner."""
    lengths = MANY[:160]
    step = plan_step(lengths, PP4, CONFIG, forward_only=forward_only)
    config = replace(CONFIG, plan_effort=COMPARED_PLAN_EFFORT)
    found, untried = suggestions(step, lengths)
    gains = dict(found)
    assert untried == []
    assert [gain for _, gain in found] == sorted(gains.values(), reverse=True)
    assert min(gains.values()) >= 1.01
    halved = CostModel(linear=0.5, quadratic=0.5 / 24576)
    doubled = CostModel(linear=2, quadratic=2 / 24576, per_micro_batch=512)
    for changes, sizes, costs in (
        (SHARED, (2, 4, 2), halved),
        ("pipeline_parallel=2 (--pp 2) and data_parallel=8 (--dp 8)", (8, 2, 1), doubled),
    ):
        data, stages, context = sizes
        dims = ParallelDims(data_parallel=data, pipeline_parallel=stages, context_parallel=context)
        then = plan_step(lengths, dims, config, costs, forward_only=forward_only)
        gain = predicted_step_time(step, lengths) / predicted_step_time(then, lengths)
        assert gains.get(changes, gain) == pytest.approx(gain, rel=1e-12)
        assert (changes in gains) == (gain >= 1.01)
    assert SHARED in gains
    # A cap cannot help both by being larger and by being smaller.
    caps = [f"max_tokens_per_gpu={cap} (--max-tokens-per-gpu {cap})" for cap in (8192, 32768)]
    assert not {*caps} <= set(gains)


@pytest.mark.parametrize("prediction", [0.0, 1.0, 3.0])
@pytest.mark.parametrize("seconds", [0.5, 4.0, 13.0, 40.0])
def test_advice_takes_no_longer_than_it_may(
    monkeypatch: pytest.MonkeyPatch, prediction: float, seconds: float
) -> None:
    """By a clock on which plans take 3 s, or 6 with half the cap or twice the stages."""
    clock, step = 0.0, plan_step(MANY[:64], PP4, replace(CONFIG, plan_effort=1))
    settings = []

    def slow_plan(
        lengths: list[int], dims: ParallelDims, config: PlannerConfig, *_: object, **__: object
    ) -> StepPlan:
        nonlocal clock
        passes = dims.pipeline_parallel * 16384 / config.max_tokens_per_gpu
        clock += 6.0 if passes > 4 else 3.0
        settings.append(config)
        return step

    def slow_prediction(*_: object) -> float:
        nonlocal clock
        clock += 0 if settings else prediction
        return 1.0

    monkeypatch.setattr(explaining.time, "process_time", lambda: clock)
    monkeypatch.setattr(explaining, "plan_step", slow_plan)
    monkeypatch.setattr(explaining, "predicted_step_time", slow_prediction)
    _, untried = suggestions(step, MANY[:64], seconds)
    assert len(settings) + len(untried) == 5
    # Nothing is known of the first try where predicting takes no time.
    assert clock <= seconds or len(settings) <= (prediction == 0)
    assert (untried == []) == (seconds == 40)
    assert {config.plan_effort for config in settings} <= {1}
    said = explain(step, MANY[:64], advice_seconds=seconds)
    assert (", as it would take longer than planning did: " in said) == bool(untried)


def test_a_plan_for_forward_passes_is_explained_as_one() -> None:
    step = plan_step(MANY, PP4, CONFIG, forward_only=True)
    training = plan_step(MANY, PP4, CONFIG)
    text = explain(step, MANY, advice_seconds=0)
    assert "predicted end of the forward passes" in text
    assert predicted_step_time(step, MANY) < 0.5 * predicted_step_time(training, MANY)
    assert f"{predicted_step_time(step, MANY):.0f} token units" in text


def test_explain_says_where_the_count_comes_from() -> None:
    assert explain(STEP, LENGTHS) == (
        "6 samples on 2 data-parallel ranks: 2 micro-batches per rank\n"
        "  count: packing under the cap of 10 tokens takes 4 micro-batches "
        "(no packing takes fewer than 4), 2 per rank\n"
        "  longest: sample 5 (14 tokens), on rank 1\n"
        "  oversize, each alone in its micro-batch: 1 over 10 tokens: sample 5\n"
        "  predicted end of the step: 1593 token units, 1.000 x the floor (a mean rank's work "
        "on the slowest stage or the longest sample's way through all stages; no plan ends sooner)"
        "; the first stage holds 14 tokens at most\n"
        "  held back by: the cap of 10 tokens: micro-batches are full, and starting them is 96% of "
        "the work\n"
        "  would help: max_tokens_per_gpu=20 (--max-tokens-per-gpu 20) (1.93 x as fast)"
    )


def test_explain_of_rounding_scopes_and_foreign_plans() -> None:
    dims = ParallelDims(data_parallel=2, pipeline_parallel=2, virtual_pipeline=2)
    config = PlannerConfig(max_tokens_per_gpu=10)
    lengths = [10] * 5
    text = explain(plan_step(lengths, dims, config), lengths)
    assert "takes 5 micro-batches" in text
    assert "3 per rank; the interleaved schedule with groups of 2 over 2 stages makes it 4" in text
    text = explain(plan_locally([10] * 7, dims, config, [1] * 6 + [0]), [10] * 7)
    assert "4 per rank; samples that stay on their rank take 6" in text
    assert "would help" not in text  # advice plans samples for any rank
    none = explain(plan_step([], dims, config), [])
    assert "no samples: one micro-batch per rank is the least" in none
    free = plan_step([0, 0], ParallelDims(), CONFIG, CostModel(per_micro_batch=0))
    assert "held back by: nothing" in explain(free, [0, 0])
    foreign = replace(
        STEP, micro_batches=(((0,), (1,), (3,)), ((2,), (4,), (5,))), num_microbatches=3
    )
    assert "2 per rank; 3 end the step sooner, less full" in explain(foreign, LENGTHS)
    packed = replace(foreign, config=replace(foreign.config, balance="cost"))
    assert "2 per rank; this plan has 3" in explain(packed, LENGTHS)


@pytest.mark.parametrize(
    ("dims", "tried"),
    [
        # Experts cannot be spread over one rank.
        (ParallelDims(data_parallel=2, expert_parallel=2), {(1, 1)}),
        # No job has more than 1024 stages.
        (ParallelDims(data_parallel=2, pipeline_parallel=300), {(1, 300), (1, 600), (4, 150)}),
        (ParallelDims(data_parallel=2, pipeline_parallel=600), {(1, 600), (4, 300)}),
        (ParallelDims(data_parallel=2, pipeline_parallel=4), {(1, 4), (1, 8), (4, 2)}),
    ],
)
def test_no_parallel_dims_are_tried_that_no_job_can_have(
    dims: ParallelDims, tried: set[tuple[int, int]]
) -> None:
    step = plan_step([3, 4, 5], dims, replace(CONFIG, plan_effort=1))
    found = {(each.data_parallel, each.pipeline_parallel) for _, each, _, _ in alternatives(step)}
    assert found - {(2, dims.pipeline_parallel)} == tried


def test_trees_are_named_by_their_samples_and_advice_can_be_left_out() -> None:
    lengths, config = [20, 30, 21, 22, 70], replace(CONFIG, max_tokens_per_gpu=60)
    forest = forest_of_groups(lengths, [4, 4, 20, 20, 4], "abccd")
    step = plan_step(lengths, ParallelDims(), config, forest=forest)
    assert step.trees
    text = explain(step, lengths)
    assert text.startswith("5 samples on 1 data-parallel rank: ")
    assert "163 tokens of samples computed as 144: 1.1x fewer" in text
    assert "longest: sample 4 (70 tokens), on rank 0" in text
    assert "1 over 60 tokens: sample 4" in text
    assert "would help" not in text  # other settings would be planned without what samples share
    lengths = [20, 21, 22]
    forest = forest_of_groups(lengths, [4, 20, 20], "abb")
    step = plan_step(lengths, ParallelDims(), config, forest=forest)
    assert "longest: the tree of samples 1, 2 (24 tokens), on rank 0" in explain(step, lengths)
    text, advised = explain(STEP, LENGTHS, advice_seconds=0), explain(STEP, LENGTHS)
    assert advised.startswith(text + "\n  would help: ")
    assert "would help" not in text
