"""From stock batches to unpadded samples: nothing that is trained is lost, and nothing is added."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from packed_row_cases import SAMPLES
from torch import Tensor

from mcore_batching.batch import Kind
from mcore_batching.batch.columns import Columns
from mcore_batching.batch.loss import step_totals
from mcore_batching.integrations.megatron_lm.stock_steps import (
    FIELDS,
    STOCK_SCHEMA,
    StockDataError,
    num_truncated,
    unpadded_samples,
)

Rows = list[list[tuple[int, bool]]]
"""For every row its positions: which one of its document, and whether it is trained."""


def batch(rows: Rows) -> dict[str, Tensor]:
    """A stock batch of rows of one length; every token and label has a number of its own."""
    number, length = len(rows), len(rows[0])
    tokens = torch.arange(number * length).reshape(number, length)
    return {
        "tokens": tokens,
        "labels": tokens + 1000,
        "loss_mask": torch.tensor([[float(on) for _, on in row] for row in rows]),
        "position_ids": torch.tensor([[at for at, _ in row] for row in rows]),
    }


def masked(*masks: list[int]) -> dict[str, Tensor]:
    """A batch of rows of one document each, with these loss masks."""
    return batch([[(at, bool(on)) for at, on in enumerate(mask)] for mask in masks])


def lists(data: dict[str, Any], name: str = "tokens") -> list[list[int]]:
    return [values.tolist() for values in data[name]]


@st.composite
def rows_of_documents(draw_from: st.DrawFn) -> Rows:
    length = draw_from(st.integers(1, 12))
    rows = []
    for _ in range(draw_from(st.integers(1, 4))):
        starts = draw_from(st.sets(st.integers(1, length), max_size=3)) | {0}
        mask = draw_from(st.lists(st.booleans(), min_size=length, max_size=length))
        begun = [max(start for start in starts if start <= at) for at in range(length)]
        rows.append([(at - begun[at], mask[at]) for at in range(length)])
    return rows


@given(rows=rows_of_documents(), split=st.booleans())
def test_samples_are_runs_of_their_rows_without_a_tail(rows: Rows, split: bool) -> None:
    """Every trained position is in exactly one sample; every row has one."""
    given_batch = batch(rows)
    data = unpadded_samples([given_batch], split_documents=split)
    assert data.keys() == {*FIELDS, "total_lengths", "response_lengths"}
    assert data["response_lengths"] == [0] * len(data["tokens"])
    trained, length = given_batch["loss_mask"].bool(), given_batch["tokens"].shape[1]
    masks = torch.cat(data["loss_mask"]).bool()
    for name in FIELDS:
        assert [len(values) for values in data[name]] == data["total_lengths"]
        assert torch.cat(data[name])[masks].tolist() == given_batch[name][trained].tolist()
    rows_seen = []
    for tokens, mask, positions in zip(
        data["tokens"], data["loss_mask"], data["position_ids"], strict=True
    ):
        first, last = int(tokens[0]), int(tokens[-1])
        assert tokens.tolist() == list(range(first, last + 1))
        assert first // length == last // length
        rows_seen.append(first // length)
        assert bool(mask[-1]) or (len(mask) == 1 and not mask.any())
        if split:
            assert positions.tolist() == list(range(len(positions)))
        else:
            assert first % length == 0
    assert set(rows_seen) == set(range(len(rows)))
    assert split or len(rows_seen) == len(rows)
    assert len(unpadded_samples([given_batch] * 2, split_documents=split)["tokens"]) == 2 * len(
        rows_seen
    )


def test_a_row_that_begins_inside_a_document_is_not_lost() -> None:
    rows = [[(5, True), (6, True), (0, True), (1, False)]]
    data = unpadded_samples([batch(rows)], split_documents=True)
    assert lists(data, "position_ids") == [[5, 6], [0]]


PAD = -1


def packed(length: int, *conversations: int, fills: bool = False) -> dict[str, Any]:
    """A row of ``--sft``: conversations of these lengths, of which the first token is not trained.

    Its last label is padding, as `SFTDataset` makes it. ``fills``: offsets as from 0.19 on.
    """
    tokens = [100 * n + at for n, count in enumerate(conversations, 1) for at in range(count)]
    del tokens[length:]
    tokens += [PAD] * (length - len(tokens))
    labels = torch.tensor([*tokens[1:], PAD])
    offsets = [0, *np.cumsum(conversations[:-1]).tolist(), length]
    return {
        "tokens": torch.tensor([tokens]),
        "labels": labels[None],
        "loss_mask": ((labels != PAD) & (labels % 100 != 0)).float()[None],
        "position_ids": torch.arange(length)[None],
        "cu_seqlens": torch.tensor([offsets + [length] * (length if fills else 0)]),
    }


@pytest.mark.parametrize("fills", [False, True])
def test_conversations_of_a_row_are_samples(fills: bool) -> None:
    """Without padding; labels and masks are those of the row."""
    row = packed(9, 3, 2, 3, fills=fills)
    data = unpadded_samples([row], split_documents=False)
    assert lists(data) == [[100, 101], [200], [300, 301]]
    assert lists(data, "labels") == [[101, 102], [201], [301, 302]]
    row["loss_mask"][0, 2] = 1.0  # the label is the next conversation's first token
    data = unpadded_samples([row, packed(9, 9)], split_documents=False)
    assert lists(data)[0] == [100, 101, 102]
    assert lists(data, "labels")[0] == [101, 102, 200]
    assert lists(data)[3] == [100, 101, 102, 103, 104, 105, 106, 107]
    untrained = packed(9, 1, 3)
    assert lists(unpadded_samples([untrained], split_documents=False)) == [[100], [200, 201]]


def test_rows_that_end_inside_a_conversation_are_counted() -> None:
    rows = [packed(6, 3, 2), packed(6, 3, 5), packed(6, 9), packed(6, 5)]
    assert num_truncated(rows) == 2
    both = {name: torch.cat([row[name] for row in rows[1:3]]) for name in FIELDS}
    offsets = torch.tensor([[0, 3, 6, 6], [0, 6, 6, 6]])
    assert num_truncated([both | {"cu_seqlens": offsets}]) == 2
    assert num_truncated([masked([1, 1, 1])]) == 0


def test_samples_may_come_one_by_one() -> None:
    """As ``--use-varlen-dataset`` gives them, where a micro-batch is a list."""
    samples = [masked([1, 1, 1, 0]), masked([0, 1])]
    listed: Any = [{name: row[name][0] for name in FIELDS} for row in samples]
    data = unpadded_samples([listed, listed[:1]], split_documents=False)
    assert lists(data) == [[0, 1, 2], [0, 1], [0, 1, 2]]


def test_lacking_fields_and_unequal_numbers_of_rows_are_errors() -> None:
    given_batch: dict[str, Any] = masked([1], [1]) | {"attention_mask": None}
    with pytest.raises(ValueError, match="zip"):
        unpadded_samples(
            [given_batch | {"labels": given_batch["labels"][:1]}], split_documents=False
        )
    lacking = r"lacks labels, it has .*: yield tokens, labels"
    with pytest.raises(StockDataError, match=lacking):
        unpadded_samples([given_batch | {"labels": None}], split_documents=False)
    del given_batch["labels"]
    with pytest.raises(StockDataError, match=lacking):
        unpadded_samples([given_batch], split_documents=False)


def test_schema_takes_labels_and_masks_ready_made() -> None:
    for name in FIELDS:
        assert name in STOCK_SCHEMA
    for name in ("labels", "loss_mask"):
        assert STOCK_SCHEMA[name].kind is Kind.PER_TOKEN
    data = unpadded_samples([masked([1, 1, 0])], split_documents=False)
    STOCK_SCHEMA.resolve(data).validate(data)
    columns = Columns.read(SAMPLES, STOCK_SCHEMA)
    assert step_totals(columns, depths=1, has_labels=True)[1] == [4, 3]
