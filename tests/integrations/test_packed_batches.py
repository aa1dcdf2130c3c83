"""Packed rows in the order in which a script unpacks its batch."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from packed_row_cases import EXPECTED, PAD, SAMPLES, found, prepared, rows

from mcore_batching.batch.columns import Columns
from mcore_batching.batch.loss import step_totals
from mcore_batching.integrations.megatron_lm import next_batch, script_batches
from mcore_batching.integrations.megatron_lm.script_batches import (
    SEVEN_FIELDS,
    SIX_FIELDS,
    TEN_FIELDS,
    PackedRows,
)
from mcore_batching.integrations.megatron_lm.stock_steps import FIELDS, STOCK_SCHEMA
from mcore_batching.megatron import DynamicBatchArgumentError


@pytest.mark.parametrize("names", [SIX_FIELDS, SEVEN_FIELDS, TEN_FIELDS], ids=["6", "7", "10"])
@pytest.mark.parametrize("by", ["number", "names", "names backwards"])
def test_fields_come_in_the_order_of_the_script(names: tuple[str, ...], by: str) -> None:
    if by == "names backwards":
        names = names[::-1]
    values = next_batch(rows(), len(names) if by == "number" else names)
    assert values is not None
    got = found(values, names)
    for name in FIELDS:
        assert torch.equal(got[name], torch.tensor(EXPECTED[name]).to(got[name].dtype)), name
    assert got["tokens"].dtype == got["labels"].dtype == torch.int64
    assert got["loss_mask"].dtype == torch.float32
    assert got["attention_mask"] is None


def test_later_tokens_have_the_labels_and_masks_of_the_batch() -> None:
    row = prepared(SAMPLES, depths=1)
    assert row.later[0].tokens.tolist() == [[2, 3, PAD, 0, 5, PAD, PAD, 0]]
    assert row.later[0].labels.tolist() == [[3, 7, 0, 0, 8, 0, 0, 0]]
    assert row.later[0].loss_mask.tolist() == [[1, 1, 0, 0, 1, 0, 0, 0]]
    columns = Columns.read(SAMPLES, STOCK_SCHEMA)
    _, weights = step_totals(columns, depths=1, has_labels=True)
    assert weights == [4, 3]


def test_rows_are_told_apart_by_parameters_or_by_offsets_where_scripts_make_them() -> None:
    values = next_batch(rows(), 6)
    assert values is not None
    params = found(values, SIX_FIELDS)["packed_seq_params"]
    assert params.qkv_format == "thd"
    assert params.cu_seqlens_q.tolist() == params.cu_seqlens_kv.tolist() == [0, 4, 8]
    assert params.max_seqlen_q == params.max_seqlen_kv == 4
    values = next_batch(rows(), 10)
    assert values is not None
    got = found(values, TEN_FIELDS)
    assert got["cu_seqlens_padded"].tolist() == [[0, 4, 8]]
    assert got["cu_seqlens_padded"].dtype == torch.int32
    assert int(got["max_seqlen"]) == 4
    assert got["hybrid_cp_group"] is None
    assert got["local_cp_size"] is None


@pytest.mark.parametrize(
    ("counts_flops", "is_placeholder", "lengths"),
    [(True, False, [3, 2]), (True, True, [0]), (False, False, []), (False, True, [])],
)
def test_statistics_of_lengths_count_real_samples_of_training_alone(
    counts_flops: bool, is_placeholder: bool, lengths: list[int]
) -> None:
    """Stock code takes lengths from ``cu_seqlens``; with fewer than two offsets it counts none."""
    values = next_batch(rows(counts_flops, is_placeholder), TEN_FIELDS)
    assert values is not None
    offsets = found(values, TEN_FIELDS)["cu_seqlens"]
    assert offsets.dtype == torch.int32
    assert offsets.shape == (1, len(lengths) + 1)
    assert offsets[0].diff().tolist() == lengths


@pytest.mark.parametrize(
    ("model_size", "times"),
    [
        (1, [1]),
        (1, [1, 0]),
        (1, [1, 0, 0, 0]),
        (2, [2]),
        (2, [1, 1]),
        (2, [1, 0, 1, 0]),
        (3, [2, 1]),
    ],
)
def test_a_row_counts_as_often_as_the_model_has_context_parallel_ranks(
    monkeypatch: pytest.MonkeyPatch, model_size: int, times: list[int]
) -> None:
    """Stock code divides by their number, also what rows on more or fewer ranks add up to. It adds
    up over all ranks in a step in which it was given any lengths: with fewer than two offsets a
    rank would stay away from that sum, and the others wait for it."""
    monkeypatch.setattr(script_batches, "row_group", lambda size: object())
    groups = SimpleNamespace(get_context_parallel_world_size=lambda: model_size)
    monkeypatch.setattr(script_batches, "parallel_state", groups)
    usual = prepared(SAMPLES)
    for rank, count in enumerate(times):
        shared = {"context_parallel_size": len(times), "context_parallel_rank": rank}
        row = dataclasses.replace(usual, **shared)
        (offsets,) = PackedRows(iter([row]), counts_flops=True).next_fields(["cu_seqlens"])
        assert offsets.dtype == torch.int32
        assert offsets[0].diff().tolist() == ([3, 2] * count or [0, 0])


def test_each_call_draws_the_next_row() -> None:
    both = PackedRows(
        iter([prepared(SAMPLES), prepared({k: v[1:] for k, v in SAMPLES.items()})]),
        counts_flops=True,
    )
    assert both.current is None
    shapes = []
    for _ in range(2):
        values = next_batch(both, 6)
        assert values is not None
        assert both.current is not None
        assert both.current.tokens is values[0]
        shapes.append(tuple(values[0].shape))
    assert shapes == [(1, 8), (1, 4)]
    with pytest.raises(StopIteration):
        next_batch(both, 6)


@pytest.mark.parametrize("number", [0, 5, 8])
def test_numbers_of_fields_that_no_release_has_ask_for_names(number: int) -> None:
    with pytest.raises(DynamicBatchArgumentError, match=rf"{number}: give their names, as next"):
        next_batch(rows(), number)
    assert next_batch(iter([1]), 6) is None  # ordinary iterators are left to the script
    assert next_batch(None, 10) is None
