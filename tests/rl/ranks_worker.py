"""What each of three processes of test_ranks.py runs."""

from __future__ import annotations

import math
import pickle
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from mcore_batching.rl import compute_advantages, sample_metrics

SIZE = 3
STEPS = [[0, 1, 2], [3, 4, 5]]


def turns_of(rank: int, *, masked: bool = False) -> dict[str, Any]:
    """Two steps of one group each; turns of two or three trajectories, and a padding sample. Rank 2
    has no samples."""
    lengths = [2, 3, 1, 4, 2, 1]
    masks = [torch.ones(length) for length in lengths]
    masks[1][0] = 0
    batch = {
        "total_lengths": [length + 2 for length in lengths],
        "response_lengths": lengths,
        "rewards": [[0.0, 3.0, 1.0, 2.0, 5.0, 9.0], [0.0, 7.0, 4.0, 4.5, 1.0, 9.0]][rank % 2],
        "uids": [f"{rank}a", f"{rank}a", f"{rank}a", f"{rank}b", f"{rank}b", "padding"],
        "trajectory_ids": [0, 0, 1, 2, 3, 4],
        "is_padding": [False] * 5 + [True],
        "loss_masks": [mask * (not masked) for mask in masks],
    }
    return batch if rank < 2 else {key: [] for key in batch}


def plain_zscores(
    parts: list[dict[str, Any]], step: list[int]
) -> dict[tuple[int, int], list[float]]:
    """By rank and sample of a step, the z-scores of its advantages over all ranks' real samples."""
    raw = [compute_advantages(part, "dr_grpo", step_wise=True) for part in parts]
    kept = {
        (rank, i): (part["loss_masks"][i] != 0) & (not part["is_padding"][i])
        for rank, part in enumerate(parts)
        for i in step
    }
    values = [v for (rank, i), mask in kept.items() for v in raw[rank][i][mask].tolist()] or [0.0]
    mean, scale = statistics.fmean(values), math.sqrt(statistics.pvariance(values) + 1e-8)
    return {
        (rank, i): [
            (value - mean) / scale if is_kept else 0.0
            for value, is_kept in zip(raw[rank][i].tolist(), mask.tolist(), strict=True)
        ]
        for (rank, i), mask in kept.items()
    }


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


WHOLE = [batch_of(uids) for uids in (["a", "a", "b"], ["c", "d", "c"], ["e"])]
SPLIT = [batch_of(uids) for uids in (["a", "b"], ["c"], ["b", "b", "c"])]
BATCHES: dict[str, list[dict[str, Any]]] = {
    "whole": WHOLE,
    "padding sample with a real uid": [
        batch_of(["a", "b"]),
        batch_of(["c", "a"], is_padding=[False, True]),
        batch_of(["b"], is_padding=[True]),
    ],
    "a rank has no samples": [batch_of([]), batch_of(["a"]), batch_of(["b"])],
    "split": SPLIT,
    "integers": [batch_of(torch.tensor([7, 8])), batch_of([9]), batch_of([8, 10])],
    "many split": [batch_of(list(range(9))) for _ in range(SIZE)],
    "no uids": [batch_of(["a"]), batch_of(["b"]) | {"uids": None}, batch_of(["c"])],
    "no uid of a sample": [batch_of(["a"]), batch_of(["b"]), batch_of([None])],
    "uids that do not travel": [batch_of([lambda: 0]), batch_of(["b"]), batch_of(["c"])],
}
ARGUMENTS: dict[str, list[dict[str, Any]]] = {
    "estimator": [{}, {"estimator": "rloo"}, {}],
    "normalize": [{}, {}, {"normalize": True}],
    "outcome": [{}, {"outcome": "sum"}, {}],
    "step_wise": [{"step_wise": True}, {}, {}],
}
METRICS = [
    batch_of(["a"] * 3, rewards=[4.0, 100.0, 1.0], is_padding=[False, True, False]),
    batch_of(["b"] * 2, rewards=[-100.0, 7.0], is_padding=[True, False]),
    batch_of([]),
]


def outcome_of(call: Callable[[], Any]) -> Any:
    """What a call returns, or its error with what survives pickling."""
    try:
        return call()
    except ValueError as error:
        again = pickle.loads(pickle.dumps(error))
        return f"{type(error).__name__}: {again}"


def calls_of(rank: int) -> dict[str, Callable[[], Any]]:
    """Calls by name, the same ones on every rank."""
    world = dist.group.WORLD
    last_two = dist.new_group([1, 2])

    def steps(batch: dict[str, Any], steps: Any = STEPS, **arguments: Any) -> Any:
        shared = {"step_wise": True, "normalize": True, "group": world} | arguments
        own_steps = steps if rank < 2 else [[] for _ in steps]
        return compute_advantages(batch, "dr_grpo", steps=own_steps, **shared)

    def metrics(fields: Any = ("rewards",), **changed: Any) -> Any:
        changed = changed if rank == 1 else {}
        fields = list(fields) if rank == 0 else fields  # any sequence of the same names
        return sample_metrics(METRICS[rank] | changed, fields, group=world)

    calls = {
        "both": lambda: steps(turns_of(rank)),
        "one rank is masked": lambda: steps(turns_of(rank, masked=rank == 1)),
        "all masked": lambda: steps(turns_of(rank, masked=True)),
        "field": lambda: steps(turns_of(rank) | ({} if rank else {"rewards": None})),
        "number of steps": lambda: steps(turns_of(rank), STEPS[: 2 - rank % 2]),
        "alone": lambda: compute_advantages(SPLIT[rank]),
        "of two ranks": lambda: rank and compute_advantages(SPLIT[rank], group=last_two),
        "metrics": metrics,
        "metrics of padding alone": lambda: sample_metrics(
            METRICS[rank] | {"is_padding": [True] * len(METRICS[rank]["uids"])},
            ["rewards"],
            group=world,
        ),
        "metrics of a field": lambda: metrics(rewards=None),
        "metrics of tags": lambda: metrics(is_padding=[False]),
        "metrics of other fields": lambda: metrics(["rewards", "total_lengths"][: 2 - rank % 2]),
    }
    for name, batches in BATCHES.items():
        calls[name] = lambda b=batches: compute_advantages(b[rank], group=world)
    for name, given in ARGUMENTS.items():
        calls[name] = lambda g=given: compute_advantages(WHOLE[rank], group=world, **g[rank])
    return calls


def report(rank: int, size: int) -> dict[str, Any]:
    """What each call came to."""
    return {name: outcome_of(call) for name, call in calls_of(rank).items()}
