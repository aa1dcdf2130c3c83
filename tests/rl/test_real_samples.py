"""The guarantees of `take`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_batching.batch import OrderError, SchemaError
from mcore_batching.rl.real_samples import take


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
@given(st.lists(st.integers(0, 8), max_size=12))
def test_every_field_is_sliced_alike(indices: list[int]) -> None:
    batch = numbered(9)
    part = take(batch, indices)
    assert numbers_of(part) == [indices] * 4
    assert part["returns"] is None
    assert isinstance(part["rewards"], torch.Tensor)
    assert numbers_of(batch) == [list(range(9))] * 4
    part["uids"].append("new")
    assert len(batch["uids"]) == 9


def test_numpy_fields_and_indices() -> None:
    numpy = pytest.importorskip("numpy")
    part = take({"rewards": numpy.arange(5.0), "uids": list("abcde")}, numpy.array([3, 0]))
    assert (part["rewards"].tolist(), part["uids"]) == ([3.0, 0.0], ["d", "a"])
    assert take({"uids": list("ab")}, torch.tensor([1]))["uids"] == ["b"]


@pytest.mark.parametrize("whole", [{"uids": ["a"] * 6}, "a text of 6", 3, list(range(5))])
def test_what_cannot_be_sliced_is_refused_by_name(whole: Any) -> None:
    with pytest.raises(SchemaError, match=r"meta_info.*6 values, one per sample"):
        take({**numbered(6), "meta_info": whole}, [0, 1])


@pytest.mark.parametrize("index", [-1, 6, 1.5, "a"])
def test_an_index_of_no_sample_is_refused(index: Any) -> None:
    with pytest.raises(OrderError, match=r"expected (integer )?indices"):
        take(numbered(6), [0, index])
