"""The examples in the docstrings of mcore_batching.rl are what the functions return."""

from __future__ import annotations

from typing import Any

import torch

from mcore_batching.rl import (
    compute_advantages,
    left_pad,
    pad_batch,
    real_samples,
    response_values,
    unpad,
)
from mcore_batching.rl.advantages import outcome_advantages
from mcore_batching.rl.real_samples import indices_by_group


def in_lists(batch: dict[str, Any]) -> dict[str, list[Any]]:
    return {
        name: [value.tolist() if isinstance(value, torch.Tensor) else value for value in values]
        for name, values in batch.items()
    }


def test_advantages() -> None:
    batch = {
        "total_lengths": [2, 3, 2],
        "response_lengths": [1, 2, 1],
        "trajectory_ids": [7, 7, 8],
        "uids": ["a", "a", "a"],
        "rewards": [0, 1, 0],
        "loss_masks": [[1], [1, 0], [1]],
    }
    found = compute_advantages(batch, "dr_grpo", step_wise=True)
    assert [each.tolist() for each in found] == [[0.5], [0.5, 0.0], [-0.5]]
    rloo = outcome_advantages([1, 0, 0], ["a", "a", "a"], "rloo")
    assert rloo == [1.0, -0.5, -0.5]


def test_groups() -> None:
    batch = {"uids": ["a", "b", "a", "pad"]}
    assert indices_by_group(batch, "uids", [0, 1, 2]) == {"a": [0, 2], "b": [1]}


def test_padding_samples() -> None:
    batch = {
        "tokens": [[4, 5, 6]],
        "total_lengths": [3],
        "response_lengths": [2],
        "loss_masks": [[1, 1]],
        "uids": ["a"],
    }
    padded = pad_batch(batch, 2, pad_token_id=0, identifier_seed=0)
    expected = {
        "tokens": [[4, 5, 6], [0, 0]],
        "total_lengths": [3, 2],
        "response_lengths": [2, 1],
        "loss_masks": [[1, 1], [0]],
        "uids": ["a", "padding-629f6fbd82c07ce"],
        "is_padding": [False, True],
    }
    assert in_lists(padded) == expected
    assert in_lists(real_samples(padded)) == {**batch, "is_padding": [False]}


def test_left_padding() -> None:
    samples = {
        "tokens": [[4, 5], [6, 7, 8, 9, 1]],
        "total_lengths": [2, 5],
        "response_lengths": [1, 2],
        "log_probs": [[-0.5], [-0.25, -0.125]],
    }
    blocks = left_pad(samples, pad_token_id=0)
    assert blocks.tokens.tolist() == [[0, 0, 0, 4, 5], [6, 7, 8, 9, 1]]
    assert blocks.blocks["log_probs"].tolist() == [[0.0, -0.5], [-0.25, -0.125]]
    for values in (response_values(blocks, blocks.blocks["log_probs"]), unpad(blocks)["log_probs"]):
        assert [value.tolist() for value in values] == samples["log_probs"]
