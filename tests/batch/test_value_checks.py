"""Values that torch would take for something else are refused by name."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from mcore_batching.batch import DEFAULT_SCHEMA, BatchError, SchemaError, make_placeholder, pack
from mcore_batching.rl import left_pad, pad_batch

SAMPLES: dict[str, Any] = {
    "tokens": [[1, 2, 3], [4, 5]],
    "total_lengths": [3, 2],
    "response_lengths": [2, 1],
}


def packed(samples: dict[str, Any], **options: Any) -> Any:
    return pack(samples, schema=DEFAULT_SCHEMA, sample_indices=(0, 1), **options)


@pytest.mark.parametrize("bad", [math.nan, -1, -0.5, math.inf])
@pytest.mark.parametrize("make", [list, torch.tensor, np.array])
def test_loss_masks_are_finite_weights_of_0_or_more(bad: float, make: Any) -> None:
    batch = SAMPLES | {"loss_masks": [make([1.0, 0.5]), make([bad])]}
    with pytest.raises(SchemaError, match=f"'loss_masks', sample 1: .* 0 or more, found {bad}"):
        DEFAULT_SCHEMA.validate(batch)
    with pytest.raises(SchemaError, match="'loss_masks', sample 1"):
        packed(batch)


@pytest.mark.parametrize("masks", [[[1, 0], [1]], [torch.ones(2, dtype=torch.bool), [0.5]]])
def test_loss_masks_of_any_type_are_weights(masks: Any) -> None:
    DEFAULT_SCHEMA.validate(SAMPLES | {"loss_masks": masks})


@pytest.mark.parametrize("bad", [["1", "2"], [1, None], [1, [2]]])
def test_lists_that_are_no_tensor_are_refused(bad: Any) -> None:
    batch = SAMPLES | {"loss_masks": [bad, [1]]}
    with pytest.raises(SchemaError, match="'loss_masks', sample 0"):
        packed(batch)


def test_integers_are_integers_throughout() -> None:
    """int64 would make 6 of 6.5; the first entry alone tells nothing."""
    for name in ("tokens", "position_ids"):
        batch = SAMPLES | {name: [[1, 2, 3], [4, 6.5]]}
        with pytest.raises(SchemaError, match=f"'{name}', sample 1: expected integers throughout"):
            packed(batch)
        with pytest.raises(SchemaError, match=f"'{name}', sample 1: expected integers throughout"):
            left_pad(batch, pad_token_id=0)


@pytest.mark.parametrize("bad", [True, 1.0, None, "1", math.nan, 2**63, torch.tensor(True)])
def test_a_token_id_is_an_integer(bad: Any) -> None:
    calls = [
        lambda: packed(SAMPLES, pad_token_id=bad),
        lambda: make_placeholder(DEFAULT_SCHEMA, SAMPLES, None, pad_token_id=bad),
        lambda: left_pad(SAMPLES, pad_token_id=bad),
        lambda: pad_batch(SAMPLES, 4, pad_token_id=bad),
    ]
    for call in calls:
        with pytest.raises(BatchError, match="pad_token_id must be the id of a token, an integer"):
            call()
    if bad is not None:
        with pytest.raises(BatchError, match="response_token_id must be the id of a token"):
            pad_batch(SAMPLES, 4, pad_token_id=0, response_token_id=bad)


def test_a_token_id_of_any_library_counts() -> None:
    for seven in (7, np.int64(7), torch.tensor(7)):
        assert packed(SAMPLES, pad_token_id=seven, row_alignment_tokens=8).tokens[0, -1] == 7
