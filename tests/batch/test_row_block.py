"""Rows packed at once are those packed alone, and go to a device together, in one buffer."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from batch_cases import block_of, equal, full_batch, make_samples, sample_shapes
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.packing import pack

from mcore_batching.batch import DEFAULT_SCHEMA, Kind, PackedMicroBatch
from mcore_batching.batch.columns import Columns, sent
from mcore_batching.batch.row_block import PinnedBuffer

CPU = torch.device("cpu")
TYPES = (torch.int64, torch.float32, torch.bool, torch.bfloat16, torch.uint8, torch.complex64)
Shapes = list[tuple[int, int]]


def contents(row: PackedMicroBatch) -> dict[str, Any]:
    """All that a row holds, its fields by sample."""
    own = {name: value for name, value in vars(row).items() if name not in ("fields", "index")}
    own["later"] = [vars(each) for each in row.later]
    own["responses"] = vars(row.responses)
    return own | {"fields": dict(row.fields), "positions": row.index.positions}


@st.composite
def rows_of(draw: st.DrawFn) -> tuple[Shapes, list[list[int]]]:
    """Samples, and the rows of some of them in any order."""
    shapes = draw(sample_shapes(8))
    order = draw(st.permutations(range(len(shapes))))
    cuts = sorted(draw(st.sets(st.integers(1, len(shapes)), max_size=4)) | {1, len(shapes)})
    cut = zip([0, *cuts[:-1]], cuts, strict=True)
    return shapes, [order[start:end] for start, end in cut if end > start]


@settings(max_examples=150, deadline=None)
@given(
    rows_of(),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 3),
    st.integers(1, 30),
    st.integers(0, 3),
    st.booleans(),
    st.integers(0, 9),
)
def test_rows_of_a_block_are_those_packed_alone(
    drawn: tuple[Shapes, list[list[int]]],
    size: int,
    factor: int,
    row_multiple: int,
    depths: int,
    has_positions: bool,
    pad_token_id: int,
) -> None:
    shapes, rows = drawn
    samples = full_batch(shapes) | {"is_padding": [i % 3 == 2 for i in range(len(shapes))]}
    if not has_positions:
        del samples["position_ids"]
    align = (2 * size if size > 1 else 1) * factor
    alignments = align, math.lcm(align, row_multiple)
    options: dict[str, int] = {
        "context_parallel_size": size,
        "pad_token_id": pad_token_id,
        "depths": depths,
    }
    columns = Columns.read(samples, DEFAULT_SCHEMA)
    for rank in range(size):
        block = block_of(columns, rows, *alignments, **options, context_parallel_rank=rank)
        moved = block.pinned(CPU).on_device()
        assert block.owned_num_tokens == [row.owned_num_tokens for row in moved.rows()]
        for made, on_device, row in zip(block.rows(), moved.rows(), rows, strict=True):
            alone = pack(
                {k: v and [v[i] for i in row] for k, v in samples.items()},
                sample_indices=tuple(row),
                sample_alignment_tokens=alignments[0],
                row_alignment_tokens=alignments[1],
                context_parallel_rank=rank,
                **options,
            )
            expected = contents(alone)
            assert contents(made).keys() == expected.keys()
            for name, value in expected.items():
                assert equal(contents(made)[name], value), name
                assert equal(contents(on_device)[name], value), name
            # Padding goes round over the experts of the whole block.
            name, where = "rollout_routed_experts", ~alone.index.is_absent(1)
            assert torch.equal(made.packed(name)[0][where], alone.packed(name)[0][where])
            assert torch.equal(made.packed("tokens"), alone.packed("tokens"))


def test_what_is_done_to_rows_on_a_device_changes_neither_samples_nor_other_epochs() -> None:
    samples = make_samples([(4, 2), (3, 3)])
    columns = Columns.read(samples, DEFAULT_SCHEMA)
    block = block_of(columns, [[0], [1]]).pinned(CPU)
    for _ in range(2):
        for row, tokens in zip(block.on_device().rows(), samples["tokens"], strict=True):
            assert row.tokens[0].tolist() == row["tokens"][0].tolist() == tokens.tolist()
            for value in (row.tokens, row["tokens"][0], row.responses.loss_masks):
                value.zero_()
    assert [each.tolist() for each in columns["tokens"]] == [
        each.tolist() for each in samples["tokens"]
    ]


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
            context_parallel_size=size,
            context_parallel_rank=rank,
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


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(st.sampled_from(TYPES), st.lists(st.integers(0, 3), max_size=3)), max_size=8)
)
def test_tensors_come_back_as_they_were(kinds: list[tuple[torch.dtype, list[int]]]) -> None:
    tensors = [torch.randint(0, 9, shape).to(dtype) for dtype, shape in kinds]
    together = PinnedBuffer(tensors, pin_memory=False)
    back = together.on(CPU)
    for before, after in zip(tensors, back, strict=True):
        assert after.dtype == before.dtype
        assert torch.equal(after, before)
    filled = [tensor for tensor in back if tensor.numel()]
    assert len({tensor.untyped_storage().data_ptr() for tensor in filled}) <= 1
    assert all(tensor.storage_offset() * tensor.element_size() % 128 == 0 for tensor in back)


def test_views_and_strides_are_copied_alone() -> None:
    """Not the whole of what a view looks into."""
    whole = torch.arange(1000).view(100, 10)
    together = PinnedBuffer([whole[:, 3], whole[5].expand(4, 10)], pin_memory=False)
    column, repeated = together.on(CPU)
    assert torch.equal(column, whole[:, 3])
    assert torch.equal(repeated, whole[5].expand(4, 10))
    assert column.untyped_storage().nbytes() < 1500


def test_what_a_copy_would_lose_is_kept() -> None:
    """A graph, a subclass, a layout."""
    attached = torch.ones(2, requires_grad=True) * 2
    parameter = torch.nn.Parameter(torch.ones(2))
    sparse = torch.eye(2).to_sparse()
    back = PinnedBuffer([attached, parameter, sparse], pin_memory=False).on(CPU)
    assert back[0] is attached
    assert back[1] is parameter
    assert back[2] is sparse


def test_a_change_in_place_is_none_of_the_neighbours() -> None:
    """Autograd would refuse a backward pass through a neighbour of what has been changed."""
    first, second = PinnedBuffer([torch.ones(2), torch.ones(2)], pin_memory=False).on(CPU)
    weight = torch.ones(2, requires_grad=True)
    total = (weight * first).sum()
    second.mul_(2)
    total.backward()
    assert torch.equal(first, torch.ones(2))


def test_a_tensor_on_the_host_stays_there() -> None:
    tensor = torch.ones(2)
    assert sent(tensor, CPU) is tensor
