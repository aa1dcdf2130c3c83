"""What each process of test_metrics.py runs."""

from __future__ import annotations

import datetime
from typing import Any

import torch
import torch.distributed as dist

from mcore_batching.batch import BatchError
from mcore_batching.rl import sample_metrics
from mcore_batching.rl.metrics import masked_zscore

TIMEOUT = datetime.timedelta(seconds=60)
NAN = float("nan")

VALUES = [torch.tensor([1.0, NAN, 4.0]), torch.tensor([2.0, 8.0]), torch.tensor([NAN])]
MASKS = [torch.tensor([1, 0, 1]), torch.tensor([1.0, 1.0]), torch.tensor([False])]


def shard(case: str, rank: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """This rank's values and masks: uneven, none at all, or all masked."""
    if case == "uneven":
        return (VALUES[:1], MASKS[:1]) if rank == 0 else (VALUES[1:], MASKS[1:])
    if case == "one rank has no sample":
        return (VALUES, MASKS) if rank == 0 else ([], [])
    if case == "one rank is masked":
        return (VALUES[2:], MASKS[2:]) if rank == 0 else (VALUES[:2], MASKS[:2])
    return [torch.tensor([NAN, 3.0])] * (rank + 1), [torch.zeros(2)] * (rank + 1)


CASES = ("uneven", "one rank has no sample", "one rank is masked", "all masked")


def batch_of(case: str, rank: int) -> dict[str, Any]:
    """Rewards of two samples on rank 0 and one on rank 1, with padding samples around."""
    padding = {
        "some": [False, True, False] if rank == 0 else [True, False],
        "one rank": [True, True, True] if rank == 0 else [False, False],
        "all": [True] * (3 - rank),
    }[case]
    rewards = [4.0, 100.0, 1.0] if rank == 0 else [-100.0, 7.0]
    return {"total_lengths": [2] * len(padding), "rewards": rewards, "is_padding": padding}


def reduce_all(rank: int, size: int, store: str, results: str) -> None:
    """Run all cases in a group of processes; writes one file a rank."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=TIMEOUT
    )
    group = dist.group.WORLD
    report: dict[str, Any] = {
        case: masked_zscore(*shard(case, rank), group=group) for case in CASES
    }
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
        ("mask", lambda: masked_zscore([torch.ones(2)], [torch.ones(2 + rank)], group=group)),
    ):
        try:
            call()
        except BatchError as error:
            report["error", name] = str(error)
    torch.save(report, f"{results}.{rank}")
    dist.barrier()  # no rank leaves while another is still in the last collective
    dist.destroy_process_group()
