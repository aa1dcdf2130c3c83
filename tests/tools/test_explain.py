"""Plans in words, and what is suggested to end a step sooner."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from planning_cases import SIX_LENGTHS as LENGTHS
from planning_cases import SIX_SAMPLES as STEP
from planning_cases import Case, planned

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
VPP2 = ParallelDims(data_parallel=2, pipeline_parallel=2, virtual_pipeline=2)
IN_ORDER = replace(CONFIG, balance="none", packing="first-fit")
CAP_10, CAP_1000 = (replace(CONFIG, max_tokens_per_gpu=cap) for cap in (10, 1000))
STAY = Case([10] * 7, VPP2, CAP_10, [1] * 6 + [0])
FOREIGN = replace(STEP, micro_batches=(((0,), (1,), (3,)), ((2,), (4,), (5,))), num_microbatches=3)
FREE = CostModel(per_micro_batch=0)


def of_trees(lengths: list[int], prompts: list[int], groups: str) -> tuple[StepPlan, list[int]]:
    config = replace(CONFIG, max_tokens_per_gpu=60)
    forest = forest_of_groups(lengths, prompts, groups)
    return plan_step(lengths, ParallelDims(), config, forest=forest), lengths


TREES = of_trees([20, 30, 21, 22, 70], [4, 4, 20, 20, 4], "abccd")
EXPLAINED: dict[str, Case | tuple[StepPlan, list[int]]] = {
    "held back by: sample 64 (12000 tokens): its own way": Case(
        [200] * 64 + [12000], PP4, CONFIG, None
    ),
    "held back by: rank 0: it ends 1.49 x": Case([1000] * 40, DP2, CONFIG, [0] * 30 + [1] * 10),
    "held back by: slots with micro-batches that differ over ranks": Case(
        MANY, DP8, IN_ORDER, None
    ),
    "held back by: the cap of 1000 tokens: micro-batches are full": Case(
        [1000] * 64, PP4, CAP_1000, None
    ),
    "held back by: the most samples that may share a m": Case(
        [1000] * 8, PP4, replace(CONFIG, max_samples_per_row=1), None
    ),
    "held back by: filling and draining 4 stages with ": Case(MANY, PP4, CONFIG, None),
    "held back by: the work itself": Case(MANY, DP4, CONFIG, None),
    "held back by: nothing": (plan_step([0, 0], ParallelDims(), CONFIG, FREE), [0, 0]),
    "takes 5 micro-batches (no packing takes fewer than 5), 3 per rank; the interleaved schedule "
    "with groups of 2 over 2 stages makes it 4": Case([10] * 5, VPP2, CAP_10, None),
    "4 per rank; samples that stay on their rank take 6": STAY,
    "no samples: one micro-batch per rank is the least": Case([], VPP2, CAP_10, None),
    "2 per rank; 3 end the step sooner, less full": (FOREIGN, LENGTHS),
    "2 per rank; this plan has 3": (
        replace(FOREIGN, config=replace(CAP_10, balance="cost")),
        LENGTHS,
    ),
    "predicted end of the forward passes": (
        plan_step(LENGTHS, PP4, CONFIG, forward_only=True),
        LENGTHS,
    ),
    "163 tokens of samples computed as 144: 1.1x fewer": TREES,
    "longest: sample 4 (70 tokens), on rank 0": TREES,
    "1 over 60 tokens: sample 4": TREES,
    "longest: the tree of samples 1, 2 (24 tokens), on rank 0": of_trees(
        [20, 21, 22], [4, 20, 20], "abb"
    ),
}
"""What is said, and a plan of which it is."""


@pytest.mark.parametrize("text", EXPLAINED)
def test_plans_in_words(text: str) -> None:
    given = EXPLAINED[text]
    step, lengths = (planned(given), given.lengths) if isinstance(given, Case) else given
    assert text in explain(step, lengths, advice_seconds=0)
    if given in (STAY, TREES):  # advice would plan samples for any rank, and what they share anew
        assert "would help" not in explain(step, lengths)


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


def test_the_whole_text() -> None:
    text = (
        "6 samples on 2 data-parallel ranks: 2 micro-batches per rank\n"
        "  count: packing under the cap of 10 tokens takes 4 micro-batches "
        "(no packing takes fewer than 4), 2 per rank\n"
        "  longest: sample 5 (14 tokens), on rank 1\n"
        "  oversize, each alone in its micro-batch: 1 over 10 tokens: sample 5\n"
        "  predicted end of the step: 1593 token units, 1.000 x the floor (a mean rank's work "
        "on the slowest stage or the longest sample's way through all stages; no plan ends sooner)"
        "; the first stage holds 14 tokens at most\n"
        "  held back by: the cap of 10 tokens: micro-batches are full, and starting them is 96% of "
        "the work"
    )
    assert explain(STEP, LENGTHS, advice_seconds=0) == text
    advice = "max_tokens_per_gpu=20 (--max-tokens-per-gpu 20) (1.93 x as fast)"
    assert explain(STEP, LENGTHS) == f"{text}\n  would help: {advice}"


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
