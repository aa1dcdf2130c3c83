"""The guarantees of `pack` and of the row that it makes."""

from __future__ import annotations

import itertools
import math

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
from mcore_batching.batch.columns import Columns
from mcore_batching.batch.loss import step_totals
from mcore_batching.batch.prefix_tree import find_forest_of
from mcore_batching.batch.row import packed_field

Shapes = list[tuple[int, int]]
STREAMS = ("tokens", "labels", "position_ids", "loss_mask", "padding_mask")


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
    size, depths, has_axes = len(rows), len(rows[0].later), "position_ids" in samples
    missing = [(0, min(total, 2)) for total in samples["total_lengths"]]
    flat = {
        "mark": torch.cat([*samples["mark"], torch.zeros(1, 2).long()]),
        # The last tokens of a sample have none.
        "fewer": torch.cat([*map(pad, samples["fewer"], missing), torch.zeros(1)]),
        "position_ids": pad(torch.cat(samples["tokens"]) + torch.tensor([[7], [9]]), (0, 1)),
    }
    require_slices(rows)
    plain = plain_row(samples, align, row_align)
    for depth in range(depths + 1):
        streams = [row.later[depth - 1] if depth else row for row in rows]
        for name in STREAMS[: 5 if not depth else 4]:
            full = merge_packed([getattr(each, name) for each in streams], plain.offsets, -1)
            if name == "position_ids" and has_axes:
                places = later(plain.places, plain.offsets, depth, -1)
                assert torch.equal(full[:, 0], flat[name][:, places])
            else:
                wanted = later(getattr(plain, name), plain.offsets, depth)
                assert full[0].tolist() == wanted, (name, depth)
        for name in ("mark", "fewer"):
            parts = [packed_field(row.index, row.fields, MARKED[name], depth)[0] for row in rows]
            places = later(plain.places, plain.offsets, depth, -1)
            assert torch.equal(merge_packed(parts, plain.offsets), flat[name][places]), name
    # Each response token is the label where it is predicted, on the rank that has the position.
    labels = torch.zeros(len(plain.response_weights), dtype=torch.int64)
    for row in rows:
        owned, positions = row.responses.owned_indices, row.responses.owned_positions
        assert not labels[owned].any()
        labels[owned] = row.labels[0].index_select(0, positions)
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
) -> None:
    """Rows are packed at once as each is alone, by each rank, in every epoch."""
    shapes = [*itertools.chain(*of_rows)]
    samples = marked(shapes) | {"is_padding": [i % 4 == 3 for i in range(len(shapes))]}
    if not has_axes or not sum(samples["total_lengths"]):
        del samples["position_ids"]
    columns = Columns.read(samples, MARKED)
    # From the last sample to the first.
    numbers = iter(range(len(shapes))[::-1])
    indices = [[*itertools.islice(numbers, len(each))] for each in of_rows]
    options: dict[str, int] = {"pad_token_id": PAD, "depths": depths}
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
)
def test_any_samples_are_packed_token_by_token_and_come_back(
    of_rows: list[Shapes], size: int, factor: int, row: int, depths: int, has_axes: bool
) -> None:
    align = (2 * size if size > 1 else 1) * factor
    require_packed(of_rows, size, align, math.lcm(align, row), depths, has_axes)


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
        assert row.loss_mask.sum() == 0
        assert all(value is not None for values in row.fields.values() for value in values)
    assert merged(rows, "tokens") == [7] + [PAD] * (2 * size - 1 if size > 1 else 0)
    assert merged(rows, "padding_mask") == [False] + [True] * (2 * size - 1 if size > 1 else 0)


def test_whatever_a_placeholder_or_padding_sample_holds_its_mask_is_zero() -> None:
    samples = make_samples([(4, 3), (6, 2)])
    samples["loss_masks"] = [torch.ones(3), torch.ones(2)]
    (row,) = pack_on_all_ranks(samples | {"is_padding": [True, False]})
    assert row.loss_mask.tolist() == [[0, 0, 0, 0, 0, 0, 0, 1, 1, 0]]
    # Without masks the whole response is trained.
    (again,) = pack_on_all_ranks(
        {name: each for name, each in samples.items() if name != "loss_masks"}
    )
    assert again.loss_mask.tolist() == [[1, 1, 1, 0, 0, 0, 0, 1, 1, 0]]
    # Nor does a router count its tokens.
    assert row.padding_mask.tolist() == [[True] * 4 + [False] * 6]
    (row,) = pack_on_all_ranks(samples, sample_indices=())
    assert row.loss_mask.sum() == 0


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


def test_fields_are_copies_of_the_values_given() -> None:
    samples = make_samples([(4, 2), (3, 3)]) | {"uids": ["a", "b"], "values": None}
    (row,) = pack_on_all_ranks(samples)
    given = {key: [each.clone() for each in samples[key]] for key in ("tokens", "advantages")}
    for key, values in given.items():
        for each in samples[key]:
            each.zero_()
        assert all(torch.equal(a, b) for a, b in zip(row[key], values, strict=True))
        assert [each.dtype for each in row[key]] == [each.dtype for each in values]
    assert row["uids"] == ["a", "b"]
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
    for name in (*STREAMS, "cu_seqlens_padded"):
        assert getattr(moved, name).device.type == "meta", name
    assert moved.responses.owned_indices.device.type == "meta"
    assert moved.later[0].labels.device.type == "meta"
    assert moved["tokens"][0].device.type == "meta"
    assert moved["multimodal_train_inputs"][0]["pixels"].device.type == "meta"
    assert moved["rewards"] == [0.5]
    assert moved["uids"] == ["a"]
    assert moved.sample_indices == (0,)
    assert moved.host_cu_seqlens_padded == (0, 4)


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
    marks = merge_packed([row.packed("mark")[0] for row in rows], rows[0].host_cu_seqlens_padded)
    nodes = rows[0].nodes
    for sample, path in enumerate(nodes.paths):
        places = [place for node in path for place in range(*nodes.offsets[node : node + 2])]
        own = places[: len(tokens[sample])]
        assert [held["tokens"][place] for place in own] == tokens[sample].tolist()
        assert [held["position_ids"][place] for place in own] == [*range(len(own))]
        assert not any(held["padding_mask"][place] for place in own)
        assert marks[own].tolist() == samples["mark"][sample].tolist()
    assert sum(held["padding_mask"]) == len(held["tokens"]) - forest.tokens
    # Wherever a token of a response is predicted, at any depth, it is the label.
    first = [len(each) - own for each, own in zip(tokens, responses, strict=True)]
    wanted = [t[p:] for t, p in zip(tokens, first, strict=True)]
    weights = torch.cat(samples["loss_masks"]).float()
    is_predicted = torch.ones(len(weights), dtype=torch.bool)
    is_predicted[sum(responses[:3])] = False  # the first of a response without a prompt
    labels, predicted = torch.zeros(len(weights), dtype=torch.int64), is_predicted & False
    for row in rows:
        places, positions = row.responses.owned_indices, row.responses.owned_positions
        labels[places] += row.labels[0, positions]
        assert not predicted[places].any()
        predicted[places] = True
        distinct, at = row.responses.distinct_positions, row.responses.distinct_indices
        assert distinct is not None
        assert at is not None
        assert distinct.tolist() == sorted(set(positions.tolist()))
        assert distinct[at].equal(positions)
    assert predicted.equal(is_predicted)
    assert labels.equal(torch.cat(wanted) * is_predicted)
    # What several samples train weighs as much as in all of them.
    _, sums = step_totals(rows[0].fields, depths=DEPTHS)
    masks = [[row.loss_mask, *(each.loss_mask for each in row.later)] for row in rows]
    assert [sum(float(mask.sum()) for mask in each) for each in zip(*masks, strict=True)] == sums
    for depth in range(DEPTHS):
        stream = merge_packed(
            [r.later[depth].labels[0] for r in rows], rows[0].host_cu_seqlens_padded
        )
        for sample, path in enumerate(nodes.paths):
            places = [place for node in path for place in range(*nodes.offsets[node : node + 2])]
            reach = len(tokens[sample]) - 2 - depth
            expected = tokens[sample][2 + depth :].tolist()
            assert stream[places[: max(reach, 0)]].tolist() == expected


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
