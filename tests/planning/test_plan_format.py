"""Plans are frozen data with a stable digest, a JSON form with its inverse, and a readable text."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

import pytest
from planning_cases import SIX_SAMPLES as STEP

from mcore_batching.planning import (
    CostModel,
    LengthError,
    ParallelDims,
    Plan,
    PlanFormatError,
    PlannerConfig,
    plan_batch,
    plan_step,
)

PLAN = Plan(steps=(STEP,), num_samples=6)


def test_json_is_the_documented_format() -> None:
    """Without newer options, which are at their default: older plans keep their digests."""
    document = json.loads(PLAN.to_json())
    assert document == {
        "format": "mcore-batching/plan",
        "version": 1,
        "layout": {
            "data_parallel": 2,
            "pipeline_parallel": 1,
            "virtual_pipeline": 1,
            "context_parallel": 1,
            "tensor_parallel": 1,
            "expert_parallel": 1,
            "sequence_parallel": False,
            "microbatch_group_size": None,
        },
        "config": {
            "max_tokens_per_gpu": 10,
            "packing": "auto",
            "balance": "auto",
            "fill": "split",
            "on_oversize": "own-bin",
            "pad_each_to": None,
            "pad_total_to": None,
        },
        "scope": "global",
        "num_samples": 6,
        "digest": STEP.digest(),
        "steps": [{"num_microbatches": 2, "ranks": [[[0, 1], [3]], [[2, 4], [5]]]}],
    }
    assert [*document][-1] == "steps"  # behind what a person looks for
    assert Plan.from_json(PLAN.to_json()) == PLAN


def test_digest_is_sha256_of_the_canonical_document() -> None:
    """Pinned, because ranks on other platforms and Python versions must get the same."""
    pinned = "26a8244ebcda641777ce1ddfc9aa2faefac927c45951c2882fb7d682ad01ffd0"
    assert STEP.digest() == PLAN.digest() == pinned
    document = json.loads(PLAN.to_json())
    del document["digest"]
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"))
    assert STEP.digest() == hashlib.sha256(canonical.encode()).hexdigest()


@pytest.mark.parametrize(
    "changes",
    [
        {"micro_batches": (((0, 1), (3,)), ((2,), (4, 5)))},
        {"micro_batches": (((3,), (0, 1)), ((2, 4), (5,)))},
        {"dims": ParallelDims(data_parallel=2, tensor_parallel=2)},
        {"config": PlannerConfig(max_tokens_per_gpu=11)},
        # Newer options are written where they are not at their default.
        {"dims": ParallelDims(data_parallel=2, waits_for_sends=False)},
        {"config": PlannerConfig(max_tokens_per_gpu=10, max_samples_per_row=3)},
        {"scope": "local"},
        {"num_microbatches": 3},
        {"sample_indices": (0, 1, 2, 3, 4, 6)},
    ],
)
def test_digest_and_equality_see_every_field(changes: dict[str, Any]) -> None:
    changed = dataclasses.replace(STEP, **changes)
    assert changed != STEP
    assert changed.digest() != STEP.digest()
    plan = Plan(steps=(changed,), num_samples=6)
    assert "sample_indices" in changes or Plan.from_json(plan.to_json()) == plan
    other = dataclasses.replace(STEP, cost_model=CostModel(linear=7))  # no part of the identity
    assert (other, other.digest()) == (STEP, STEP.digest())


def edited(**changes: Any) -> str:
    return json.dumps({**json.loads(PLAN.to_json()), **changes})


STEP_DOCUMENT = json.loads(PLAN.to_json())["steps"][0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense", "expected a plan in JSON"),
        ("[" * 100_000, "expected a plan in JSON"),
        ("1" * 5000, "expected a plan in JSON"),
        ("[]", "expected a plan in JSON: a JSON object, got '[]'"),
        ("{}", 'expected "format": "mcore-batching/plan", got None'),
        (edited(format="other/plan"), "got 'other/plan'"),
        (edited(format="x" * 10_000), "got 'xxx"),
        (edited(version=2), 'expected plan "version" 1, got 2'),
        (edited(version=["x" * 10_000]), 'expected plan "version" 1, got ['),
        (edited(version=True), 'expected plan "version" 1, got True'),
        (edited(layout=[]), '"layout" must be a JSON object'),
        (
            edited(layout={"data_parallel": 0}),
            '"layout" is not valid: data_parallel (--dp) must be 1',
        ),
        (edited(layout={"dp": 2}), 'unknown keys in "layout": dp; expected context_parallel'),
        (edited(config={}), '"config" is not valid'),
        (edited(scope="galactic"), '"scope" must be "global" or "local", got'),
        (edited(num_samples=-1), '"num_samples" must be an integer of 0 or more, got -1'),
        (edited(num_samples=6.0), '"num_samples" must be an integer of 0 or more, got 6.0'),
        (edited(scope="x" * 10_000), '"scope" must be "global" or "local", got'),
        (edited(digest="x" * 10_000), "the digest is xxx"),
        (edited(digest=5), '"digest" must be a string, got 5'),
        (edited(steps=[]), '"steps" must hold at least one step'),
        (edited(steps={}), '"steps" must be a JSON array'),
        (edited(steps=[3]), "step 0 must be a JSON object, got 3"),
        (
            edited(steps=[{"num_microbatches": 2}]),
            '"ranks" of step 0 must be a JSON array, got None',
        ),
        (
            edited(steps=[{**STEP_DOCUMENT, "num_microbatches": "2"}]),
            "\"num_microbatches\" of step 0 must be an integer of 0 or more, got '2'",
        ),
        (edited(steps=[{**STEP_DOCUMENT, "ranks": [0]}]), "of step 0, rank 0 must be a JSON array"),
        (edited(steps=[{**STEP_DOCUMENT, "ranks": [[0]]}]), "rank 0, slot 0 must be a JSON array"),
        (
            edited(steps=[{**STEP_DOCUMENT, "ranks": [[[0, True]]]}]),
            '"ranks" of step 0, rank 0, slot 0, sample 1 must be an integer of 0 or more, got True',
        ),
        (edited(num_samples=7), "; plan again, or pass verify_digest"),
        (edited(digest=None), 'the plan has no "digest"'),
    ],
)
def test_what_is_no_plan_is_refused(text: str, message: str) -> None:
    with pytest.raises(PlanFormatError) as caught:
        Plan.from_json(text)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 400  # whatever a stranger's file holds


def test_the_digest_check_can_be_left_out() -> None:
    assert Plan.from_json(edited(num_samples=7), verify_digest=False).num_samples == 7
    assert Plan.from_json(edited(digest=None), verify_digest=False) == PLAN


def test_steps_of_a_plan_belong_together() -> None:
    with pytest.raises(LengthError, match="a plan needs one step or more"):
        Plan(steps=(), num_samples=0)
    other = dataclasses.replace(STEP, scope="local")
    with pytest.raises(LengthError, match="step 1 has other dims"):
        Plan(steps=(STEP, other), num_samples=6)


def test_str_shows_every_micro_batch_of_a_small_plan() -> None:
    assert str(STEP) == (
        "StepPlan: 6 samples on 2 data-parallel ranks, 2 micro-batches per rank, global scope, "
        f"digest {STEP.digest()[:12]}\n"
        "  rank 0: [0 1] [3]\n"
        "  rank 1: [2 4] [5]"
    )
    assert str(PLAN) == (
        "Plan: 6 samples in 1 step on 2 data-parallel ranks, global scope, "
        f"digest {PLAN.digest()[:12]}\n"
        "  step 0: 6 samples, 2 micro-batches per rank, 0 placeholders"
    )


def test_str_of_a_large_plan_is_short() -> None:
    lengths = [1] * 20_000
    config = PlannerConfig(max_tokens_per_gpu=10, balance="tokens")
    step = plan_step(lengths, ParallelDims(data_parallel=64), config)
    assert len(str(step)) < 20_000
    assert "and 48 more ranks" in str(step)
    assert str(step).count("\n") == 1 + 16
    plan = plan_batch(lengths, ParallelDims(), config, samples_per_step=100)
    assert len(str(plan)) < 5000
    assert "and 184 more steps" in str(plan)
    assert str(plan).count("\n") == 1 + 16


def test_the_lengths_digest_is_no_part_of_the_plan() -> None:
    lengths = (6, 4, 3, 9, 2, 14)
    plan = plan_batch(lengths, ParallelDims(), PlannerConfig(max_tokens_per_gpu=20))
    bound, free = json.loads(plan.to_json(lengths)), json.loads(plan.to_json())
    assert bound.pop("lengths_digest") == hashlib.sha256(b"6,4,3,9,2,14").hexdigest()
    assert bound == free
    assert Plan.from_json(plan.to_json(lengths)) == plan
