"""The examples in the docstrings of mcore_batching.batch are what the functions return."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mcore_batching.batch import (
    DEFAULT_SCHEMA,
    PackedMicroBatch,
    apply_order,
    pack,
    restore_order,
    sample_mean,
    token_mean,
)
from mcore_batching.batch.fields.value_shapes import count_of, describe, shape_of
from mcore_batching.batch.loss import step_totals
from mcore_batching.batch.rows.context_parallel import owned_response_mask
from mcore_batching.batch.rows.response_tokens import predicted_positions
from mcore_batching.batch.rows.row_layout import Row, padded_offsets


def row_of(totals: list[int], responses: list[int], **options: Any) -> PackedMicroBatch:
    first = [1 + sum(totals[:i]) for i in range(len(totals))]
    return pack(
        {
            "tokens": [list(range(a, a + n)) for a, n in zip(first, totals, strict=True)],
            "total_lengths": totals,
            "response_lengths": responses,
        },
        schema=DEFAULT_SCHEMA,
        sample_indices=range(len(totals)),
        **options,
    )


def test_pack() -> None:
    row = row_of([3, 2], [2, 1], sample_alignment_tokens=2)
    assert row.tokens.tolist() == [[1, 2, 3, 0, 4, 5]]
    assert row.loss_mask.tolist() == [[1, 1, 0, 0, 1, 0]]
    assert [value.tolist() for value in row["tokens"]] == [[1, 2, 3], [4, 5]]


def test_row_layout() -> None:
    assert padded_offsets([3, 2], 2, 8) == (0, 4, 6, 8)
    laid_out = Row((0, 4, 6, 8)).lay_out([torch.tensor([1, 2, 3]), torch.tensor([4, 5])], 0)
    assert laid_out.tolist() == [1, 2, 3, 0, 4, 5, 0, 0]


def test_slices_of_a_packed_row() -> None:
    row, offsets = torch.arange(12), (0, 4, 12)
    parts = [Row(offsets, 2, rank).local(row) for rank in (0, 1)]
    assert [part.tolist() for part in parts] == [[0, 3, 4, 5, 10, 11], [1, 2, 6, 7, 8, 9]]


def test_positions_and_weights_of_response_tokens() -> None:
    assert predicted_positions([0, 4], [3, 2], [2, 2]).tolist() == [0, 1, -1, 4]
    row = row_of([3, 2], [2, 2], sample_alignment_tokens=2)
    assert row.responses.loss_masks.tolist() == [1, 1, 0, 1]


def test_response_tokens_over_context_parallel_ranks() -> None:
    options = {"context_parallel_size": 2, "sample_alignment_tokens": 4}
    rows = [row_of([4], [3], context_parallel_rank=rank, **options) for rank in (0, 1)]
    owned = [owned_response_mask(row)[0].int().tolist() for row in rows]
    assert owned == [[1, 0, 0], [0, 1, 1]]


def test_shares_of_means() -> None:
    rows = [row_of([3], [2]), row_of([2], [1])]
    values = [[torch.tensor([6.0, 2.0])], [torch.tensor([1.0])]]
    totals = step_totals(rows)
    for mean, shares in ((token_mean, [8 / 3, 1 / 3]), (sample_mean, [2.0, 0.5])):
        found = [float(mean(v, row, totals)) for v, row in zip(values, rows, strict=True)]
        assert found == pytest.approx(shares)


def test_order() -> None:
    assert restore_order(["c", "a", "b"], [2, 0, 1], 3) == ["a", "b", "c"]
    assert apply_order(["a", "b", "c"], [2, 0, 1]) == ["c", "a", "b"]


def test_shapes_of_values() -> None:
    assert shape_of(torch.zeros(2, 3)) == (2, 3)
    assert describe(torch.zeros(2, 3)) == "a Tensor of shape [2, 3] and type torch.float32"
    assert count_of({"for": "the whole batch"}) is None
