"""The guarantees of `make_placeholder`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import ones, rand, tensor, zeros

from mcore_batching.batch import DEFAULT_SCHEMA, Kind, make_placeholder

SCHEMA = DEFAULT_SCHEMA.declare("hidden", Kind.PER_TOKEN).declare(
    "scores", Kind.PER_RESPONSE_TOKEN, length_offset=1
)
SCHEMA = SCHEMA.declare("experts", Kind.ROUTED_EXPERTS)

VALUES: list[tuple[str, Any, Any, Any]] = [
    ("tokens", tensor([3, 4, 5]).int(), tensor([9]).int(), tensor([9])),
    ("total_lengths", 3, 1, 1),
    ("response_lengths", 2, 0, 0),
    ("max_seq_lens", 12, 1, 1),
    ("hidden", ones(3, 4, 5).half(), zeros(1, 4, 5).half(), zeros(1)),
    ("loss_masks", ones(2).int(), zeros(0).int(), zeros(0)),
    ("advantages", np.ones((2, 3)), zeros(0, 3).double(), zeros(0)),
    ("scores", np.full((3, 2), np.nan, np.float32), zeros(1, 2), zeros(1)),
    ("rewards", 1.5, 0.0, 0),
    ("truncated", True, False, 0),
    ("raw_reward", tensor([1.0, float("nan")]), zeros(2), 0),
    ("round_number", np.int16(3), 0, 0),
    ("position_ids", ones(3, 3).int(), zeros(3, 1).int(), zeros(1).long()),
    (
        "rollout_routed_experts",
        ones(2, 6, 4).short(),
        zeros(0, 6, 4).short(),
        zeros(0, 0, 0).long(),
    ),
    ("multimodal_train_inputs", {"pixels": rand(2)}, {}, {}),
    ("uids", "question 7", None, None),
]
"""A field, an example of its values, a placeholder's value, and that on a rank without samples."""
EXAMPLES = {name: example for name, example, *_ in VALUES}


def shape_and_type(value: Any) -> tuple[Any, ...]:
    if isinstance(value, torch.Tensor | np.ndarray):
        return type(value), tuple(value.shape), value.dtype
    return type(value), value


def require_same(got: Any, expected: Any) -> None:
    assert shape_and_type(got) == shape_and_type(expected)
    if isinstance(expected, torch.Tensor | np.ndarray):
        assert got.tolist() == expected.tolist()


def test_the_examples_hold_every_kind() -> None:
    assert {SCHEMA[key].kind for key in EXAMPLES} == set(Kind)


@pytest.mark.parametrize(("key", "example", "expected", "default"), VALUES)
def test_a_value_is_like_the_examples_or_the_default(
    key: str, example: Any, expected: Any, default: Any
) -> None:
    batch = {name: [value] for name, value in EXAMPLES.items()}
    require_same(make_placeholder(SCHEMA, [key], batch, pad_token_id=9)[key][0], expected)
    empty: list[Any] = [None, {}, {name: [] for name in EXAMPLES}, dict.fromkeys(EXAMPLES)]
    for nothing in empty:
        made = make_placeholder(SCHEMA, EXAMPLES, nothing, pad_token_id=9)
        assert set(made) == set(EXAMPLES)
        require_same(made[key][0], default)


@pytest.mark.parametrize(
    ("key", "example", "expected"),
    [
        ("tokens", [1, 2, 3], tensor([9])),
        ("tokens", np.array([1, 2], dtype=np.int32), tensor([9], dtype=torch.int32)),
        ("tokens", np.array([1, 2], dtype=np.uint16), tensor([9])),
        ("tokens", [], tensor([9])),
        ("hidden", [[1.5, 2.5]] * 3, zeros(1, 2)),
        ("loss_masks", [1, 1], zeros(0, dtype=torch.int64)),
        ("position_ids", [[1, 2, 3], [4, 5, 6]], tensor([[0], [0]])),
        ("position_ids", torch.arange(3), tensor([0])),
        ("rewards", np.float32(2.5), 0.0),
        ("rewards", [1.5, 2], zeros(2)),
        # Zeros, as verl has them, send every slot of the token to expert 0.
        ("experts", zeros(3, 2, 4).short(), tensor([[[0, 1, 2, 3]] * 2]).short()),
        ("experts", np.zeros((3, 2, 3), np.int16), tensor([[[0, 1, 2]] * 2]).short()),
        ("experts", [[[0, 0]] * 2] * 3, tensor([[[0, 1]] * 2])),
        ("experts", zeros(0).short(), zeros((1, 0, 0), dtype=torch.int64)),
    ],
)
def test_lists_arrays_and_other_shapes(key: str, example: Any, expected: Any) -> None:
    require_same(
        make_placeholder(SCHEMA, [key], {key: [example]}, pad_token_id=9)[key][0], expected
    )


def test_the_first_value_that_is_there_is_the_example_without_its_gradient() -> None:
    batch = {"hidden": [None, rand(3, 4, requires_grad=True)]}
    (made,) = make_placeholder(SCHEMA, ["hidden"], batch)["hidden"]
    assert made.shape == (1, 4)
    assert not made.requires_grad


def test_rows_per_token_are_filled_by_their_fill() -> None:
    """A token that its mask leaves out would attend to nothing."""
    names = ["input_ids", "attention_mask", "responses", "is_last_step", "uid"]
    examples = {"attention_mask": [ones(3).bool()], "is_last_step": [True], "uid": ["a"]}
    found = make_placeholder(SCHEMA, names, examples, pad_token_id=7)
    assert found["input_ids"][0].tolist() == [7]
    assert found["attention_mask"][0].tolist() == [True]
    assert found["attention_mask"][0].dtype is torch.bool
    assert [*found["responses"][0], found["is_last_step"], found["uid"]] == [[False], [None]]
