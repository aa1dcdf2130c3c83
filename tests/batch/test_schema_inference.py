"""`Schema.resolve`: a kind where the data fits exactly one, else an error, never a guess."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from batch_cases import make_samples, sample_shapes
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_batching.batch import DEFAULT_SCHEMA, Kind, SchemaError

MIXED = [(5, 2), (3, 3)]
WHOLE_RESPONSES = [(5, 5), (3, 3)]
NO_SAMPLES: list[tuple[int, int]] = []


def resolve(shapes: list[tuple[int, int]], values: Any) -> Any:
    """The declaration that is inferred for a field ``mine`` of these values."""
    return DEFAULT_SCHEMA.resolve(make_samples(shapes) | {"mine": values})["mine"]


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([torch.zeros(5), torch.zeros(3)], Kind.PER_TOKEN),
        ([[0.5] * 5, (1.0, 2.0, 3.0)], Kind.PER_TOKEN),
        ([np.zeros((5, 7)), np.zeros((3, 7))], Kind.PER_TOKEN),
        ([torch.arange(5), torch.arange(3)], Kind.PER_TOKEN),
        ([torch.zeros(2), torch.zeros(3)], Kind.PER_RESPONSE_TOKEN),
        ([[1, 2], np.arange(3)], Kind.PER_RESPONSE_TOKEN),
        ([1, 2.5], Kind.PER_SAMPLE),
        ([True, False], Kind.PER_SAMPLE),
        ([torch.tensor(1.0), np.float32(2)], Kind.PER_SAMPLE),
        (torch.zeros(2), Kind.PER_SAMPLE),
        (np.arange(2), Kind.PER_SAMPLE),
        (["a", None], Kind.METADATA),
        ([{"source": "web"}, None], Kind.METADATA),
        (np.array(["a", "b"]), Kind.METADATA),
    ],
    ids=str,
)
def test_the_only_kind_that_fits_is_taken(values: Any, kind: Kind) -> None:
    field = resolve(MIXED, values)
    assert (field.kind, field.length_offset, field.required) == (kind, 0, False)


@pytest.mark.parametrize(
    ("shapes", "values", "left"),
    [
        (
            WHOLE_RESPONSES,
            [torch.rand(5), torch.rand(3)],
            ["Kind.PER_TOKEN", "Kind.PER_RESPONSE_TOKEN"],
        ),
        (
            MIXED,
            [torch.zeros(2, 5).long(), torch.zeros(3, 3).long()],
            ["Kind.PER_RESPONSE_TOKEN", "Kind.POSITION_IDS"],
        ),
        (
            MIXED,
            [torch.zeros(4, 5).long(), torch.zeros(4, 3).long()],
            ["Kind.POSITION_IDS"],
        ),
        (
            MIXED,
            [torch.zeros(5, 2, 2).int(), torch.zeros(3, 2, 2).int()],
            ["Kind.PER_TOKEN", "Kind.ROUTED_EXPERTS"],
        ),
        (
            MIXED,
            [torch.zeros(4, 2, 2).int(), torch.zeros(2, 2, 2).int()],
            ["Kind.ROUTED_EXPERTS, length_offset=-1"],
        ),
        (
            MIXED,
            [{"pixels": torch.rand(2)}, None],
            ["Kind.MULTIMODAL", "Kind.METADATA"],
        ),
        (MIXED, [{}, {}], ["Kind.MULTIMODAL", "Kind.METADATA"]),
        (MIXED, [torch.rand(4), torch.rand(3)], ["Kind.METADATA"]),
        (MIXED, [1, None], ["Kind.METADATA"]),
        (MIXED, [1, torch.rand(3)], ["Kind.METADATA"]),
        (MIXED, [["a", "b"], ["c"]], ["Kind.METADATA"]),
        (
            NO_SAMPLES,
            [],
            [f"Kind.{kind.name}" for kind in Kind if kind is not Kind.TOKENS],
        ),
    ],
    ids=[
        "whole responses",
        "as many axes as response tokens",
        "axes",
        "experts or rows",
        "experts",
        "dicts",
        "empty dicts",
        "no length fits",
        "None among numbers",
        "numbers and rows",
        "lists of strings",
        "no samples",
    ],
)
def test_anything_else_is_an_error_with_a_line_for_each_kind_that_fits(
    shapes: list[tuple[int, int]], values: Any, left: list[str]
) -> None:
    with pytest.raises(SchemaError) as caught:
        resolve(shapes, values)
    lines = " or ".join(f'schema = schema.declare("mine", {each})' for each in left)
    assert caught.value.declaration == lines
    assert str(caught.value).endswith(f"; declare the field by what it holds: {lines}")
    for line in lines.split(" or ") if "Kind.METADATA" not in lines else ():
        scope = {"schema": DEFAULT_SCHEMA, "Kind": Kind}
        exec(line, scope)
        scope["schema"].validate(make_samples(shapes) | {"mine": values})


@pytest.mark.parametrize(("values", "found"), [([1], "1 values"), (3, "3"), ({}, "dict {}")])
def test_what_is_not_one_value_a_sample_is_refused(values: Any, found: str) -> None:
    with pytest.raises(SchemaError, match=f"2 values, one per sample, found {found}"):
        resolve(MIXED, values)


def test_a_field_of_none_is_absent() -> None:
    schema = DEFAULT_SCHEMA.resolve(make_samples(MIXED) | {"mine": None})
    assert schema is DEFAULT_SCHEMA


def test_declared_fields_are_left_alone() -> None:
    schema = DEFAULT_SCHEMA.declare("mine", Kind.METADATA)
    batch = make_samples(MIXED) | {"mine": [torch.rand(5), torch.rand(3)]}
    assert schema.resolve(batch) is schema


@settings(max_examples=300, deadline=None)
@given(sample_shapes(), st.booleans())
def test_rows_are_inferred_exactly_where_the_lengths_differ(
    shapes: list[tuple[int, int]], per_token: bool
) -> None:
    values = [torch.rand(total if per_token else response) for total, response in shapes]
    if all(total == response for total, response in shapes):
        with pytest.raises(SchemaError, match="per token or per response token"):
            resolve(shapes, values)
    else:
        expected = Kind.PER_TOKEN if per_token else Kind.PER_RESPONSE_TOKEN
        assert resolve(shapes, values).kind is expected


@pytest.mark.parametrize(
    ("kind", "values", "text"),
    [
        (
            Kind.PER_RESPONSE_TOKEN,
            [torch.zeros(47 if i == 3 else 48) for i in range(32)],
            "sample 3: expected 48 rows, one per response token, "
            "found a Tensor of shape [47] and type torch.float32",
        ),
        (
            Kind.PER_TOKEN,
            [[0.0] * (49 + (i > 2)) for i in range(32)],
            "sample 0: expected 50 rows, one per token, "
            "found a Tensor of shape [49] and type torch.float32",
        ),
        (
            Kind.PER_SAMPLE,
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
