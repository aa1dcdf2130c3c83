"""What each process of test_group_locality.py runs."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from mcore_batching.rl import compute_advantages


def batch_of(uids: Any, **fields: Any) -> dict[str, Any]:
    """Samples of one response token with these uids."""
    count = len(uids)
    return {
        "total_lengths": [2] * count,
        "response_lengths": [1] * count,
        "rewards": [float(i) for i in range(count)],
        "uids": uids,
        "trajectory_ids": range(count),
    } | fields


WHOLE = (["a", "a", "b"], ["c", "d", "c"], ["e"])
BATCHES: dict[str, tuple[dict[str, Any], ...]] = {
    "whole": tuple(batch_of(uids) for uids in WHOLE),
    "split": tuple(batch_of(uids) for uids in (["a", "b"], ["c"], ["b", "b", "c"])),
    "padding sample with a real uid": (
        batch_of(["a", "b"]),
        batch_of(["c", "a"], is_padding=[False, True]),
        batch_of(["b"], is_padding=[True]),
    ),
    "integers": (
        batch_of(torch.tensor([7, 8])),
        batch_of([9]),
        batch_of([8, 10]),
    ),
    "a rank has no samples": (batch_of([]), batch_of(["a"]), batch_of(["b"])),
    "no uids on a rank": (batch_of(["a"]), batch_of(["b"]) | {"uids": None}, batch_of(["c"])),
    "no uid of a sample": (batch_of(["a"]), batch_of(["b"]), batch_of([None])),
    "uids that do not travel": (batch_of([lambda: 0]), batch_of(["b"]), batch_of(["c"])),
    "many split": tuple(batch_of(list(range(9))) for _ in range(3)),
}
DIFFERING: dict[str, tuple[dict[str, Any], ...]] = {
    "estimator": ({}, {"estimator": "rloo"}, {}),
    "normalize": ({}, {}, {"normalize": True}),
    "outcome": ({}, {"outcome": "sum"}, {}),
    "step_wise": ({"step_wise": True}, {}, {}),
}


def outcome_of(call: Callable[[], Any]) -> Any:
    """What a call returns, or its error with what survives pickling."""
    try:
        return call()
    except ValueError as error:
        again = pickle.loads(pickle.dumps(error))
        return {"type": type(error).__name__, "message": str(again)}


def check_all(rank: int, size: int) -> dict[Any, Any]:
    """What a rank of the group reports of all cases."""
    group = dist.group.WORLD
    report: dict[Any, Any] = {}
    for name, batches in BATCHES.items():
        batch = batches[rank]
        report["advantages", name] = outcome_of(lambda b=batch: compute_advantages(b, group=group))
    split = BATCHES["split"][rank]
    report["alone"] = outcome_of(lambda: compute_advantages(split))
    for name, arguments in DIFFERING.items():
        whole = BATCHES["whole"][rank]
        report["differs", name] = outcome_of(
            lambda w=whole, a=arguments: compute_advantages(w, group=group, **a[rank])
        )
    last_two = dist.new_group([1, 2])
    if rank:
        report["subgroup"] = outcome_of(lambda: compute_advantages(split, group=last_two))
    return report
