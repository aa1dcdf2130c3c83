"""What each process of test_metrics.py runs."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from mcore_batching.batch import BatchError
from mcore_batching.rl import sample_metrics


def batch_of(case: str, rank: int) -> dict[str, Any]:
    """Rewards of two samples on rank 0 and one on rank 1, with padding samples around."""
    padding = {
        "some": [False, True, False] if rank == 0 else [True, False],
        "one rank": [True, True, True] if rank == 0 else [False, False],
        "all": [True] * (3 - rank),
    }[case]
    rewards = [4.0, 100.0, 1.0] if rank == 0 else [-100.0, 7.0]
    return {"total_lengths": [2] * len(padding), "rewards": rewards, "is_padding": padding}


def reduce_all(rank: int, size: int) -> dict[Any, Any]:
    """What a rank of the group reports of all cases."""
    group = dist.group.WORLD
    report: dict[Any, Any] = {}
    for case in ("some", "one rank", "all"):
        report["metrics", case] = sample_metrics(batch_of(case, rank), ["rewards"], group=group)
    broken = batch_of("some", rank)
    if rank == 1:
        del broken["rewards"]
    untagged = batch_of("some", rank)
    if rank == 1:
        untagged["is_padding"] = [False]
    for name, call in (
        ("tags", lambda: sample_metrics(untagged, ["rewards"], group=group)),
        ("field", lambda: sample_metrics(broken, ["rewards"], group=group)),
    ):
        try:
            call()
        except BatchError as error:
            report["error", name] = str(error)
    return report
