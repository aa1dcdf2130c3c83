"""The guarantees of metrics and of `real_samples`; of several ranks: test_ranks.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from batch_cases import make_samples
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_batching.rl import pad_batch, real_samples, sample_metrics


def padded(count: int, multiple: int) -> dict[str, Any]:
    samples = {
        **make_samples([(5, 2)] * count),
        "rewards": [1.0 + i for i in range(count)],
        "uids": ["a", "b"] * (count // 2),
    }
    return pad_batch(samples, multiple, pad_token_id=0)


def test_verl_fault_metrics_count_padding() -> None:
    metrics = sample_metrics(padded(4, 16), ["rewards", "response_lengths"])
    assert metrics == {
        "rewards/mean": 2.5,
        "rewards/max": 4.0,
        "rewards/min": 1.0,
        "response_lengths/mean": 2.0,
        "response_lengths/max": 2.0,
        "response_lengths/min": 2.0,
    }


def test_names_may_come_one_by_one() -> None:
    batch = padded(4, 16)
    expected = sample_metrics(batch, ["rewards", "response_lengths"])
    assert sample_metrics(batch, (n for n in ("rewards", "response_lengths"))) == expected


def test_verl_fault_metrics_of_a_batch_that_is_all_padding() -> None:
    batch = padded(4, 16)
    only_padding = {key: values[4:] for key, values in batch.items()}
    assert sample_metrics(only_padding, ["rewards"]) == {}
    assert sample_metrics(make_samples([]), ["response_lengths"]) == {}


def numbered(count: int) -> dict[str, Any]:
    """Every field says which sample it belongs to."""
    return {
        "tokens": [torch.full((3,), i) for i in range(count)],
        "total_lengths": [3] * count,
        "response_lengths": [1] * count,
        "rewards": torch.arange(count).double(),
        "uids": [f"prompt {i}" for i in range(count)],
        "metadata": tuple({"number": i} for i in range(count)),
        "returns": None,
    }


def numbers_of(batch: dict[str, Any]) -> list[list[int]]:
    return [
        [int(tokens[0]) for tokens in batch["tokens"]],
        [int(reward) for reward in batch["rewards"]],
        [int(uid.removeprefix("prompt ")) for uid in batch["uids"]],
        [each["number"] for each in batch["metadata"]],
    ]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.booleans(), max_size=12))
def test_every_field_is_sliced_alike(tags: list[bool]) -> None:
    batch = numbered(len(tags)) | {"is_padding": tags}
    part = real_samples(batch)
    real = [index for index, tag in enumerate(tags) if not tag]
    assert numbers_of(part) == [real] * 4
    assert part["returns"] is None
    assert isinstance(part["rewards"], torch.Tensor)
    assert numbers_of(batch) == [list(range(len(tags)))] * 4
    part["uids"].append("new")
    assert len(batch["uids"]) == len(tags)


def test_numpy_fields() -> None:
    numpy = pytest.importorskip("numpy")
    batch = {
        "rewards": numpy.arange(3.0),
        "uids": list("abc"),
        "is_padding": numpy.array([0, 1, 0]),
    }
    part = real_samples(batch)
    assert (part["rewards"].tolist(), part["uids"]) == ([0.0, 2.0], ["a", "c"])
