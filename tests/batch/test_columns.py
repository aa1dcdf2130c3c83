"""Fields end to end, and the index of a row: what goes in comes back, whatever the layout."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
import torch
from batch_cases import boundary_shapes, equal, make_samples, pack_on_all_ranks, sample_shapes
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mcore_batching.batch import DEFAULT_SCHEMA, Kind, PackedMicroBatch, SchemaError, fields
from mcore_batching.batch.columns import Columns
from mcore_batching.batch.fields import checked_values, unmet
from mcore_batching.batch.row import packed_field

SCHEMA = DEFAULT_SCHEMA.declare("mark", Kind.PER_TOKEN).declare(
    "fewer", Kind.PER_TOKEN, length_offset=-2
)
Shapes = list[tuple[int, int]]


def marked(shapes: Shapes) -> dict[str, list[Any]]:
    """Samples in which no two values of a field are the same, none of them 0."""
    totals = torch.tensor([total for total, _ in shapes])
    starts = (totals.cumsum(0) - totals + 1).tolist()
    samples = make_samples(shapes)
    samples["tokens"] = [torch.arange(s, s + t) for s, (t, _) in zip(starts, shapes, strict=True)]
    samples["mark"] = [torch.stack((each, -each), 1) for each in samples["tokens"]]
    samples["fewer"] = [each[: max(len(each) - 2, 0)] * 0.5 for each in samples["tokens"]]
    samples["position_ids"] = [
        torch.stack((each + 7, each + 9)) if len(each) else [] for each in samples["tokens"]
    ]
    return samples


def unpacked(rows: list[PackedMicroBatch], values: list[Tensor], later: int = 0) -> list[Tensor]:
    """Each sample's values, from the slices ``[T_local, ...]`` of all ranks: each position gives
    its value to the token that the index names."""
    span = rows[0].fields.token_span
    whole = values[0].new_zeros((span.end + 1, *values[0].shape[1:]))
    for row, each in zip(rows, values, strict=True):
        whole[row.index.places(span, later)] = each
    return list(whole[:-1].split(span.counts))


def require_back(shapes: Shapes, size: int, align: int, row_align: int, depths: int) -> None:
    samples = marked(shapes)
    options = {"sample_alignment_tokens": align, "row_alignment_tokens": row_align}
    rows = pack_on_all_ranks(samples, size, schema=SCHEMA, depths=depths, **options)
    real = torch.cat([row.index.places(row.fields.token_span) for row in rows])
    ends = rows[0].fields.token_span.end
    # Every token is at one position of one rank; all else is padding.
    assert real[real < ends].sort().values.tolist() == list(range(ends))
    assert torch.cat([row.index.positions for row in rows]).sort().values.tolist() == list(
        range(rows[0].host_cu_seqlens_padded[-1])
    )
    for depth in range(depths + 1):
        streams = [row.later[depth - 1] if depth else row for row in rows]
        found = unpacked(rows, [each.tokens[0] for each in streams], depth)
        labels = unpacked(rows, [each.labels[0] for each in streams], depth + 1)
        positions = unpacked(rows, [each.position_ids[:, 0].T for each in streams], depth)
        given = [(row.index, row.fields, SCHEMA["mark"], depth) for row in rows]
        marks = unpacked(rows, [packed_field(*each)[0] for each in given], depth)
        for i, tokens in enumerate(samples["tokens"]):
            # The first tokens of a sample come at no position of a later depth.
            assert found[i][depth:].tolist() == tokens[depth:].tolist()
            assert labels[i][depth + 1 :].tolist() == tokens[depth + 1 :].tolist()
            assert marks[i][depth:].tolist() == samples["mark"][i][depth:].tolist()
            assert positions[i][depth:].tolist() == [
                [t + 7, t + 9] for t in tokens[depth:].tolist()
            ]
    fewer = unpacked(rows, [row.packed("fewer")[0] for row in rows])
    for value, kept in zip(fewer, samples["fewer"], strict=True):
        assert value.tolist() == [*kept.tolist(), *[0.0] * (len(value) - len(kept))]
    for name in ("tokens", "mark", "fewer", "advantages", "loss_masks"):
        assert all(map(torch.equal, rows[0][name], samples[name])), name


@settings(max_examples=150, deadline=None)
@given(
    sample_shapes(),
    st.sampled_from([1, 2, 3, 4]),
    st.integers(1, 4),
    st.integers(1, 40),
    st.integers(0, 5),
)
def test_whatever_is_packed_comes_back(
    shapes: Shapes, size: int, factor: int, row: int, depths: int
) -> None:
    align = (2 * size if size > 1 else 1) * factor
    require_back(shapes, size, align, math.lcm(align, row), depths)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_boundary_lengths_come_back(size: int) -> None:
    align = 2 * size if size > 1 else 1
    require_back(boundary_shapes(size), size, align, 5 * align, 2)
    for shape in boundary_shapes(size):
        require_back([shape], size, align, align, 2)


def test_each_flat_field_is_one_tensor_of_its_own() -> None:
    samples = marked([(3, 2), (0, 0), (4, 4)])
    columns = Columns.read(samples, SCHEMA)
    assert set(columns) == set(samples)
    assert len(columns) == len(samples)
    for name in ("tokens", "advantages", "mark", "position_ids"):
        views = columns[name]
        assert len({each.untyped_storage().data_ptr() for each in views}) == 1
        assert views[0].untyped_storage().data_ptr() == columns.flat(name).data_ptr()
        views[0] = torch.ones(9)  # the caller's own list
        assert columns[name][0].shape != (9,)
    assert columns["position_ids"][1].shape == (2, 0)
    assert not columns.flat("mark")[-1].any()
    with pytest.raises(KeyError):
        columns["absent"]


def test_values_of_several_types_become_one_that_holds_all_without_a_graph() -> None:
    fields: dict[str, list[Any]] = {
        "graph": [torch.ones(2, requires_grad=True) * 2, torch.ones(1)],
        "subclass": [torch.nn.Parameter(torch.ones(2)), torch.ones(1)],
        "types": [torch.ones(2), torch.ones(1).long()],
    }
    schema = DEFAULT_SCHEMA
    for name in fields:
        schema = schema.declare(name, Kind.PER_TOKEN)
    columns = Columns.read(make_samples([(2, 1), (1, 0)]) | fields, schema)
    for name, values in fields.items():
        assert all(map(torch.equal, columns[name], [each.float() for each in values])), name
        assert not columns.flat(name).requires_grad
        assert type(columns.flat(name)) is Tensor
        assert columns.flat(name).dtype == torch.float32


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([torch.ones(2).to_sparse(), torch.ones(1)], "sample 0: expected a dense tensor"),
        ([torch.ones(2, 1), torch.ones(1, 2)], r"rows of one shape .* \[1\], \[2\]; .*METADATA"),
        ([torch.ones(2), torch.ones(1).to(torch.float8_e4m3fn)], "types that have one in common"),
    ],
)
def test_what_one_tensor_cannot_hold_is_refused(values: list[Tensor], message: str) -> None:
    schema = DEFAULT_SCHEMA.declare("mine", Kind.PER_TOKEN)
    with pytest.raises(SchemaError, match=f"'mine'.*{message}"):
        Columns.read(make_samples([(2, 1), (1, 0)]) | {"mine": values}, schema)


def test_a_change_in_place_is_none_of_the_neighbours() -> None:
    """Autograd would refuse a backward pass through a neighbour of what has been changed."""
    samples = make_samples([(2, 2), (2, 2)])
    first, second = Columns.read(samples, DEFAULT_SCHEMA)["advantages"]
    weight = torch.ones(2, requires_grad=True)
    total = (weight * first).sum()
    second.mul_(2)
    total.backward()
    assert torch.equal(second, 2 * samples["advantages"][1])


SHAPES = st.sampled_from([(4, 2), (0, 0), (1, 1), (3, 0), (2, 2)])
TRAILING = st.sampled_from([(), (), (2,), (2, 3), (0,)])
TYPES = st.sampled_from(
    [torch.int64, torch.float32, torch.int32, torch.bool, torch.uint16, torch.complex64]
)


@st.composite
def field_values(draw: st.DrawFn, rows: list[int], *, is_positions: bool) -> list[Any]:
    """Tensors or lists of one type and trailing shape, most often; now and then one is odd."""
    trailing, dtype, values = draw(TRAILING), draw(TYPES), []
    for own in rows:
        is_odd = draw(st.integers(0, 9)) == 0
        count = own + is_odd * draw(st.integers(0, 1))
        shape = (count, *(draw(TRAILING) if is_odd else trailing))
        value = torch.ones(shape[1:] + shape[:1] if is_positions else shape)
        value = (-value if is_odd else value).to(draw(TYPES) if is_odd else dtype)
        if is_odd:
            value = draw(st.sampled_from([value, value.to("meta"), torch.tensor(1.0), None, "a"]))
        is_list = isinstance(value, Tensor) and not value.is_meta and draw(st.booleans())
        values.append(value.tolist() if is_list else value)
    return values


@settings(max_examples=500, deadline=None)
@given(st.lists(SHAPES, min_size=1, max_size=4), st.data())
def test_the_first_value_that_does_not_fit_is_named_however_many_are_alike(
    shapes: Shapes, data: st.DataObject
) -> None:
    names = ["tokens", "advantages", "mark", "fewer", "position_ids", "rollout_routed_experts"]
    field = SCHEMA[data.draw(st.sampled_from(names))]
    rows = [field.num_rows(*shape) for shape in shapes]
    drawn = data.draw(field_values(rows, is_positions=field.kind is Kind.POSITION_IDS))
    lengths = [list(each) for each in zip(*shapes, strict=True)]
    try:
        values = [fields._value(field, i, each) for i, each in enumerate(drawn)]
    except SchemaError:
        with pytest.raises(SchemaError, match="numbers, in lists of one length"):
            checked_values(field, drawn, *lengths)
        return
    faults = [unmet(field, *each) for each in zip(values, *lengths, strict=True)]
    at = next((i for i, fault in enumerate(faults) if fault is not None), None)
    if at is None:
        assert all(map(equal, checked_values(field, drawn, *lengths), values))
        return
    with pytest.raises(SchemaError) as caught:
        checked_values(field, drawn, *lengths)
    assert (caught.value.sample_index, caught.value.expected) == (at, faults[at])


@settings(max_examples=100, deadline=None)
@given(st.lists(SHAPES, min_size=1, max_size=5), st.data())
def test_samples_are_taken_and_joined_with_all_their_fields(
    shapes: Shapes, data: st.DataObject
) -> None:
    samples = marked(shapes) | {
        "uids": [*map(str, shapes)],
        "rewards": [*map(float, map(sum, shapes))],
    }
    columns = Columns.read(samples, SCHEMA)
    chosen = data.draw(st.lists(st.integers(0, len(shapes) - 1), max_size=6))
    cut = data.draw(st.integers(0, len(chosen)))
    parts = columns.taken(chosen[:cut]), columns.taken(chosen[cut:])
    joined = Columns.joined(parts)
    again = Columns.joined([joined.taken(range(cut)), joined.taken(range(cut, len(chosen)))])
    for made in (columns.taken(chosen), columns.taken(chosen).compact(), joined, again):
        assert made.keys() == columns.keys()
        assert (made.total_lengths, made.response_lengths) == (
            [columns.total_lengths[i] for i in chosen],
            [columns.response_lengths[i] for i in chosen],
        )
        for name in columns:
            assert equal(made[name], [columns[name][i] for i in chosen]), name
        assert made.compact(["mark"]).flat("mark").shape[0] == sum(made.total_lengths) + 1
        assert not made.flat("mark")[-1].any()  # behind the last value stands padding
        again = pickle.loads(pickle.dumps(made))
        assert all(equal(again[name], made[name]) for name in made)


def test_fields_added_later_are_columns_as_well() -> None:
    samples = make_samples([(3, 2), (4, 1)])
    columns = Columns.read(samples, SCHEMA)
    more = columns.extended({"values": [[0.5, 1.0], [2.0]], "tokens": samples["tokens"][:]}, SCHEMA)
    assert more.flat("values").tolist() == [0.5, 1.0, 2.0, 0.0]
    assert "values" not in columns
    other = more.extended({"values": [torch.ones(2), torch.ones(1).double()]}, SCHEMA)
    assert [each.dtype for each in other["values"]] == [torch.float64] * 2
    with pytest.raises(SchemaError, match="'values', sample 1: expected 1 rows"):
        more.extended({"values": [[0.5, 1.0], [2.0, 3.0]]}, SCHEMA)
