"""Rows packed at once are those packed alone; what is read of them goes to a device at once."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from batch_cases import block_of, equal, make_samples
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_batching.batch import DEFAULT_SCHEMA, Kind
from mcore_batching.batch.columns import Columns, sent
from mcore_batching.batch.row_block import RowBlock

CPU = torch.device("cpu")
TYPES = (torch.int64, torch.float32, torch.bool, torch.bfloat16, torch.uint8, torch.complex64)
Shapes = list[tuple[int, int]]


def test_what_is_done_to_rows_on_a_device_changes_neither_samples_nor_other_epochs() -> None:
    samples = make_samples([(4, 2), (3, 3)])
    columns = Columns.read(samples, DEFAULT_SCHEMA)
    block = block_of(columns, [[0], [1]])
    for _ in range(2):
        for row, tokens in zip(block.rows(), samples["tokens"], strict=True):
            assert row.tokens[0].tolist() == row["tokens"][0].tolist() == tokens.tolist()
            for value in (row.tokens, row["tokens"][0], row.responses.loss_masks):
                value.zero_()
    assert [each.tolist() for each in columns["tokens"]] == [
        each.tolist() for each in samples["tokens"]
    ]
    # Fields are moved when they are read, whoever reads them.
    assert all(field is not None for field in dict(block.rows()[0].fields.fields).values())


@pytest.mark.parametrize("size", [1, 2])
def test_labels_and_masks_of_the_samples_are_taken_at_every_depth(size: int) -> None:
    shapes = [(5, 0), (3, 0)]
    samples = make_samples(shapes)
    samples["labels"] = [tokens + 100 for tokens in samples["tokens"]]
    samples["loss_mask"] = [torch.arange(len(tokens)) / 8 for tokens in samples["tokens"]]
    schema = DEFAULT_SCHEMA.declare("labels", Kind.PER_TOKEN).declare("loss_mask", Kind.PER_TOKEN)
    align = 4 if size == 2 else 1
    columns = Columns.read(samples, schema)
    found: dict[tuple[int, str, int], float] = {}
    for rank in range(size):
        block = block_of(
            columns,
            [[1], [0]],
            align,
            size=size,
            rank=rank,
            depths=1,
            has_labels=True,
        )
        for row in block.rows():
            for depth, stream in enumerate((row, row.later[0])):
                for name in ("labels", "loss_mask"):
                    values = getattr(stream, name)[0].tolist()
                    for at, value in zip(row.index.positions.tolist(), values, strict=True):
                        if at + depth < row.total_lengths[0]:
                            wanted = samples[name][row.sample_indices[0]][at + depth]
                            assert value == wanted, (name, depth, at)
                        else:
                            assert value == 0
                        found[row.sample_indices[0], f"{name} {depth}", at] = value
    assert len(found) == 4 * sum(-(-total // align) * align for total, _ in shapes)


def copies(values: list[Any]) -> list[Any]:
    columns = Columns.read(make_samples([(1, 0)]), DEFAULT_SCHEMA)
    return block_of(columns, [[0]]).copied_all(values)


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(st.sampled_from(TYPES), st.lists(st.integers(0, 3), max_size=3)), max_size=8)
)
def test_tensors_in_lists_move_by_one_copy_for_each_type(
    kinds: list[tuple[torch.dtype, list[int]]],
) -> None:
    tensors = [torch.randint(0, 9, shape).to(dtype) for dtype, shape in kinds]
    back = [each["a"] for each in copies([{"a": each} for each in tensors])]
    assert equal(back, tensors)
    filled = [tensor for tensor in back if tensor.numel()]
    storages = {tensor.untyped_storage().data_ptr() for tensor in filled}
    assert len(storages) == len({tensor.dtype for tensor in filled})


def test_each_type_moves_to_a_device_once_and_its_tensors_not_again() -> None:
    columns = Columns.read(make_samples([(1, 0)]), DEFAULT_SCHEMA)
    values = [torch.ones(2), torch.ones(3), torch.ones(2).long()]
    meta = torch.device("meta")
    block = block_of(columns, [[0]], device=meta)
    with torch.profiler.profile() as profile:
        moved = block.copied_all(values)
    assert [each.name for each in profile.events()].count("aten::_to_copy") == 2
    assert [(each.device, each.shape) for each in moved] == [(meta, each.shape) for each in values]


def test_views_and_strides_are_copied_alone() -> None:
    """Not the whole of what a view looks into."""
    whole = torch.arange(1000).view(100, 10)
    column, repeated = copies([whole[:, 3], whole[5].expand(4, 10)])
    assert torch.equal(column, whole[:, 3])
    assert torch.equal(repeated, whole[5].expand(4, 10))
    assert column.untyped_storage().nbytes() < 1500


def test_what_a_copy_would_lose_is_kept() -> None:
    """A graph, a subclass, a layout; what is no tensor."""
    attached = torch.ones(2, requires_grad=True) * 2
    parameter = torch.nn.Parameter(torch.ones(2))
    values = [attached, parameter, torch.eye(2).to_sparse(), "a text", None]
    assert all(one is other for one, other in zip(copies(values), values, strict=True))


def test_a_change_in_place_is_none_of_the_neighbours() -> None:
    """Autograd would refuse a backward pass through a neighbour of what has been changed."""
    samples = make_samples([(3, 2), (4, 3)])
    columns = Columns.read(samples, DEFAULT_SCHEMA)
    one, other = block_of(columns, [[0], [1]]).rows()
    pairs = [copies([torch.ones(2), torch.ones(2)]), [one.loss_mask, other.loss_mask]]
    for first, second in pairs:
        weight = torch.ones_like(first, requires_grad=True)
        before, total = first.clone(), (weight * first).sum()
        second.mul_(2)
        total.backward()
        assert torch.equal(first, before)


def test_a_tensor_is_made_when_it_is_read_and_once_for_all_rows_and_epochs() -> None:
    columns = Columns.read(make_samples([(4, 2), (3, 3)]), DEFAULT_SCHEMA)
    block = block_of(columns, [[0], [1]])
    made: list[str] = []
    make = RowBlock._make

    def noted(self: RowBlock, name: str, depth: int) -> Any:
        made.append(name)
        return make(self, name, depth)

    compact = mock.patch.object(Columns, "compact", autospec=True, side_effect=Columns.compact)
    with mock.patch.object(RowBlock, "_make", noted), compact as gathered:
        for _ in range(2):
            rows = block.rows()
            assert all(row.tokens is row.tokens for row in rows)
            assert rows[0]["advantages"][0].untyped_storage().data_ptr() == (
                rows[1]["advantages"][0].untyped_storage().data_ptr()
            )
    assert made == ["tokens"]
    assert gathered.call_count == 1


def test_a_tensor_on_the_host_stays_there() -> None:
    tensor = torch.ones(2)
    assert sent(tensor, CPU) is tensor
