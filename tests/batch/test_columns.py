"""Fields end to end: what goes in comes back."""

from __future__ import annotations

import contextlib
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from batch_cases import MARKED, block_of, equal, make_samples, marked
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mcore_batching.batch import DEFAULT_SCHEMA, Kind, SchemaError, fields
from mcore_batching.batch.columns import Columns
from mcore_batching.batch.fields import checked_values, unmet

Shapes = list[tuple[int, int]]


def test_each_flat_field_is_one_tensor_of_its_own() -> None:
    samples = marked([(3, 2), (0, 0), (4, 4)])
    columns = Columns.read(samples, MARKED)
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


def test_values_of_several_types_become_one_that_holds_all_without_a_graph() -> None:
    values = [torch.ones(2).long(), torch.nn.Parameter(torch.ones(1) / 2)]
    schema = DEFAULT_SCHEMA.declare("mine", Kind.PER_TOKEN)
    columns = Columns.read(make_samples([(2, 1), (1, 0)]) | {"mine": values}, schema)
    assert all(map(torch.equal, columns["mine"], [torch.ones(2), torch.ones(1) / 2]))
    flat = columns.flat("mine")
    assert (type(flat), flat.dtype, flat.requires_grad) == (Tensor, torch.float32, False)


def test_tensors_are_freed_as_soon_as_nothing_refers_to_them() -> None:
    """The garbage collector may not run for many steps: it counts objects, not their bytes."""
    columns = Columns.read(marked([(3, 2), (4, 4)]), MARKED)
    taken = columns.taken([1, 0]).taken([1])
    block = block_of(columns, [[0], [1]])
    rows = block.rows()
    read = [columns["tokens"], taken["mark"], taken.span("mark"), *(row.fields for row in rows)]
    read += [rows[1].index, rows[0].responses.owned_positions, rows[0].packed("mark")]
    tensors = [columns.flat("mark"), rows[0].tokens, rows[0].fields.flat("mark")]
    alive = [weakref.ref(each) for each in tensors]
    gc.disable()
    try:
        del columns, taken, block, rows, read, tensors
        assert [ref() for ref in alive] == [None] * 3
    finally:
        gc.enable()


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
    field = MARKED[data.draw(st.sampled_from(names))]
    rows = [field.num_rows(*shape) for shape in shapes]
    drawn = data.draw(field_values(rows, is_positions=field.kind is Kind.POSITION_IDS))
    lengths = [list(each) for each in zip(*shapes, strict=True)]
    try:
        values = [fields._value(field, i, each) for i, each in enumerate(drawn)]
    except SchemaError:
        with pytest.raises(SchemaError, match="numbers, in lists of one length"):
            checked_values(field, drawn, *lengths)
        return
    faults = [unmet(field, *each) for each in zip(values, rows, strict=True)]
    at = next((i for i, fault in enumerate(faults) if fault is not None), None)
    empty, name = Columns(MARKED, {}, *lengths), field.name
    if at is None:
        assert all(map(equal, checked_values(field, drawn, *lengths), values))
        with contextlib.suppress(SchemaError):  # rows of several shapes, types without a common one
            for found, value in zip(
                empty.extended({name: drawn}, MARKED)[name], values, strict=True
            ):
                assert found.tolist() == value.tolist()
        return
    for check in (checked_values, lambda *_: empty.extended({name: drawn}, MARKED)):
        with pytest.raises(SchemaError) as caught:
            check(field, drawn, *lengths)
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
    columns = Columns.read(samples, MARKED)
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
        # Nothing predicts the first token of a sample without a prompt.
        masks = [samples["loss_masks"][i][int(len(set(shapes[i])) == 1) :] for i in chosen]
        sums = [[float(f(mask)) for mask in masks] for f in (torch.sum, torch.count_nonzero)]
        assert (made.alone().schema.keys(), made.schema) == (made.keys(), MARKED)
        for again in (pickle.loads(pickle.dumps(made)), made.alone(), made):
            assert all(equal(again[name], made[name]) for name in made)
            assert again.weight_sums().tolist() == sums


def test_fields_added_later_are_columns_as_well() -> None:
    samples = make_samples([(3, 2), (4, 1)])
    columns = Columns.read(samples, MARKED)
    assert columns.weight_sums()[0].tolist() == [float(sum(m)) for m in samples["loss_masks"]]
    replaced = columns.extended({"loss_masks": [[3.0, 4.0], [0.0]]}, MARKED)
    assert replaced.weight_sums().tolist() == [[7, 0], [2, 0]]
    more = columns.extended({"values": [[0.5, 1.0], [2.0]], "tokens": samples["tokens"][:]}, MARKED)
    assert more.flat("values").tolist() == [0.5, 1.0, 2.0, 0.0]
    assert "values" not in columns


def test_sums_of_parts_are_those_of_all_without_adding_up_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each step of a rollout joins the samples of all earlier ones."""
    parts = [Columns.read(make_samples(shapes), DEFAULT_SCHEMA) for shapes in ([(4, 2)], [(3, 3)])]
    sums = torch.cat([part.weight_sums() for part in parts], 1)
    monkeypatch.delattr(Columns, "loss_weights")
    assert Columns.joined(parts).weight_sums().equal(sums)
