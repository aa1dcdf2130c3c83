"""Rows of a step: made in blocks when they are drawn, sent to the device in one copy each."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mcore_batching.batch import DEFAULT_SCHEMA, PackedMicroBatch, make_placeholder
from mcore_batching.batch.columns import Columns
from mcore_batching.batch.row_block import Layout, RowBlock
from mcore_batching.batch.row_index import Nodes
from mcore_batching.megatron import prepare
from mcore_batching.megatron.prepare import PreparedStep, StepRows

LENGTHS = [3, 2, 4, 1, 5]
STEP = ((0, 1), (2,), (3,), (), (4,))
SAMPLES: dict[str, Any] = {
    "tokens": [torch.arange(1, length + 1) for length in LENGTHS],
    "total_lengths": LENGTHS,
    "response_lengths": [length - 1 for length in LENGTHS],
    "advantages": [torch.arange(length - 1) + 0.5 for length in LENGTHS],
    "multimodal_train_inputs": [{"pixels": torch.ones(2, 3) * length} for length in LENGTHS],
}


@pytest.fixture(autouse=True)
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    monkeypatch.setattr(prepare, "is_last_stage", lambda: True)


def schedule(packed: list[list[int]], sizes: tuple[int, ...] = (1,) * len(STEP)) -> Any:
    """Of one step; the slots of each block that is packed are noted."""
    columns = Columns.read(SAMPLES, DEFAULT_SCHEMA)
    template = make_placeholder(DEFAULT_SCHEMA, list(SAMPLES), SAMPLES)
    placeholder = Columns.read(template, DEFAULT_SCHEMA)

    def rows(step: int, slots: list[int], depths: int, *, has_labels: bool) -> RowBlock:
        packed.append(slots)
        indices = [STEP[slot] for slot in slots]
        is_placeholder = not indices[0]
        of_block = placeholder if is_placeholder else columns
        samples = [[0]] if is_placeholder else indices
        return RowBlock(
            of_block,
            samples,
            [Nodes.of(of_block.total_lengths, row, None, 4, 1) for row in samples],
            Layout(context_parallel_size=sizes[slots[0]]),
            sample_indices=indices,
            is_placeholder=is_placeholder,
        )

    return SimpleNamespace(
        steps=[STEP],
        own_lengths=LENGTHS,
        row_sizes=lambda step: sizes,
        made_rows={},
        rows=rows,
    )


def prepared(of: Any) -> PreparedStep:
    rows = StepRows.of(of, 0, 0, has_labels=False)
    return PreparedStep(of, 0, rows, {}, None, None)  # type: ignore[arg-type]


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def tensors_of(row: PackedMicroBatch) -> dict[str, torch.Tensor]:
    names = ("tokens", "position_ids", "padding_mask", "cu_seqlens_padded", "labels")
    return {
        **{name: getattr(row, name) for name in (*names, "loss_mask")},
        **{name: value for name, value in vars(row.responses).items() if value is not None},
    }


@pytest.mark.parametrize("is_last", [True, False])
def test_each_stage_gets_what_it_reads_in_one_copy_a_block(
    is_last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "is_last_stage", lambda: is_last)
    step = prepared(schedule([]))
    host = [row for n in range(len(step.rows.blocks)) for row in step.rows.block(n).rows()]
    (moved,) = ([*each] for each in step.iterators(1))
    assert [row.sample_indices for row in moved] == [*STEP]
    assert [row.num_samples for row in moved] == [2, 1, 1, 0, 1]
    for row, own in zip(moved, host, strict=True):
        read = tensors_of(row)
        if not is_last:  # labels and the like stay on the host
            read = {name: read[name] for name in prepare.MODEL_INPUTS}
        pixels = row["multimodal_train_inputs"][0].get("pixels")
        if pixels is not None:
            read["pixels"] = pixels
        if is_last:
            assert row.fields.keys() == SAMPLES.keys()
            read["advantages"] = row.fields.flat("advantages")
        else:
            assert list(row.fields) == ["multimodal_train_inputs"]
        filled = [tensor for tensor in read.values() if tensor.numel()]
        assert len(set(map(storage, filled))) == 1
        assert not set(map(storage, filled)) & set(map(storage, tensors_of(own).values()))
        for name, value in tensors_of(own).items():
            assert torch.equal(tensors_of(row)[name], value), name
    if is_last:
        for row in moved:
            for index, value in zip(row.sample_indices, row["advantages"], strict=False):
                assert torch.equal(value, SAMPLES["advantages"][index])
    with pytest.raises(KeyError):
        moved[0]["rewards"]


def test_rows_are_packed_in_blocks_when_they_are_drawn_and_once_for_all_epochs() -> None:
    packed: list[list[int]] = []
    of = schedule(packed)
    for epoch in range(2):
        step = prepared(of)
        assert len(packed) == (4 if epoch else 0)
        first, second = (list(each) for each in step.iterators(2))
        # The first alone, for which the device waits; a placeholder's sample is another's.
        assert packed == [[0], [1, 2], [3], [4]]
        assert all(one is other for one, other in zip(first, second, strict=True))
        assert torch.equal(first[0]["advantages"][0], torch.tensor([0.5, 1.5]))
        first[0]["advantages"][0].zero_()  # a loss function's own, until the next epoch
        first[0].labels.zero_()


def test_blocks_end_where_the_context_parallel_size_changes_or_they_are_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prepare, "_BLOCK_TOKENS", 4)
    assert StepRows(schedule([]), 0, 0, has_labels=False).blocks == [[0], [1], [2], [3], [4]]
    monkeypatch.setattr(prepare, "_BLOCK_TOKENS", 5)
    assert StepRows(schedule([]), 0, 0, has_labels=False).blocks == [[0], [1, 2], [3], [4]]
    sizes = (1, 1, 2, 2, 2)
    assert StepRows(schedule([], sizes), 0, 0, has_labels=False).blocks == [[0], [1], [2], [3], [4]]
