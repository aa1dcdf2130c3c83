"""The guarantees of `real_samples`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_batching.batch import SchemaError
from mcore_batching.rl import real_samples


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


@pytest.mark.parametrize("whole", [{"uids": ["a"] * 6}, "a text of 6", 3, list(range(5))])
def test_what_cannot_be_sliced_is_refused_by_name(whole: Any) -> None:
    with pytest.raises(SchemaError, match=r"meta_info.*6 values, one per sample"):
        real_samples({**numbered(6), "meta_info": whole})
