"""Multi-turn batches of the sizes that others were tested with, from uids to padded steps."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from batch_cases import make_samples

from mcore_batching.batch import step_batches
from mcore_batching.planning import ParallelDims, PlannerConfig, plan_batch
from mcore_batching.planning.validation import validate_plan
from mcore_batching.rl import (
    compute_advantages,
    masked_mean,
    pad_batch,
    real_samples,
    required_batch_multiple,
    sample_metrics,
)


def turns_as_samples(turns: list[int], trajectories_per_prompt: int, seed: int) -> dict[str, Any]:
    """A sample for each turn, in the order in which an asynchronous rollout finishes them."""
    generator = random.Random(seed)
    ids = [trajectory for trajectory, count in enumerate(turns) for _ in range(count)]
    generator.shuffle(ids)
    shapes = [(generator.randint(3, 12), generator.randint(0, 3)) for _ in ids]
    outcome = [float(generator.random() < 0.3) for _ in turns]
    return {
        **make_samples(shapes, seed),
        "trajectory_ids": ids,
        "uids": [f"prompt {trajectory // trajectories_per_prompt}" for trajectory in ids],
        "rewards": [outcome[trajectory] for trajectory in ids],
    }


def verl_layout() -> tuple[dict[str, Any], int, int, int]:
    """dp 2, 45 prompts of 8 trajectories, mini-batches of 15 prompts."""
    generator = random.Random(1)
    turns = [generator.randint(1, 5) for _ in range(45 * 8)]
    multiple = required_batch_multiple(
        data_parallel_size=2, samples_per_prompt=8, actor_mini_batch_size=15
    )
    return turns_as_samples(turns, 8, 1), 2, 15, multiple


def skyrl_layout() -> tuple[dict[str, Any], int, int, int]:
    """dp 8, 256 prompts of 5 trajectories of at most 5 turns, 3509 in all, 128 a mini-batch."""
    generator = random.Random(2)
    turns = [1] * (256 * 5)
    while sum(turns) < 3509:
        trajectory = generator.randrange(len(turns))
        turns[trajectory] += turns[trajectory] < 5
    return turns_as_samples(turns, 5, 2), 8, 128, 8


@pytest.mark.parametrize(
    ("layout", "num_samples", "num_steps"), [(verl_layout, None, 3), (skyrl_layout, 3509, 2)]
)
def test_a_multi_turn_batch_from_uids_to_padded_steps(
    layout: Any, num_samples: int | None, num_steps: int
) -> None:
    batch, data_parallel, prompts_per_step, multiple = layout()
    assert num_samples in (None, len(batch["uids"]))
    plan = plan_batch(
        batch["total_lengths"],
        ParallelDims(data_parallel=data_parallel),
        PlannerConfig(max_tokens_per_gpu=256),
        groups=batch["uids"],
        groups_per_step=prompts_per_step,
        last="error",
    )
    validate_plan(plan, batch["total_lengths"])
    steps = [step.sample_indices for step in plan.steps]
    assert len(steps) == num_steps

    batch["advantages"] = compute_advantages(batch, step_wise=True, normalize=True, steps=steps)
    mini_batches = [
        pad_batch(part, multiple, pad_token_id=0) for part in step_batches(batch, steps)
    ]
    for part, step in zip(mini_batches, steps, strict=True):
        assert len(part["tokens"]) % multiple == 0
        assert len(part["tokens"]) - len(step) < multiple
        real = real_samples(part)
        assert real["uids"] == [batch["uids"][sample] for sample in step]
        assert len(set(real["uids"])) == prompts_per_step
        assert len(set(part["uids"])) == prompts_per_step + sum(part["is_padding"])
        expected = sum(batch["rewards"][sample] for sample in step) / len(step)
        assert sample_metrics(part, ["rewards"])["rewards/mean"] == pytest.approx(expected)
        # The step's own mean and variance, padding samples or not.
        mean = masked_mean(part["advantages"], part["loss_masks"])
        squares = masked_mean([a**2 for a in part["advantages"]], part["loss_masks"])
        assert mean == pytest.approx(0.0, abs=1e-6)
        assert squares == pytest.approx(1.0, rel=1e-5)
    # Every turn of a trajectory has the same advantage wherever it is trained.
    by_trajectory: dict[int, set[float]] = {}
    for i, trajectory in enumerate(batch["trajectory_ids"]):
        kept = batch["advantages"][i][batch["loss_masks"][i] != 0]
        assert torch.isfinite(kept).all()
        by_trajectory.setdefault(trajectory, set()).update(kept.tolist())
    assert all(len(values) <= 1 for values in by_trajectory.values())
    assert sum(map(len, by_trajectory.values())) > prompts_per_step
