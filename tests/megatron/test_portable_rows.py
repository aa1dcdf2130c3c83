"""Rows that go to the device in one copy, and when they are made."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mcore_batching.batch import DEFAULT_SCHEMA, PackedMicroBatch, pack
from mcore_batching.megatron import prepare
from mcore_batching.megatron.prepare import PortableRow, PreparedStep


@pytest.fixture
def row() -> PackedMicroBatch:
    samples: dict[str, Any] = {
        "tokens": [torch.tensor([1, 2, 3]), torch.tensor([4, 5])],
        "total_lengths": [3, 2],
        "response_lengths": [2, 1],
        "advantages": [torch.tensor([0.5, 0.25]), torch.tensor([0.125])],
        "multimodal_train_inputs": [{"pixels": torch.ones(2, 3)}, {}],
    }
    return pack(samples, schema=DEFAULT_SCHEMA, sample_indices=(0, 1))


def storages(row: PackedMicroBatch, names: tuple[str, ...]) -> set[int]:
    found: set[int] = set()

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.add(tensor.untyped_storage().data_ptr())
        return tensor

    row.mapped(note, names)
    return found


@pytest.mark.parametrize("is_last", [True, False])
def test_each_stage_gets_what_it_reads_in_one_copy(
    row: PackedMicroBatch, is_last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "is_last_stage", lambda: is_last)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    moved = PortableRow.of_stage(row).on_device()
    names = ("tokens", "position_ids", "padding_mask", "cu_seqlens", "cu_seqlens_padded", "fields")
    if is_last:
        names += ("labels", "loss_mask", "responses")
        assert moved.fields.keys() == row.fields.keys()
        assert torch.equal(moved["advantages"][0], row["advantages"][0])
        assert torch.equal(moved.responses.owned_positions, row.responses.owned_positions)
    else:
        assert list(moved.fields) == ["multimodal_train_inputs"]
        assert moved.labels is row.labels
    assert len(storages(moved, names)) == 1
    assert not storages(moved, names) & storages(row, names)
    assert torch.equal(moved["multimodal_train_inputs"][0]["pixels"], torch.ones(2, 3))
    for name in ("tokens", "labels", "position_ids", "loss_mask", "padding_mask"):
        assert torch.equal(getattr(moved, name), getattr(row, name))


@pytest.mark.parametrize(("always_fit", "at_once"), [(True, 1), (False, 3)])
def test_rows_that_cannot_fail_are_packed_when_they_are_drawn_and_all_once(
    row: PackedMicroBatch, always_fit: bool, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "is_last_stage", lambda: True)
    monkeypatch.setattr(prepare, "is_replayed", lambda chunks: False)
    monkeypatch.setattr(prepare, "replayable", lambda chunks, row, names_of: row)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    made: list[int] = []

    def packed(step: int, slot: int, depths: int) -> PackedMicroBatch:
        made.append(slot)
        return row

    schedule: Any = SimpleNamespace(
        steps=[((0, 1), (2,), ())],
        row=packed,
        rows_always_fit=always_fit,
        made_rows={},
        names_of=None,
    )
    for epoch in range(2):
        portable = prepare._Rows(schedule, 0, 0, [], None)
        assert len(made) == (3 if epoch else at_once)
        step = PreparedStep(schedule, 0, portable, {}, None)  # type: ignore[arg-type]
        first, second = (list(each) for each in step.iterators(2))
        assert made == [0, 1, 2]
        assert all(one.row is other.row for one, other in zip(first, second, strict=True))
        for each in first:
            assert torch.equal(each.row["advantages"][0], torch.tensor([0.5, 0.25]))
            each.row["advantages"][0].zero_()  # a loss function's own, until the next epoch
