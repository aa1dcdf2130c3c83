"""The guarantees of `make_placeholder` and of the check after filling."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from batch_cases import make_samples

from mcore_batching.batch import DEFAULT_SCHEMA, Kind, SchemaError, make_placeholder, placeholder

SCHEMA = DEFAULT_SCHEMA.declare("hidden", Kind.PER_TOKEN).declare(
    "scores", Kind.PER_RESPONSE_TOKEN, length_offset=1
)
SCHEMA = SCHEMA.declare("experts", Kind.ROUTED_EXPERTS)

EXAMPLES: dict[str, Any] = {
    "tokens": torch.tensor([3, 4, 5], dtype=torch.int32),
    "total_lengths": 3,
    "response_lengths": 2,
    "max_seq_lens": 12,
    "hidden": torch.ones(3, 4, 5, dtype=torch.float16),
    "loss_masks": torch.ones(2, dtype=torch.int32),
    "advantages": np.ones((2, 3), dtype=np.float64),
    "scores": np.full((3, 2), np.nan, dtype=np.float32),
    "rewards": 1.5,
    "truncated": True,
    "raw_reward": torch.tensor([1.0, float("nan")]),
    "round_number": np.int16(3),
    "position_ids": torch.ones(3, 3, dtype=torch.int32),
    "rollout_routed_experts": torch.ones(2, 6, 4, dtype=torch.int16),
    "multimodal_train_inputs": {"pixels": torch.rand(2)},
    "uids": "question 7",
}


def shape_and_type(value: Any) -> tuple[Any, ...]:
    if isinstance(value, torch.Tensor | np.ndarray):
        return type(value), tuple(value.shape), value.dtype
    return type(value), value


EXPECTED: dict[str, Any] = {
    "tokens": torch.tensor([9], dtype=torch.int32),
    "total_lengths": 1,
    "response_lengths": 0,
    "max_seq_lens": 1,
    "hidden": torch.zeros(1, 4, 5, dtype=torch.float16),
    "loss_masks": torch.zeros(0, dtype=torch.int32),
    "advantages": torch.zeros(0, 3, dtype=torch.float64),
    "scores": torch.zeros(1, 2),
    "rewards": 0.0,
    "truncated": False,
    "raw_reward": torch.zeros(2),
    "round_number": 0,
    "position_ids": torch.zeros(3, 1, dtype=torch.int32),
    "rollout_routed_experts": torch.zeros(0, 6, 4, dtype=torch.int16),
    "multimodal_train_inputs": {},
    "uids": None,
}

DEFAULTS: dict[str, Any] = EXPECTED | {
    "tokens": torch.tensor([9]),
    "hidden": torch.zeros(1),
    "loss_masks": torch.zeros(0),
    "advantages": torch.zeros(0),
    "scores": torch.zeros(1),
    "rewards": 0,
    "truncated": 0,
    "raw_reward": 0,
    "round_number": 0,
    "position_ids": torch.zeros(1, dtype=torch.int64),
    "rollout_routed_experts": torch.zeros((0, 0, 0), dtype=torch.int64),
}


def require_same(got: Any, expected: Any) -> None:
    assert shape_and_type(got) == shape_and_type(expected)
    if isinstance(expected, torch.Tensor | np.ndarray):
        assert got.tolist() == expected.tolist()


def test_the_examples_hold_every_kind() -> None:
    assert {SCHEMA[key].kind for key in EXAMPLES} == set(Kind)


@pytest.mark.parametrize("key", EXAMPLES)
def test_a_value_is_like_the_examples(key: str) -> None:
    batch = {name: [value] for name, value in EXAMPLES.items()}
    require_same(make_placeholder(SCHEMA, [key], batch, pad_token_id=9)[key][0], EXPECTED[key])


@pytest.mark.parametrize("key", EXAMPLES)
@pytest.mark.parametrize("batch", [None, {}, "empty lists", "None"], ids=str)
def test_a_rank_without_samples_has_the_default(key: str, batch: Any) -> None:
    if isinstance(batch, str):
        batch = {name: [] if batch == "empty lists" else None for name in EXAMPLES}
    made = make_placeholder(SCHEMA, EXAMPLES, batch, pad_token_id=9)
    assert set(made) == set(EXAMPLES)
    require_same(made[key][0], DEFAULTS[key])


@pytest.mark.parametrize(
    ("key", "example", "expected"),
    [
        ("tokens", [1, 2, 3], torch.tensor([9])),
        ("tokens", np.array([1, 2], dtype=np.int32), torch.tensor([9], dtype=torch.int32)),
        ("tokens", np.array([1, 2], dtype=np.uint16), torch.tensor([9])),
        ("tokens", [], torch.tensor([9])),
        ("hidden", [[1.5, 2.5]] * 3, torch.zeros(1, 2)),
        ("loss_masks", [1, 1], torch.zeros(0, dtype=torch.int64)),
        ("position_ids", [[1, 2, 3], [4, 5, 6]], torch.tensor([[0], [0]])),
        ("position_ids", torch.arange(3), torch.tensor([0])),
        ("rewards", np.float32(2.5), 0.0),
        ("rewards", [1.5, 2], torch.zeros(2)),
        # Zeros, as verl has them, send every slot of the token to expert 0.
        ("experts", torch.zeros(3, 2, 4).short(), torch.tensor([[[0, 1, 2, 3]] * 2]).short()),
        ("experts", np.zeros((3, 2, 3), np.int16), torch.tensor([[[0, 1, 2]] * 2]).short()),
        ("experts", [[[0, 0]] * 2] * 3, torch.tensor([[[0, 1]] * 2])),
        ("experts", torch.zeros(0).short(), torch.zeros((1, 0, 0), dtype=torch.int64)),
    ],
    ids=str,
)
def test_lists_arrays_and_other_shapes(key: str, example: Any, expected: Any) -> None:
    require_same(
        make_placeholder(SCHEMA, [key], {key: [example]}, pad_token_id=9)[key][0], expected
    )


def test_the_first_value_that_is_there_is_the_example() -> None:
    batch = {"raw_reward": [None, torch.zeros(4)]}
    assert make_placeholder(SCHEMA, ["raw_reward"], batch)["raw_reward"][0].shape == (4,)


def test_values_are_fabricated_without_gradients() -> None:
    batch = {"hidden": [torch.rand(3, 2, requires_grad=True)]}
    assert not make_placeholder(SCHEMA, ["hidden"], batch)["hidden"][0].requires_grad


def test_rows_per_token_are_filled_by_their_fill() -> None:
    """A token that its mask leaves out would attend to nothing."""
    names = ["input_ids", "attention_mask", "responses", "is_last_step", "uid"]
    examples = {"attention_mask": [torch.ones(3).bool()], "is_last_step": [True], "uid": ["a"]}
    found = make_placeholder(SCHEMA, names, examples, pad_token_id=7)
    assert found["input_ids"][0].tolist() == [7]
    assert found["attention_mask"][0].tolist() == [True]
    assert found["attention_mask"][0].dtype is torch.bool
    assert [*found["responses"][0], found["is_last_step"], found["uid"]] == [[False], [None]]


def test_a_field_nobody_declared_fails_at_the_check_after_filling() -> None:
    """A key added to the batch but not to the schema: here, and not in some ``torch.cat`` later."""
    with pytest.raises(SchemaError) as caught:
        make_placeholder(SCHEMA, ["tokens", "new_field"], make_samples([(4, 2)]))
    assert str(caught.value) == (
        "field 'new_field': expected a declared field, found no "
        "declaration; declare its kind, for example: "
        'schema = schema.declare("new_field", Kind.PER_RESPONSE_TOKEN)'
    )


def test_a_value_of_a_wrong_length_is_found_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not in some ``torch.cat`` later."""
    for wrong, text in (
        (torch.zeros(1), r"sample 0: expected 0 rows, one per response token, found a Tensor of"),
        (None, "sample 0: expected 0 rows, one per response token, found None"),
    ):
        monkeypatch.setattr(placeholder, "fabricated", lambda *given, wrong=wrong: wrong)
        with pytest.raises(SchemaError, match=text):
            make_placeholder(SCHEMA, ["log_probs"], None)
