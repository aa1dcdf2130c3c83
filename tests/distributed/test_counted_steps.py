"""What an optimizer step counts as, whatever samples and turns it holds, and steps of none."""

from __future__ import annotations

from typing import Any

import pytest
from kit.harness import Job

DP2 = {"data_parallel": 2}
DP2_PP2 = {"data_parallel": 2, "pipeline_parallel": 2}
MOE = {"kind": "moe", "reference": "moe"}
SHARED = {"dynamic_batch_context_parallel": 2}
COUNTED = [
    Job(
        f"learning-rates-{turns}-turns",
        "kit.counted_steps:learning_rates",
        2,
        DP2,
        {"dims": DP2, "reference": "dense", "turns": turns},
    )
    for turns in (1, 5)
]
UNTRAINED = [
    Job(
        f"nothing-to-train-{name}",
        "kit.counted_steps:nothing_to_train",
        nproc,
        dims,
        {"dims": dims, "reference": "dense"} | parameters,
    )
    for name, nproc, dims, parameters in (
        ("experts", 2, DP2 | {"expert_parallel": 2}, MOE),
        ("exchange", 2, DP2, {"planner": {"dynamic_batch_exchange": True}}),
        ("shared-rows", 2, DP2, {"planner": SHARED}),
        ("dp2-pp2", 4, DP2_PP2, {"distributed_optimizer": True}),
    )
]


@pytest.mark.parametrize("job", COUNTED, ids=str)
def test_the_learning_rate_depends_on_prompts_alone(job: Job, ranks: list[dict[str, Any]]) -> None:
    """With Megatron's scheduler, which took the turns of a step for samples."""
    for rank in ranks:
        rates, consumed = zip(*rank["prompts"], strict=True)
        assert rates == pytest.approx([7.5e-4, 5e-4, 2.5e-4, 0.0], abs=1e-9)
        assert consumed == (4, 4, 4, 4)


@pytest.mark.parametrize("job", COUNTED, ids=str)
def test_a_step_of_samples_counts_as_the_global_batch_size(
    job: Job, ranks: list[dict[str, Any]]
) -> None:
    """The last, short one too: Megatron's decay is so many steps of a whole batch."""
    number = -(-8 * job.parameters["turns"] // 3)
    for rank in ranks:
        rates, consumed = zip(*rank["samples"], strict=True)
        left = [1e-3 * (number - 1 - step) / number for step in range(number)]
        assert rates == pytest.approx(left, abs=1e-9)
        assert consumed == (3,) * number


@pytest.mark.parametrize("job", COUNTED, ids=str)
def test_what_a_step_counts_as_is_never_guessed(job: Job, ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        nothing_said, too_small, no_integer = rank["refused"]
        assert nothing_said.startswith("ConfigError: no global_batch_size (--global-batch")
        assert "set increment to what lr_decay_steps counts a step as" in nothing_said
        assert "increment must be 1 or more, got 0" in too_small
        assert "increment must be an integer, got 2.5" in no_integer


@pytest.mark.parametrize("job", UNTRAINED, ids=str)
def test_a_step_without_real_samples_changes_nothing(job: Job, ranks: list[dict[str, Any]]) -> None:
    """Adam's momentum moved the weights by 6.6e-3, and padding samples a router's bias."""
    for rank in ranks:
        for case in ("empty step", "padding", "padding on one rank", "no samples"):
            assert rank[case] == {"updated": False, "consumed": 0, "loss": 0.0, "changed": []}, case
        # Masked samples are samples: unpacked, too, their step is an update.
        for case in ("masked", "real"):
            assert rank[case] == {"updated": True, "consumed": 5}, case
        assert rank["moved"] > 10
