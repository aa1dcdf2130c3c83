"""Rows: what they are made of, and what of them is made when, once for all rows and on a device."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable
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
    sample_shapes,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mcore_batching.batch import DEFAULT_SCHEMA, PackedMicroBatch
from mcore_batching.batch.columns import Columns, sent
from mcore_batching.batch.loss import step_totals
from mcore_batching.batch.prefix_tree import find_forest_of
from mcore_batching.batch.row import packed_field
from mcore_batching.batch.row_block import RowBlock
from mcore_batching.batch.row_index import Nodes

Shapes = list[tuple[int, int]]
STREAMS = ("tokens", "labels", "position_ids", "loss_mask", "padding_mask")
TYPES = (torch.int64, torch.float32, torch.bool, torch.bfloat16, torch.uint8, torch.complex64)


def require_slices(rows: list[PackedMicroBatch]) -> None:
    """Every position of every rank's slices is in exactly one place."""
    for rank, index in enumerate(row.index for row in rows):
        held = [place for _, first, end in index.chunks for place in range(first, end)]
        assert index.positions.tolist() == held
        assert index.local(index.positions).tolist() == list(range(index.num_local))
        for other in rows[:rank]:
            assert (other.index.local(index.positions) == -1).all()
    positions = torch.cat([row.index.positions for row in rows]).sort().values
    assert positions.tolist() == list(range(rows[0].host_cu_seqlens_padded[-1]))


def positions_of(nodes: Nodes, totals: list[int], align: int, row_align: int) -> list[list[int]]:
    """Positions of each sample's tokens in the full row. It has a segment for each sample that
    begins no other, and for its own padding; where samples branch it is one."""
    bounds = [*itertools.pairwise(nodes.offsets)]
    paths = ([at for node in path for at in range(*bounds[node])] for path in nodes.paths)
    positions = [path[:total] for path, total in zip(paths, totals, strict=True)]
    offsets = [0]
    if any(len(path) > 1 for path in nodes.paths):
        offsets.append(len({*itertools.chain(*positions)}))
        offsets[1] += -offsets[1] % row_align
    else:
        longest: dict[int, int] = {}
        for (node,), total in zip(nodes.paths, totals, strict=True):
            longest[node] = max(total, longest.get(node, 1))
        for _, length in sorted(longest.items()):
            offsets.append(offsets[-1] + length + -length % align)
        offsets += [offsets[-1] + -offsets[-1] % row_align] * (offsets[-1] % row_align > 0)
    assert [*nodes.segments] == offsets
    return positions


def require_row(
    rows: list[PackedMicroBatch], samples: dict[str, list], align: int, row_align: int
) -> None:
    """The slices of all ranks make up the row, token by token, and fields come back."""
    nodes, size, depths = rows[0].nodes, len(rows), len(rows[0].later)
    totals, responses, tags = map(samples.get, ("total_lengths", "response_lengths", "is_padding"))
    positions = positions_of(nodes, totals, align, row_align)
    ends = [end for start, end in itertools.pairwise(nodes.offsets) for _ in range(start, end)]
    ids = [each.tolist() for each in samples["tokens"]]
    masks = samples.get("loss_masks") or [torch.ones(response) for response in responses]
    weights = [
        [0.0] * (total - len(mask)) + (mask * (not tag)).tolist()
        for total, mask, tag in zip(totals, masks, tags, strict=True)
    ]

    def stream(values: Iterable[list], later: int, otherwise: list) -> list:
        """At each position the value so many tokens on, of any sample that has one there."""
        made = otherwise[:]
        for own, of_sample in zip(positions, values, strict=True):
            for at, value in zip(own, of_sample[later:], strict=False):
                made[at] = value
        return made

    require_slices(rows)
    zeros = [0] * len(ends)
    for depth in range(depths + 1):
        padding = [PAD if at + depth < end else 0 for at, end in enumerate(ends)]
        loss_mask = [0.0] * len(ends)
        for own, each in zip(positions, weights, strict=True):
            for at, weight in zip(own, each[depth + 1 :], strict=False):
                loss_mask[at] += weight
        wanted = {
            "tokens": stream(ids, depth, padding),
            "labels": stream(ids, depth + 1, padding),
            "position_ids": stream(([*range(total)] for total in totals), depth, zeros),
            "loss_mask": loss_mask,
        }
        if not depth:
            tagged = ([tag] * total for tag, total in zip(tags, totals, strict=True))
            wanted["padding_mask"] = stream(tagged, 0, [True] * len(ends))
        for name in {"labels", "loss_mask", "position_ids", "mark", "fewer"} & {*samples}:  # own
            values = [torch.as_tensor(each) for each in samples[name]]
            if name == "position_ids":
                values = [each.T for each in values]
            none = [[0, 0]] * len(ends) if name in ("mark", "position_ids") else zeros
            wanted[name] = stream((each.tolist() for each in values), depth, none)
        for name, values in wanted.items():
            if name in ("mark", "fewer"):
                field = MARKED[name]
                parts = [packed_field(row.index, row.fields, field, depth)[0] for row in rows]
            else:
                streams = [row.later[depth - 1] if depth else row for row in rows]
                parts = [getattr(each, name).movedim(-1, 0).squeeze(-1) for each in streams]
            assert merge_packed(parts, nodes.segments).tolist() == values, (name, depth)
    # Each response token but a sample's first is predicted at one position, on one rank.
    predicting, response_weights = list[tuple[int, int]](), list[float]()
    for own, each, response in zip(positions, weights, responses, strict=True):
        for token in range(len(own) - response, len(own)):
            if token:
                predicting.append((len(response_weights), own[token - 1]))
            response_weights.append(each[token] if token else 0.0)
    found = list[tuple[int, int]]()
    for row in rows:
        owned, local = row.responses.owned_indices, row.responses.owned_positions
        found += zip(owned.tolist(), row.index.positions[local].tolist(), strict=True)
        distinct, at = row.responses.distinct_positions, row.responses.distinct_indices
        assert local.unique().equal(local.sort().values if distinct is None else distinct)
        assert distinct is None or distinct[at].equal(local)
        assert row.responses.loss_masks.tolist() == response_weights
        types = [getattr(row, name).dtype for name in (*STREAMS, "cu_seqlens_padded")]
        assert types == [*[torch.int64] * 3, torch.float32, torch.bool, torch.int32]
        assert row.tokens.shape == row.loss_mask.shape == (1, len(ends) // size)
        assert row.cu_seqlens_padded.tolist() == [*row.host_cu_seqlens_padded] == [*nodes.segments]
        assert row.max_seqlen == max(np.diff(nodes.segments))
        assert (row.total_lengths, row.response_lengths) == (totals, responses)
        assert row.num_samples == len(totals)
        for name, values in samples.items():
            assert equal(row[name], values), name
    assert sorted(found) == predicting
    trained = sum(weight != 0 for weight in response_weights)
    assert sum(row.owned_num_tokens for row in rows) == trained
    # What several samples train weighs as much as in all of them.
    has_labels = "labels" in samples
    of_samples = [each[1:] for each in weights]
    if has_labels:
        of_samples = [each.tolist() for each in samples["loss_mask"]]
    found_totals, sums = step_totals(rows[0].fields, depths, has_labels=has_labels)
    assert sums == [sum(sum(each[depth:]) for each in of_samples) for depth in range(depths + 1)]
    assert found_totals.num_tokens == sum(weight != 0 for each in of_samples for weight in each)
    assert found_totals.num_trained_samples == sum(any(each) for each in of_samples)
    assert found_totals.num_samples == tags.count(False)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(sample_shapes(), min_size=1, max_size=3),
    st.sampled_from([1, 2, 3, 4]),
    st.integers(1, 4),
    st.integers(1, 40),
    st.integers(0, 5),
    st.sets(st.sampled_from(["axes", "labels", "masks"])),
    st.none() | st.builds(random.Random, st.integers(0, 10**6)),
)
@example([boundary_shapes(1)], 1, 1, 5, 2, {"axes", "masks"}, None)
@example([boundary_shapes(2)], 2, 1, 5, 2, {"axes", "masks"}, None)
@example([boundary_shapes(4)], 4, 1, 5, 2, {"axes", "masks"}, None)
@example([[shape] for shape in boundary_shapes(2)], 2, 1, 1, 2, {"axes", "masks"}, None)
@example([[shape] for shape in boundary_shapes(4)], 4, 1, 1, 2, {"axes", "masks"}, None)
@example([[(9, 9), (9, 9)]], 1, 1, 1, 0, {"masks"}, random.Random(6))  # branches without a prompt
def test_any_samples_are_packed_token_by_token_and_come_back(
    of_rows: list[Shapes],
    size: int,
    factor: int,
    row: int,
    depths: int,
    given: set[str],
    begins: random.Random | None,
) -> None:
    """Rows are packed at once as each is alone, by each rank, in every epoch; what samples have in
    common at their beginnings once."""
    align = (2 * size if size > 1 else 1) * factor
    row_align = math.lcm(align, row)
    shapes = [*itertools.chain(*of_rows)]
    # From the last sample to the first.
    numbers = iter(range(len(shapes))[::-1])
    rows = [[*itertools.islice(numbers, len(each))] for each in of_rows]
    samples = marked(shapes, [row for row in rows if begins], begins)
    samples["is_padding"] = [i % 4 == 3 for i in range(len(shapes))]
    if "axes" not in given or not sum(samples["total_lengths"]):
        del samples["position_ids"]
    if "masks" not in given:
        del samples["loss_masks"]
    if "labels" in given:
        samples["labels"] = [tokens + 1000 for tokens in samples["tokens"]]
        samples["loss_mask"] = [tokens / 8 for tokens in samples["tokens"]]
    if begins and begins.random() < 0.5:  # of which no sample begins another: its last ones differ
        del samples["fewer"]
    columns, forest = Columns.read(samples, MARKED), None
    if begins:
        units = [next(n for n, row in enumerate(rows) if i in row) for i in range(len(shapes))]
        forest = find_forest_of(columns, units, spare=depths, branches=begins.random() < 0.7)
    layout = {"pad_token_id": PAD, "depths": depths, "has_labels": "labels" in given}
    blocks = [
        block_of(columns, rows, align, row_align, size, rank, forest, **layout)
        for rank in range(size)
    ]
    for _ in range(2):
        of_rows = [*zip(*(block.rows() for block in blocks), strict=True)]
        for indices, slices in zip(rows, of_rows, strict=True):
            chosen = {name: [values[i] for i in indices] for name, values in columns.items()}
            assert [each.sample_indices for each in slices] == [tuple(indices)] * size
            assert begins or slices[0].responses.distinct_positions is None
            require_row(slices, chosen, align, row_align)
        real = sum(int((~each.index.is_absent()).sum()) for each in itertools.chain(*of_rows))
        assert real == (forest.tokens if forest else sum(columns.total_lengths))
        for block in blocks:
            block.forget_index()


@pytest.mark.parametrize("size", [1, 2])
def test_a_placeholder_trains_nothing_whatever_its_sample_holds(size: int) -> None:
    for row in pack_on_all_ranks(make_samples([(4, 3)]), size, is_placeholder=True):
        assert (row.num_samples, row.sample_indices, row.is_placeholder) == (0, (), True)
        assert row.loss_mask.sum() == row.responses.loss_masks.sum() == row.owned_num_tokens == 0
        assert not row.padding_mask.any()  # its tokens are there


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
    rows = pack_on_all_ranks(samples, size, row_align=24)
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
    (moved,) = pack_on_all_ranks(samples, device=torch.device("meta"), depths=1)
    tensors = [getattr(moved, name) for name in (*STREAMS, "cu_seqlens_padded")]
    tensors += [moved.responses.owned_indices, moved.later[0].labels, moved["tokens"][0]]
    tensors += [moved["multimodal_train_inputs"][0]["pixels"]]
    assert {each.device.type for each in tensors} == {"meta"}
    assert (moved["rewards"], moved["uids"]) == ([0.5], ["a"])
    assert (moved.sample_indices, moved.host_cu_seqlens_padded) == ((0,), (0, 4))


def copies(values: list[Any]) -> list[Any]:
    columns = Columns.read(make_samples([(1, 0)]), DEFAULT_SCHEMA)
    return block_of(columns, [[0]]).copied_all(values)


@settings(deadline=None, max_examples=50)
@given(
    st.lists(
        st.tuples(st.sampled_from(TYPES), st.lists(st.integers(0, 3), max_size=3), st.booleans()),
        max_size=8,
    )
)
def test_tensors_in_lists_move_by_one_copy_for_each_type(
    kinds: list[tuple[torch.dtype, list[int], bool]],
) -> None:
    """Of views, not the whole of what they look into."""
    tensors = [torch.randint(0, 9, (2, *shape)).to(dtype)[1] for dtype, shape, _ in kinds]
    repeated = zip(tensors, kinds, strict=True)
    tensors = [each.expand(3, *each.shape) if is_odd else each for each, (*_, is_odd) in repeated]
    back = [each["a"] for each in copies([{"a": each} for each in tensors])]
    assert equal(back, tensors)
    storages = {each.untyped_storage().data_ptr(): each for each in back if each.numel()}
    assert len(storages) == len({each.dtype for each in storages.values()})
    sizes = (each.untyped_storage().nbytes() for each in storages.values())
    assert sum(sizes) == sum(each.numel() * each.element_size() for each in tensors)


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
