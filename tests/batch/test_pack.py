"""Rows: what they are made of, and what of them is made when, once for all rows and on a device."""

from __future__ import annotations

import itertools
import math
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from batch_cases import (
    MARKED,
    PAD,
    block_of,
    boundary_shapes,
    equal,
    make_samples,
    marked,
    merge_packed,
    pack_on_all_ranks,
    plain_row,
    sample_shapes,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import pad

from mcore_batching.batch import DEFAULT_SCHEMA, PackedMicroBatch, make_placeholder
from mcore_batching.batch.columns import Columns, sent
from mcore_batching.batch.loss import step_totals
from mcore_batching.batch.prefix_tree import find_forest_of
from mcore_batching.batch.row import packed_field
from mcore_batching.batch.row_block import RowBlock

Shapes = list[tuple[int, int]]
STREAMS = ("tokens", "labels", "position_ids", "loss_mask", "padding_mask")
TYPES = (torch.int64, torch.float32, torch.bool, torch.bfloat16, torch.uint8, torch.complex64)


def merged(rows: list[PackedMicroBatch], name: str) -> list:
    parts = [getattr(row, name) for row in rows]
    return merge_packed(parts, rows[0].host_cu_seqlens_padded, -1)[0].tolist()


def later(values: list, offsets: list[int], depth: int, missing: int = 0) -> list:
    """At each position the value `depth` positions on in its segment."""
    cut = [values[start:end] for start, end in itertools.pairwise(offsets)]
    return [value for each in cut for value in (each[depth:] + [missing] * depth)[: len(each)]]


def require_slices(rows: list[PackedMicroBatch]) -> None:
    """Every position of every rank's slices is in exactly one place, and so is every token."""
    for rank, index in enumerate(row.index for row in rows):
        held = [place for _, first, end in index.chunks for place in range(first, end)]
        assert index.positions.tolist() == held
        assert index.local(index.positions).tolist() == list(range(index.num_local))
        for other in rows[:rank]:
            assert (other.index.local(index.positions) == -1).all()
    positions = torch.cat([row.index.positions for row in rows]).sort().values
    assert positions.tolist() == list(range(rows[0].host_cu_seqlens_padded[-1]))
    span = rows[0].fields.token_span
    real = torch.cat([row.index.places(row.fields.token_span) for row in rows])
    assert real[real < span.end].sort().values.equal(span.places[:-1])


def require_row(
    rows: list[PackedMicroBatch], samples: dict[str, list], align: int, row_align: int
) -> None:
    """The streams of all ranks' slices of a row are those of `plain_row`, and fields come back."""
    size, depths = len(rows), len(rows[0].later)
    missing = [(0, min(total, 2)) for total in samples["total_lengths"]]
    flat = {
        "mark": torch.cat([*samples["mark"], torch.zeros(1, 2).long()]),
        # The last tokens of a sample have none.
        "fewer": torch.cat([*map(pad, samples["fewer"], missing), torch.zeros(1)]),
    }
    if "position_ids" in samples:
        axes = torch.tensor([7, 9])
        flat["position_ids"] = pad(torch.cat(samples["tokens"])[:, None] + axes, (0, 0, 0, 1))
    for name in {"labels", "loss_mask"} & {*samples}:
        flat[name] = pad(torch.cat(samples[name]), (0, 1))
    require_slices(rows)
    plain = plain_row(samples, align, row_align)
    for depth in range(depths + 1):
        streams = [row.later[depth - 1] if depth else row for row in rows]
        for name in STREAMS[: 5 if not depth else 4]:
            full = merge_packed([getattr(each, name) for each in streams], plain.offsets, -1)
            wanted: Any = [later(getattr(plain, name), plain.offsets, depth)]
            if name in flat:  # the samples' own
                places = later(plain.places, plain.offsets, depth, -1)
                wanted = flat[name][places].T.reshape(full.shape).tolist()
            assert full.tolist() == wanted, (name, depth)
        for name in ("mark", "fewer"):
            parts = [packed_field(row.index, row.fields, MARKED[name], depth)[0] for row in rows]
            places = later(plain.places, plain.offsets, depth, -1)
            assert torch.equal(merge_packed(parts, plain.offsets), flat[name][places]), name
    # Each response token is the label where it is predicted, on the rank that has the position.
    labels = torch.zeros(len(plain.response_weights), dtype=torch.int64)
    for row in rows:
        owned, positions = row.responses.owned_indices, row.responses.owned_positions
        assert not labels[owned].any()
        labels[owned] = row.tokens.new_tensor(plain.labels)[row.index.positions[positions]]
        assert row.responses.loss_masks.tolist() == plain.response_weights
        assert row.responses.distinct_positions is None
        types = [getattr(row, name).dtype for name in (*STREAMS, "cu_seqlens_padded")]
        assert types == [*[torch.int64] * 3, torch.float32, torch.bool, torch.int32]
        assert row.tokens.shape == row.loss_mask.shape == (1, plain.offsets[-1] // size)
        assert row.cu_seqlens_padded.tolist() == plain.offsets
        assert list(row.host_cu_seqlens_padded) == plain.offsets
        assert row.max_seqlen == max(np.diff(plain.offsets))
        assert row.total_lengths == samples["total_lengths"]
        assert row.response_lengths == samples["response_lengths"]
        assert row.num_samples == len(samples["tokens"])
        _, weights = step_totals(row.fields, depths=depths)
        masks = [later(plain.loss_mask, plain.offsets, depth) for depth in range(depths + 1)]
        assert weights == [*map(sum, masks)]
        for name, values in samples.items():
            assert equal(row[name], values), name
    assert labels.tolist() == plain.response_labels
    trained = sum(weight != 0 for weight in plain.response_weights)
    assert sum(row.owned_num_tokens for row in rows) == trained


def require_packed(
    of_rows: list[Shapes],
    size: int,
    align: int,
    row_align: int,
    depths: int = 2,
    has_axes: bool = True,
    has_labels: bool = False,
) -> None:
    """Rows are packed at once as each is alone, by each rank, in every epoch."""
    shapes = [*itertools.chain(*of_rows)]
    samples = marked(shapes) | {"is_padding": [i % 4 == 3 for i in range(len(shapes))]}
    if not has_axes or not sum(samples["total_lengths"]):
        del samples["position_ids"]
    if has_labels:
        samples["labels"] = [tokens + 1000 for tokens in samples["tokens"]]
        samples["loss_mask"] = [tokens / 8 for tokens in samples["tokens"]]
    columns = Columns.read(samples, MARKED)
    # From the last sample to the first.
    numbers = iter(range(len(shapes))[::-1])
    indices = [[*itertools.islice(numbers, len(each))] for each in of_rows]
    options = {"pad_token_id": PAD, "depths": depths, "has_labels": has_labels}
    blocks = [
        block_of(columns, indices, align, row_align, size, rank, **options) for rank in range(size)
    ]
    for _ in range(2):
        for row, *slices in zip(indices, *(block.rows() for block in blocks), strict=True):
            chosen = {name: [values[i] for i in row] for name, values in columns.items()}
            assert [each.sample_indices for each in slices] == [tuple(row)] * size
            require_row(slices, chosen, align, row_align)
        for block in blocks:
            block.forget_index()


ROWS = st.lists(sample_shapes(), min_size=1, max_size=3)


@settings(max_examples=200, deadline=None)
@given(
    ROWS,
    st.sampled_from([1, 2, 3, 4]),
    st.integers(1, 4),
    st.integers(1, 40),
    st.integers(0, 5),
    st.booleans(),
    st.booleans(),
)
def test_any_samples_are_packed_token_by_token_and_come_back(
    of_rows: list[Shapes],
    size: int,
    factor: int,
    row: int,
    depths: int,
    has_axes: bool,
    has_labels: bool,
) -> None:
    align = (2 * size if size > 1 else 1) * factor
    require_packed(of_rows, size, align, math.lcm(align, row), depths, has_axes, has_labels)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_boundary_lengths(size: int) -> None:
    align = 2 * size if size > 1 else 1
    require_packed([boundary_shapes(size)], size, align, 5 * align)
    require_packed([[shape] for shape in boundary_shapes(size)], size, align, align)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_placeholder_trains_nothing(size: int) -> None:
    samples = make_samples([(5, 3)]) | {"rewards": [1.5], "position_ids": [torch.arange(5)]}
    placeholder = make_placeholder(DEFAULT_SCHEMA, samples, samples, pad_token_id=7)
    rows = pack_on_all_ranks(placeholder, size, sample_indices=())
    for row in rows:
        assert (row.num_samples, row.sample_indices, row.is_placeholder) == (0, (), True)
        assert (row.total_lengths, row.response_lengths) == ([1], [0])
        assert all(value is not None for values in row.fields.values() for value in values)
    padding = 2 * size - 1 if size > 1 else 0
    assert merged(rows, "tokens") == [7] + [PAD] * padding
    assert merged(rows, "padding_mask") == [False] + [True] * padding
    # Whatever its sample holds.
    for row in (*rows, *pack_on_all_ranks(make_samples([(4, 3)]), size, sample_indices=())):
        assert row.loss_mask.sum() == 0


def test_without_masks_the_whole_response_is_trained() -> None:
    samples = make_samples([(4, 3), (6, 2)]) | {"is_padding": [True, False]}
    del samples["loss_masks"]
    (row,) = pack_on_all_ranks(samples)
    assert row.loss_mask.tolist() == [[0, 0, 0, 0, 0, 0, 0, 1, 1, 0]]


@pytest.mark.parametrize("has_masks", [True, False])
def test_rows_are_made_where_the_tokens_are(has_masks: bool) -> None:
    """As on a GPU: what is made without naming a device is on another one than the tokens."""
    samples = make_samples([(4, 2), (3, 3), (2, 1)]) | {"is_padding": [False, False, True]}
    if not has_masks:
        del samples["loss_masks"]
    expected = pack_on_all_ranks(samples, 2, depths=1)
    with torch.device("meta"):
        rows = pack_on_all_ranks(samples, 2, depths=1)
    for row, wanted in zip(rows, expected, strict=True):
        for name in STREAMS:
            assert torch.equal(getattr(row, name), getattr(wanted, name)), name
        assert torch.equal(row.later[0].labels, wanted.later[0].labels)
        assert torch.equal(row.responses.loss_masks, wanted.responses.loss_masks)


def test_rows_are_copies_of_the_samples_in_every_epoch() -> None:
    """What is done to what was given, and to rows on a device, changes neither."""
    samples = make_samples([(4, 2), (3, 3)]) | {"uids": ["a", "b"], "values": None}
    given = [each.clone() for each in samples["tokens"]]
    columns = Columns.read(samples, DEFAULT_SCHEMA)
    for each in samples["tokens"]:
        each.zero_()
    block = block_of(columns, [[0], [1]])
    for _ in range(2):
        for row, tokens in zip(block.rows(), given, strict=True):
            assert row.tokens[0].tolist() == row["tokens"][0].tolist() == tokens.tolist()
            for value in (row.tokens, row["tokens"][0], row.responses.loss_masks):
                value.zero_()
    assert equal(columns["tokens"], given)
    # Fields are moved when they are read, whoever reads them.
    assert all(field is not None for field in dict(block.rows()[0].fields.fields).values())
    with pytest.raises(KeyError, match=r"no field 'values' in this micro-batch; it has \['adv"):
        row["values"]


@pytest.mark.parametrize("size", [1, 2])
def test_routed_experts_are_padded_with_different_experts(size: int) -> None:
    """All-zero rows would send every slot of every padding token to expert 0."""
    samples = make_samples([(5, 2), (1, 0), (3, 1)])
    samples["rollout_routed_experts"] = [
        torch.tensor([[[7, 3], [2, 5]]], dtype=torch.int16).expand(total - 1, 2, 2)
        for total in samples["total_lengths"]
    ]
    rows = pack_on_all_ranks(samples, size, row_alignment_tokens=24)
    offsets = rows[0].host_cu_seqlens_padded
    parts = [row.packed("rollout_routed_experts")[0] for row in rows]
    full = merge_packed(parts, offsets)
    assert full.shape == (24, 2, 2)
    assert full.dtype == torch.int16
    assert bool((full[..., 0] != full[..., 1]).all())
    assert bool((full >= 0).all())
    assert int(full.max()) == 7
    for i, value in enumerate(samples["rollout_routed_experts"]):
        assert torch.equal(full[offsets[i] : offsets[i] + len(value)], value)
    used = full[offsets[3] :].unique()
    assert len(used) == 8, "padding goes round over the experts, not to two of them"
    # A placeholder's zeros name fewer experts than a token has.
    name = "rollout_routed_experts"
    row = pack_on_all_ranks(samples | {name: [each * 0 for each in samples[name]]})[0]
    padding = row.packed(name)[0][row.index.is_absent(1)]
    assert bool((padding[..., 0] != padding[..., 1]).all())


def test_a_row_goes_to_a_device_with_all_its_tensors() -> None:
    samples = make_samples([(4, 2)]) | {
        "uids": ["a"],
        "multimodal_train_inputs": [{"pixels": torch.rand(2, 2)}],
        "rewards": [0.5],
    }
    (moved,) = pack_on_all_ranks(samples, device="meta", depths=1)
    tensors = [getattr(moved, name) for name in (*STREAMS, "cu_seqlens_padded")]
    tensors += [moved.responses.owned_indices, moved.later[0].labels, moved["tokens"][0]]
    tensors += [moved["multimodal_train_inputs"][0]["pixels"]]
    assert {each.device.type for each in tensors} == {"meta"}
    assert (moved["rewards"], moved["uids"]) == ([0.5], ["a"])
    assert (moved.sample_indices, moved.host_cu_seqlens_padded) == ((0,), (0, 4))


DEPTHS = 2


def branches() -> dict[str, list]:
    """Samples that begin alike at three places, two of them turns, two that train one token."""
    shapes = [(8, 3), (5, 2), (12, 4), (4, 4), (14, 7), (14, 6), (3, 0)]
    samples = make_samples(shapes)
    tokens = samples["tokens"]
    for sample, other, common in ((0, 2, 8), (3, 2, 4), (4, 2, 9), (5, 4, 12), (6, 1, 3)):
        tokens[sample] = torch.cat((tokens[other][:common], tokens[sample][common:]))
    samples["mark"] = [each * 2 for each in tokens]
    return samples


@pytest.mark.parametrize("size", [1, 2, 4])
def test_samples_that_begin_alike_are_laid_out_once(size: int) -> None:
    samples = branches()
    tokens, responses = samples["tokens"], samples["response_lengths"]
    columns = Columns.read(samples, MARKED)
    forest = find_forest_of(columns, [0] * len(tokens), spare=DEPTHS)
    assert forest.has_branches
    rows = pack_on_all_ranks(samples, size, schema=MARKED, forest=forest, depths=DEPTHS)
    assert forest.tokens < sum(map(len, tokens))
    assert sum(row.tokens.numel() for row in rows) == -(-forest.tokens // (2 * size)) * 2 * size
    assert all(row.cu_seqlens_padded.tolist() == [0, row.tokens.numel() * size] for row in rows)
    # Each row's own padding, with what stands there, and no token elsewhere.
    held = {name: merged(rows, name) for name in ("tokens", "position_ids", "padding_mask")}
    nodes, offsets = rows[0].nodes, rows[0].host_cu_seqlens_padded
    held["mark"] = merge_packed([row.packed("mark")[0] for row in rows], offsets).tolist()
    assert sum(held["padding_mask"]) == len(held["tokens"]) - forest.tokens
    streams = [[row.labels[0], *(each.labels[0] for each in row.later)] for row in rows]
    labels_at = [merge_packed(each, offsets).tolist() for each in zip(*streams, strict=True)]
    for sample, path in enumerate(nodes.paths):
        ids = tokens[sample].tolist()
        places = [place for node in path for place in range(*nodes.offsets[node : node + 2])]
        own = places[: len(ids)]
        for name, wanted in (
            ("tokens", ids),
            ("position_ids", [*range(len(ids))]),
            ("padding_mask", [False] * len(ids)),
            ("mark", samples["mark"][sample].tolist()),
        ):
            assert [held[name][place] for place in own] == wanted
        for depth, labels in enumerate(labels_at, start=1):
            assert [labels[place] for place in own[: max(len(ids) - depth, 0)]] == ids[depth:]
    # Wherever a token of a response is predicted it is the label.
    ends = zip(tokens, responses, strict=True)
    wanted_labels = torch.cat([ids[len(ids) - own :] for ids, own in ends])
    is_predicted = torch.ones(len(wanted_labels), dtype=torch.bool)
    is_predicted[sum(responses[:3])] = False  # the first of a response without a prompt
    predicted = is_predicted & False
    for row in rows:
        places, positions = row.responses.owned_indices, row.responses.owned_positions
        assert row.labels[0, positions].equal(wanted_labels[places])
        assert not predicted[places].any()
        predicted[places] = True
        distinct, at = row.responses.distinct_positions, row.responses.distinct_indices
        assert distinct is not None
        assert at is not None
        assert distinct.tolist() == sorted(set(positions.tolist()))
        assert distinct[at].equal(positions)
    assert predicted.equal(is_predicted)
    # What several samples train weighs as much as in all of them.
    _, sums = step_totals(rows[0].fields, depths=DEPTHS)
    masks = [[row.loss_mask, *(each.loss_mask for each in row.later)] for row in rows]
    assert [sum(float(mask.sum()) for mask in each) for each in zip(*masks, strict=True)] == sums


def test_branches_of_several_rows_are_laid_out_as_those_of_one() -> None:
    columns = Columns.read({name: values * 2 for name, values in branches().items()}, MARKED)
    forest = find_forest_of(columns, [0] * 7 + [1] * 7, spare=DEPTHS)
    rows = [[*range(7)], [*range(7, 14)]]
    first, second = block_of(columns, rows, forest=forest, depths=DEPTHS).rows()
    names = ("owned_positions", "owned_indices", "distinct_positions", "distinct_indices")
    for name in names:
        assert getattr(first.responses, name).equal(getattr(second.responses, name)), name
    for one, other in zip((first, *first.later), (second, *second.later), strict=True):
        for name in STREAMS[:4]:
            assert getattr(one, name).equal(getattr(other, name)), name


def test_only_turns_keep_a_segment_for_each_sample() -> None:
    samples = make_samples([(8, 3), (5, 2), (12, 4), (4, 4), (0, 0)])
    for turn in (0, 3):
        samples["tokens"][turn] = samples["tokens"][2][: len(samples["tokens"][turn])].clone()
    forest = find_forest_of(Columns.read(samples, DEFAULT_SCHEMA), [0] * 5)
    (row,) = pack_on_all_ranks(samples, forest=forest)
    assert row.host_cu_seqlens_padded == (0, 5, 17, 18)
    assert row.nodes.paths == ((1,), (0,), (1,), (1,), (2,))
    # Responses of two samples overlap; the row's own padding is of none.
    assert row.responses.distinct_positions is not None
    two = {name: values[1:3] for name, values in samples.items()}
    two["tokens"][0] = two["tokens"][1][:5]
    forest = find_forest_of(Columns.read(two, DEFAULT_SCHEMA), [0] * 2)
    (row,) = pack_on_all_ranks(two, forest=forest, row_alignment_tokens=32)
    assert row.nodes.paths == ((0,), (0,))
    assert row.responses.distinct_positions is not None


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
    assert sent(parameter, torch.device("cpu")) is parameter


def test_a_change_in_place_is_none_of_the_neighbours() -> None:
    """Autograd would refuse a backward pass through a neighbour of what has been changed."""
    columns = Columns.read(make_samples([(4, 3), (4, 3)]), DEFAULT_SCHEMA)
    one, other = block_of(columns, [[0], [1]]).rows()
    pairs = [copies([torch.ones(2), torch.ones(2)]), [one.loss_mask, other.loss_mask]]
    pairs.append(columns["advantages"])
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
