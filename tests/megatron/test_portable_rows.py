"""Rows that go to the device in one copy."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mcore_batching.batch import DEFAULT_SCHEMA, PackedMicroBatch, pack
from mcore_batching.megatron import prepare
from mcore_batching.megatron.prepare import PortableRow


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
