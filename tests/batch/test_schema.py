"""`Schema`: declarations never change, and a kind is inferred only where the data fits one."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from batch_cases import make_samples, sample_shapes
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import arange, rand, tensor, zeros

from mcore_batching.batch import DEFAULT_SCHEMA, Field, Fill, Kind, SchemaError

MIXED, WHOLE_RESPONSES = [(5, 2), (3, 3)], [(5, 5), (3, 3)]
TOKEN, RESPONSE, SAMPLE = Kind.PER_TOKEN, Kind.PER_RESPONSE_TOKEN, Kind.PER_SAMPLE
META = Kind.METADATA


def resolve(shapes: list[tuple[int, int]], values: Any) -> Any:
    """The declaration that is inferred for a field ``mine`` of these values."""
    return DEFAULT_SCHEMA.resolve(make_samples(shapes) | {"mine": values})["mine"]


def test_a_schema_never_changes() -> None:
    extended = DEFAULT_SCHEMA.declare("mine", TOKEN, length_offset=-1, required=True)
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
        schema = DEFAULT_SCHEMA.declare("mine", kinds[0], fill=fill)
        for kind in (TOKEN, RESPONSE, SAMPLE, META):
            again, kept = schema.declare("mine", kind), fill if kind in kinds else Fill.ZEROS
            assert (len(again), again["mine"].kind, again["mine"].fill) == (len(schema), kind, kept)
            assert schema.declare("mine", kind, fill=Fill.ZEROS)["mine"].fill is Fill.ZEROS
        assert schema.declare("other", TOKEN)["other"].fill is Fill.ZEROS


@pytest.mark.parametrize(
    ("kind", "offset", "values"),
    [
        (TOKEN, 0, [zeros(5), zeros(3)]),
        (TOKEN, 0, [[0.0] * 5, np.zeros((3, 2))]),
        (TOKEN, -4, [[1], []]),
        (RESPONSE, 0, [zeros(2, 7), zeros(3, 7)]),
        (RESPONSE, 1, [[0, 1, 2], [0, 1, 2, 3]]),
        (SAMPLE, 0, [1, 2.5]),
        (SAMPLE, 0, zeros(2)),
        (SAMPLE, 0, np.zeros(2)),
        (SAMPLE, 0, (zeros(4), [1, 2, 3, 4])),
        (Kind.POSITION_IDS, 0, [arange(5), list(range(3))]),
        (Kind.POSITION_IDS, 0, [zeros(3, 5).long(), zeros(3, 3).long()]),
        (Kind.ROUTED_EXPERTS, -1, [zeros(4, 2, 2).int(), np.zeros((2, 2, 2), np.int16)]),
        (Kind.MULTIMODAL, 0, [{"pixels": zeros(2)}, None]),
        (META, 0, [Kind, None]),
        (TOKEN, 0, None),
    ],
)
def test_batches_that_keep_to_the_schema_pass(kind: Kind, offset: int, values: Any) -> None:
    schema = DEFAULT_SCHEMA.declare("x", kind, length_offset=offset)
    batch = make_samples(MIXED) | {"x": values}
    found = schema.validate(batch)
    assert ("x" in found) == (values is not None)
    rows = kind not in (SAMPLE, Kind.MULTIMODAL, META)
    assert not rows or all(isinstance(value, torch.Tensor) for value in found.get("x", ()))
    # Nor is anything inferred of a field that is declared, or absent.
    assert schema.resolve(batch) is schema
    assert DEFAULT_SCHEMA.resolve(batch | {"x": None}) is DEFAULT_SCHEMA


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([zeros(5), zeros(3)], TOKEN),
        ([[0.5] * 5, (1.0, 2.0, 3.0)], TOKEN),
        ([np.zeros((5, 7)), np.zeros((3, 7))], TOKEN),
        ([arange(5), arange(3)], TOKEN),
        ([[1, 2], np.arange(3)], RESPONSE),
        ([1, 2.5], SAMPLE),
        ([True, False], SAMPLE),
        ([tensor(1.0), np.float32(2)], SAMPLE),
        (zeros(2), SAMPLE),
        (np.arange(2), SAMPLE),
        (["a", None], META),
        ([{"source": "web"}, None], META),
        (np.array(["a", "b"]), META),
    ],
)
def test_the_only_kind_that_fits_is_taken(values: Any, kind: Kind) -> None:
    field = resolve(MIXED, values)
    assert (field.kind, field.length_offset, field.required) == (kind, 0, False)


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
    (
        MIXED,
        [zeros(2, 5).long(), zeros(3, 3).long()],
        ["PER_RESPONSE_TOKEN", "POSITION_IDS"],
    ),
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


@pytest.mark.parametrize(
    ("kind", "values", "text"),
    [
        (
            RESPONSE,
            [zeros(47 if i == 3 else 48) for i in range(32)],
            "sample 3: expected 48 rows, one per response token, "
            "found a Tensor of shape [47] and type torch.float32",
        ),
        (
            TOKEN,
            [[0.0] * (49 + (i > 2)) for i in range(32)],
            "sample 0: expected 50 rows, one per token, "
            "found a Tensor of shape [49] and type torch.float32",
        ),
        (
            SAMPLE,
            [None if i == 7 else 0.5 for i in range(32)],
            "sample 7: expected a number or a tensor, found None",
        ),
    ],
    ids=["per response token", "several samples", "per sample"],
)
def test_the_samples_that_keep_a_field_from_a_kind_are_named(
    kind: Kind, values: Any, text: str
) -> None:
    """As metadata, which is all that was offered, the mistake would have been carried along."""
    with pytest.raises(SchemaError) as caught:
        resolve([(50, 48)] * 32, values)
    assert str(caught.value) == (
        f"field 'mine', {text}; correct the values, or this declaration: "
        f'schema = schema.declare("mine", Kind.{kind.name})'
    )
