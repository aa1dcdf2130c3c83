"""Values that torch would take for something else are refused by name."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from mcore_batching.batch import (
    DEFAULT_SCHEMA,
    BatchError,
    OrderError,
    SchemaError,
    apply_order,
    make_placeholder,
    restore_order,
)
from mcore_batching.batch.row_index import padded_offsets
from mcore_batching.batch.values import require_vocabulary
from mcore_batching.rl import (
    left_pad,
    pad_batch,
    sample_metrics,
)
from mcore_batching.rl.real_samples import real_indices

SAMPLES: dict[str, Any] = {
    "tokens": [[1, 2, 3], [4, 5]],
    "total_lengths": [3, 2],
    "response_lengths": [2, 1],
}


@pytest.mark.parametrize("bad", [math.nan, -1, -0.5, math.inf])
@pytest.mark.parametrize("make", [list, torch.tensor, np.array])
def test_loss_masks_are_finite_weights_of_0_or_more(bad: float, make: Any) -> None:
    batch = SAMPLES | {"loss_masks": [make([1.0, 0.5]), make([bad])]}
    with pytest.raises(SchemaError, match=f"'loss_masks', sample 1: .* 0 or more, found {bad}"):
        DEFAULT_SCHEMA.validate(batch)


@pytest.mark.parametrize("masks", [[[1, 0], [1]], [torch.ones(2, dtype=torch.bool), [0.5]]])
def test_loss_masks_of_any_type_are_weights(masks: Any) -> None:
    DEFAULT_SCHEMA.validate(SAMPLES | {"loss_masks": masks})


@pytest.mark.parametrize("bad", [["1", "2"], [1, None], [1, [2]]])
def test_lists_that_are_no_tensor_are_refused(bad: Any) -> None:
    batch = SAMPLES | {"loss_masks": [bad, [1]]}
    with pytest.raises(SchemaError, match="'loss_masks', sample 0"):
        DEFAULT_SCHEMA.validate(batch)


@pytest.mark.parametrize("make", [list, np.array, lambda ids: np.array(ids, "uint16")])
def test_lists_and_arrays_are_tensors_from_the_entry_on(make: Any) -> None:
    lengths = {"total_lengths": torch.tensor([3, 2])}
    found = DEFAULT_SCHEMA.validate(SAMPLES | lengths | {"tokens": [*map(make, SAMPLES["tokens"])]})
    assert [type(length) for length in found["total_lengths"]] == [int, int]
    assert [value.tolist() for value in found["tokens"]] == [[1, 2, 3], [4, 5]]
    assert {value.dtype for value in found["tokens"]} == {torch.int64}
    with pytest.raises(SchemaError, match="'tokens', sample 1: expected numbers, in lists of one"):
        DEFAULT_SCHEMA.validate(SAMPLES | {"tokens": [[1, 2, 3], [4, [5]]]})


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("tokens", [[1j, 2, 3], [4, 5]]),
        ("loss_masks", [[1, 1j], [1]]),
        ("advantages", [torch.zeros(2), torch.zeros(1, dtype=torch.complex64)]),
        ("attention_mask", [np.ones(3, np.complex64), [1, 1]]),
        ("rewards", [1.0, 1j]),
        ("rewards", torch.zeros(2, dtype=torch.complex64)),
        ("rollout_routed_experts", [torch.zeros(2, 1, 1), torch.zeros(1, 1, 1) * 1j]),
        ("undeclared", [torch.zeros(3), torch.zeros(2) * 1j]),
        ("undeclared", torch.zeros(2, dtype=torch.complex64)),
    ],
)
def test_complex_numbers_are_refused_by_name(name: str, values: Any) -> None:
    """A loss took their real parts, with a warning at most."""
    batch = SAMPLES | {name: values}
    with pytest.raises(SchemaError, match=f"'{name}'.* expected"):
        DEFAULT_SCHEMA.resolve(batch).validate(batch)
    with pytest.raises(SchemaError, match=f"'{name}'"):
        left_pad(batch, pad_token_id=0)


def test_complex_rewards_are_no_numbers() -> None:
    with pytest.raises(SchemaError, match="'rewards', sample 0: expected one number per sample"):
        sample_metrics(SAMPLES | {"rewards": torch.ones(2, dtype=torch.complex64)}, ["rewards"])


def test_integers_are_integers_throughout() -> None:
    """int64 would make 6 of 6.5; the first entry alone tells nothing."""
    for name in ("tokens", "position_ids"):
        batch = SAMPLES | {name: [[1, 2, 3], [4, 6.5]]}
        with pytest.raises(SchemaError, match=f"'{name}', sample 1: .*of an integer type"):
            DEFAULT_SCHEMA.validate(batch)


@pytest.mark.parametrize("bad", [True, 1.0, None, "1", math.nan, 2**63, torch.tensor(True)])
def test_a_token_id_is_an_integer(bad: Any) -> None:
    calls = [
        lambda: make_placeholder(DEFAULT_SCHEMA, SAMPLES, None, pad_token_id=bad),
        lambda: left_pad(SAMPLES, pad_token_id=bad),
        lambda: pad_batch(SAMPLES, 4, pad_token_id=bad),
    ]
    for call in calls:
        with pytest.raises(BatchError, match="pad_token_id must be a token's id"):
            call()


def test_a_token_id_of_any_library_counts() -> None:
    for seven in (7, np.int64(7), torch.tensor(7)):
        assert left_pad(SAMPLES, pad_token_id=seven).tokens[1, 0] == 7


@pytest.mark.parametrize("huge", [2**31, 10**400])
def test_rows_beyond_int32_offsets_are_refused(huge: int) -> None:
    with pytest.raises(BatchError, match="a row may have at most 2147483647 tokens"):
        padded_offsets([3, 2], 1, huge)


@pytest.mark.parametrize(
    "bad", ["False", [1, 2], np.array([0, 1]), math.nan, torch.tensor(math.inf)]
)
def test_a_tag_is_one_boolean(bad: Any) -> None:
    """Of a text even "False" is true."""
    batch = SAMPLES | {"is_padding": [False, bad]}
    with pytest.raises(SchemaError, match="'is_padding', sample 1"):
        real_indices(batch)
    with pytest.raises(SchemaError, match="'is_padding', sample 1"):
        DEFAULT_SCHEMA.validate(batch)
    batch["is_padding"] = [torch.tensor(True), None]
    assert real_indices(batch) == [1]
    assert [tag is True for tag in DEFAULT_SCHEMA.validate(batch)["is_padding"]] == [True, False]


@pytest.mark.parametrize("bad", [0.0, "0", None, True, [0], torch.tensor(True)])
def test_indices_are_integers(bad: Any) -> None:
    for call in (
        lambda: restore_order(["a", "b"], [1, bad], 2),
        lambda: apply_order(["a", "b"], [1, bad]),
    ):
        with pytest.raises(OrderError, match="expected integer "):
            call()
    assert restore_order(["a", "b"], torch.tensor([1, 0]), 2) == ["b", "a"]  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [3, None, {0: 1}, {0, 1}, "ab", torch.tensor(3)])
def test_what_has_no_entries_in_an_order_is_named(bad: Any) -> None:
    for name, call in {
        "sample_indices": lambda: restore_order(["a", "b"], bad, 2),
        "fields": lambda: sample_metrics({"rewards": [1.0]}, bad),
    }.items():
        with pytest.raises(BatchError, match=f"{name} must be a sequence"):
            call()


def test_a_number_of_samples_that_no_machine_holds_is_refused_at_once() -> None:
    with pytest.raises(OrderError, match="expected one value for each of 2147483648 samples"):
        restore_order(["a"], [0], 2**31)


def test_token_ids_are_of_the_vocabulary() -> None:
    require_vocabulary("tokens", [torch.tensor([0, 63]), torch.tensor([5])], 64)
    with pytest.raises(
        SchemaError,
        match=r"'tokens', sample 1: expected token ids of 0 to 63 \(use "
        r"the model's tokenizer, or build it with vocab_size=71\), found 64 at place 1",
    ):
        require_vocabulary("tokens", [torch.tensor([0, 63]), torch.tensor([5, 64, 70])], 64)


def test_token_ids_are_not_negative_where_they_count() -> None:
    labels = [torch.tensor([5, -100])]
    require_vocabulary("labels", labels, 64, [torch.tensor([1.0, 0.0])])
    require_vocabulary("labels", [torch.zeros(0, dtype=torch.int64)] * 2, 64)
    with pytest.raises(SchemaError, match=r"'labels', sample 0: .* found -100 at place 1"):
        require_vocabulary("labels", labels, 64, [torch.tensor([0.0, 0.5])])
