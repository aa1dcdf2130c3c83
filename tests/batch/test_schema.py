"""Schemas: declarations never change, a kind is inferred only where the data fits one, and the
batch layer refuses by name and with what was found (the rows of `REFUSALS.md`)."""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from batch_cases import make_samples, pack_on_all_ranks, sample_shapes
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refusals
from torch import arange, ones, rand, tensor, zeros

from mcore_batching import batch, planning
from mcore_batching.batch import (
    DEFAULT_SCHEMA,
    Field,
    Fill,
    Kind,
    Schema,
    SchemaError,
    fields,
    gather_response,
    make_placeholder,
    prompt_mean,
    restore_order,
    row_index,
    token_mean,
)
from mcore_batching.batch import values as value_checks
from mcore_batching.batch.columns import Columns
from mcore_batching.batch.loss import step_totals
from mcore_batching.batch.values import require_vocabulary

TOKEN, RESPONSE, SAMPLE = Kind.PER_TOKEN, Kind.PER_RESPONSE_TOKEN, Kind.PER_SAMPLE
POSITIONS, EXPERTS, META = Kind.POSITION_IDS, Kind.ROUTED_EXPERTS, Kind.METADATA
declare = DEFAULT_SCHEMA.declare
MIXED, WHOLE_RESPONSES = [(5, 2), (3, 3)], [(5, 5), (3, 3)]


def batch_of(name: str, values: Any) -> dict[str, Any]:
    """Two samples, (5, 2) and (3, 3), with one more field."""
    return make_samples(MIXED) | {name: values}


def validate(name: str, values: Any, kind: Kind | None = None, **batch: Any) -> Any:
    """Check such a batch, its field declared anew if there is a kind."""
    schema = DEFAULT_SCHEMA if kind is None else declare(name, kind)
    return schema.validate(batch_of(name, values) | batch)


def unmet(kind: Kind, values: Any) -> None:
    """Refuse values by name, with the field's declaration where one of them is at fault."""
    with pytest.raises(SchemaError) as caught:
        validate("scores", values, kind)
    error = caught.value
    where = "" if error.sample_index is None else f", sample {error.sample_index}"
    text = f"field 'scores'{where}: expected {error.expected}, found {error.found}"
    if where:
        assert error.declaration == f'schema = schema.declare("scores", Kind.{kind.name})'
        text += f"; correct the values, or this declaration: {error.declaration}"
    assert (error.key, str(error)) == ("scores", text)
    raise error


# Of a text even "False" is true.
TAGS: list[Any] = ["False", [1, 2], np.array([0, 1]), math.nan, tensor(math.inf)]
NO_INDICES: list[Any] = [0.0, "0", None, True, [0], tensor(True)]
NO_SEQUENCES: list[Any] = [3, None, {0: 1}, {0, 1}, "ab", tensor(3)]


def fabricate(wrong: Any) -> Any:
    """Make a placeholder with this value."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fields, "fabricated", lambda *given: wrong)
        return make_placeholder(DEFAULT_SCHEMA, ["log_probs"], None)


def resolve(shapes: list[tuple[int, int]], values: Any) -> Any:
    """The declaration that is inferred for a field ``mine`` of these values."""
    return DEFAULT_SCHEMA.resolve(make_samples(shapes) | {"mine": values})["mine"]


def packed(name: str, schema: Schema = DEFAULT_SCHEMA, **fields: Any) -> Any:
    (row,) = pack_on_all_ranks(make_samples([(4, 2)]) | fields, schema=schema)
    return row.packed(name)


def columns_of(*values: Any) -> Columns:
    return Columns.read(
        make_samples([(2, 1), (1, 0)]) | {"mine": [*values]}, declare("mine", TOKEN)
    )


def gathered(shape: tuple[int, ...], size: int = 1) -> Any:
    row = pack_on_all_ranks(make_samples([(4, 2)]), size)[0]
    return gather_response(rand(shape), row)


def loss_of(
    *values: Any, mean: Any = token_mean, counted: Sequence[int] = (0, 1), **fields: Any
) -> Any:
    """A loss of two samples, by the totals of these."""
    (row,) = pack_on_all_ranks(make_samples([(4, 2), (5, 3)]) | fields)
    return mean([*values] or [zeros(2), zeros(3)], row, step_totals(row.fields.taken(counted))[0])


GROUPS = {"uids": ["a", "b"], "trajectory_ids": [0, 0]}
test_refused = refusals(__file__, torch, planning, batch, row_index, value_checks, globals())


def test_what_resembles_it_passes() -> None:
    """Beside each of these rows stands one that is right."""
    for masks in ([[1, 0], [1, 1, 1]], [ones(2, dtype=torch.bool), [0.5, 0, 1]]):
        validate("loss_masks", masks)
    for make in (list, np.array, lambda ids: np.array(ids, "uint16")):
        tokens = [make([1, 2, 3, 4, 5]), make([4, 5, 6])]
        found = validate("tokens", tokens, total_lengths=tensor([5, 3]))
        assert [type(length) for length in found["total_lengths"]] == [int, int]
        assert [value.tolist() for value in found["tokens"]] == [[1, 2, 3, 4, 5], [4, 5, 6]]
        assert {value.dtype for value in found["tokens"]} == {torch.int64}
    tags = validate("is_padding", [tensor(True), None])["is_padding"]
    assert [tag is True for tag in tags] == [True, False]
    batch = make_samples([(5, 3), (4, 3)]) | {"rewards": [[0.0, 0.0, 1.0]] * 2}
    declare("rewards", RESPONSE).validate(batch)
    DEFAULT_SCHEMA.validate(batch | {"rewards": zeros(2, 4)})
    DEFAULT_SCHEMA.validate(make_samples([(5, 1), (4, 1)]) | {"rewards": zeros(2, 1)})
    DEFAULT_SCHEMA.validate({key: [] for key in DEFAULT_SCHEMA})
    assert restore_order(["a", "b"], tensor([1, 0]), 2) == ["b", "a"]  # type: ignore[arg-type]
    # Ids that name no groups are no error of losses without groups, or over other groups.
    loss_of(uids=[["a"], ["b"]])
    loss_of(mean=prompt_mean, uids=["a", "b"], trajectory_ids=[[0], [0]])
    require_vocabulary("tokens", [tensor([0, 63]), tensor([5])], 64)
    require_vocabulary("labels", [tensor([5, -100])], 64, [tensor([1.0, 0.0])])
    require_vocabulary("labels", [zeros(0, dtype=torch.int64)] * 2, 64)


def test_a_schema_never_changes() -> None:
    extended = declare("mine", TOKEN, length_offset=-1, required=True)
    assert "mine" not in DEFAULT_SCHEMA
    assert extended["mine"] == Field("mine", TOKEN, length_offset=-1, required=True)
    assert len(extended) == len(DEFAULT_SCHEMA) + 1
    with pytest.raises(AttributeError):
        extended.fields = ()
    with pytest.raises(AttributeError):
        extended["mine"].kind = META
    again = pickle.loads(pickle.dumps(extended))
    assert again == extended
    assert again["mine"].kind is TOKEN
    # It does not fill the help of a call that has it as a default.
    assert repr(DEFAULT_SCHEMA) == f"<Schema of {len(DEFAULT_SCHEMA)} fields>"


def test_declaring_again_replaces_all_but_a_fill_that_the_kind_allows() -> None:
    """Else the attention of a padding sample was masked, and it had no uid."""
    allowed = {
        Fill.ONES: (TOKEN, RESPONSE, SAMPLE),
        Fill.TOKEN_IDS: (TOKEN, RESPONSE, META),
        Fill.IDENTIFIER: (SAMPLE, META),
    }
    for fill, kinds in allowed.items():
        schema = declare("mine", kinds[0], fill=fill)
        for kind in (TOKEN, RESPONSE, SAMPLE, META):
            again, kept = schema.declare("mine", kind), fill if kind in kinds else Fill.ZEROS
            assert (len(again), again["mine"].kind, again["mine"].fill) == (len(schema), kind, kept)
            assert schema.declare("mine", kind, fill=Fill.ZEROS)["mine"].fill is Fill.ZEROS
        assert schema.declare("other", TOKEN)["other"].fill is Fill.ZEROS


INFERRED: list[tuple[Kind, Any]] = [
    (TOKEN, [zeros(5), zeros(3)]),
    (TOKEN, [[0.5] * 5, (1.0, 2.0, 3.0)]),
    (TOKEN, [np.zeros((5, 7)), np.zeros((3, 7))]),
    (TOKEN, [arange(5), arange(3)]),
    (RESPONSE, [[1, 2], np.arange(3)]),
    (RESPONSE, [zeros(2, 7), zeros(3, 7)]),
    (SAMPLE, [1, 2.5]),
    (SAMPLE, [True, False]),
    (SAMPLE, [tensor(1.0), np.float32(2)]),
    (SAMPLE, zeros(2)),
    (SAMPLE, np.arange(2)),
    (META, ["a", None]),
    (META, [{"source": "web"}, None]),
    (META, np.array(["a", "b"])),
]
"""Values of which the kind is the only one that fits."""
DECLARED: list[tuple[Kind, Any]] = [
    (TOKEN, [[0.0] * 5, np.zeros((3, 2))]),
    (SAMPLE, (zeros(4), [1, 2, 3, 4])),
    (POSITIONS, [arange(5), list(range(3))]),
    (POSITIONS, [zeros(3, 5).long(), zeros(3, 3).long()]),
    (Kind.MULTIMODAL, [{"pixels": zeros(2)}, None]),
    (META, [Kind, None]),
    (TOKEN, None),
]


@pytest.mark.parametrize(
    ("kind", "values", "offset"),
    [
        *((*each, 0) for each in INFERRED + DECLARED),
        (TOKEN, [[1], []], -4),
        (RESPONSE, [[0, 1, 2], [0, 1, 2, 3]], 1),
        (EXPERTS, [zeros(4, 2, 2).int(), np.zeros((2, 2, 2), np.int16)], -1),
    ],
)
def test_batches_that_keep_to_the_schema_pass(kind: Kind, values: Any, offset: int) -> None:
    schema = declare("x", kind, length_offset=offset)
    batch = make_samples(MIXED) | {"x": values}
    found = schema.validate(batch)
    assert ("x" in found) == (values is not None)
    rows = kind not in (SAMPLE, Kind.MULTIMODAL, META)
    assert not rows or all(isinstance(value, torch.Tensor) for value in found.get("x", ()))
    # Nor is anything inferred of a field that is declared, or absent.
    assert schema.resolve(batch) is schema
    assert DEFAULT_SCHEMA.resolve(batch | {"x": None}) is DEFAULT_SCHEMA


@pytest.mark.parametrize(("kind", "values"), INFERRED)
def test_the_only_kind_that_fits_is_taken(kind: Kind, values: Any) -> None:
    assert resolve(MIXED, values) == Field("mine", kind)


@settings(max_examples=300, deadline=None)
@given(sample_shapes(), st.booleans())
def test_rows_are_inferred_exactly_where_the_lengths_differ(
    shapes: list[tuple[int, int]], per_token: bool
) -> None:
    values = [rand(total if per_token else response) for total, response in shapes]
    if all(total == response for total, response in shapes):
        with pytest.raises(SchemaError, match="per token or per response token"):
            resolve(shapes, values)
    else:
        assert resolve(shapes, values).kind is (TOKEN if per_token else RESPONSE)


SEVERAL_FIT: list[tuple[list[tuple[int, int]], Any, list[str]]] = [
    (WHOLE_RESPONSES, [rand(5), rand(3)], ["PER_TOKEN", "PER_RESPONSE_TOKEN"]),
    # As many axes as response tokens, or of another number.
    (MIXED, [zeros(2, 5).long(), zeros(3, 3).long()], ["PER_RESPONSE_TOKEN", "POSITION_IDS"]),
    (MIXED, [zeros(4, 5).long(), zeros(4, 3).long()], ["POSITION_IDS"]),
    (MIXED, [zeros(5, 2, 2).int(), zeros(3, 2, 2).int()], ["PER_TOKEN", "ROUTED_EXPERTS"]),
    (MIXED, [zeros(4, 2, 2).int(), zeros(2, 2, 2).int()], ["ROUTED_EXPERTS, length_offset=-1"]),
    (MIXED, [{"pixels": rand(2)}, None], ["MULTIMODAL", "METADATA"]),
    (MIXED, [{}, {}], ["MULTIMODAL", "METADATA"]),
    # No length fits, values that are absent or of several kinds, lists of strings.
    (MIXED, [rand(4), rand(3)], ["METADATA"]),
    (MIXED, [1, None], ["METADATA"]),
    (MIXED, [1, rand(3)], ["METADATA"]),
    (MIXED, [["a", "b"], ["c"]], ["METADATA"]),
    ([], [], [kind.name for kind in Kind if kind is not Kind.TOKENS]),
]


@pytest.mark.parametrize(("shapes", "values", "left"), SEVERAL_FIT)
def test_anything_else_is_an_error_with_a_line_for_each_kind_that_fits(
    shapes: list[tuple[int, int]], values: Any, left: list[str]
) -> None:
    with pytest.raises(SchemaError) as caught:
        resolve(shapes, values)
    lines = " or ".join(f'schema = schema.declare("mine", Kind.{each})' for each in left)
    assert caught.value.declaration == lines
    assert str(caught.value).endswith(f"; declare the field by what it holds: {lines}")
    for line in lines.split(" or ") if "METADATA" not in left else ():
        scope = {"schema": DEFAULT_SCHEMA, "Kind": Kind}
        exec(line, scope)
        scope["schema"].validate(make_samples(shapes) | {"mine": values})
