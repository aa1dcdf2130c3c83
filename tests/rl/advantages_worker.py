"""What each process of test_advantages.py runs."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from mcore_batching.rl import compute_advantages


def turns_of(rank: int, *, masked: bool = False) -> dict[str, Any]:
    """Two steps of one group each; turns of two or three trajectories, and a padding sample."""
    rewards = [[0.0, 3.0, 1.0, 2.0, 5.0, 9.0], [0.0, 7.0, 4.0, 4.5, 1.0, 9.0]][rank]
    lengths = [2, 3, 1, 4, 2, 1]
    masks = [torch.ones(length) for length in lengths]
    masks[1][0] = 0
    return {
        "total_lengths": [length + 2 for length in lengths],
        "response_lengths": lengths,
        "rewards": rewards,
        "uids": [f"{rank}a", f"{rank}a", f"{rank}a", f"{rank}b", f"{rank}b", "padding"],
        "trajectory_ids": [0, 0, 1, 2, 3, 4],
        "is_padding": [False] * 5 + [True],
        "loss_masks": [mask * (not masked) for mask in masks],
    }


STEPS = [[0, 1, 2], [3, 4, 5]]


def compute_all(rank: int, size: int) -> dict[str, Any]:
    """What a rank of the group reports of all cases."""
    shared = {"step_wise": True, "normalize": True, "group": dist.group.WORLD}
    report: dict[str, Any] = {
        "both": compute_advantages(turns_of(rank), "dr_grpo", steps=STEPS, **shared),
        "one rank is masked": compute_advantages(
            turns_of(rank, masked=rank == 1), "dr_grpo", steps=STEPS, **shared
        ),
        "all masked": compute_advantages(
            turns_of(rank, masked=True), "dr_grpo", steps=STEPS, **shared
        ),
    }
    broken = turns_of(rank)
    if rank == 0:
        broken["rewards"] = None
    for name, batch, steps in (
        ("field", broken, STEPS),
        ("steps", turns_of(rank), STEPS[: 2 - rank]),
    ):
        try:
            compute_advantages(batch, "dr_grpo", steps=steps, **shared)
        except ValueError as error:
            report["error", name] = str(error)
    return report
