"""The guarantees of `Schema`: declarations, and the errors of batches that break them."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from batch_cases import make_samples

from mcore_batching.batch import DEFAULT_SCHEMA, Field, Fill, Kind, Schema, SchemaError


def batch_of(key: str, values: Any) -> dict[str, Any]:
    """Two samples, (5, 2) and (3, 3), with one more field."""
    return make_samples([(5, 2), (3, 3)]) | {key: values}


def test_a_schema_never_changes() -> None:
    extended = DEFAULT_SCHEMA.declare("mine", Kind.PER_TOKEN, length_offset=-1, required=True)
    assert "mine" not in DEFAULT_SCHEMA
    assert extended["mine"] == Field("mine", Kind.PER_TOKEN, length_offset=-1, required=True)
    assert len(extended) == len(DEFAULT_SCHEMA) + 1
    with pytest.raises(AttributeError):
        extended.fields = ()
    with pytest.raises(AttributeError):
        extended["mine"].kind = Kind.METADATA


def test_a_default_schema_does_not_fill_the_help_of_a_call() -> None:
    assert repr(DEFAULT_SCHEMA) == f"<Schema of {len(DEFAULT_SCHEMA)} fields>"


def test_declaring_again_replaces() -> None:
    schema = DEFAULT_SCHEMA.declare("rewards", Kind.METADATA)
    assert schema["rewards"].kind is Kind.METADATA
    assert len(schema) == len(DEFAULT_SCHEMA)


def test_declaring_again_keeps_the_fill_that_the_kind_allows() -> None:
    schema = DEFAULT_SCHEMA.declare("mine", Kind.PER_TOKEN, fill=Fill.ONES)
    for kind, fill in {
        Kind.PER_TOKEN: Fill.ONES,
        Kind.PER_SAMPLE: Fill.ONES,
        Kind.METADATA: Fill.ZEROS,
    }.items():
        assert schema.declare("mine", kind)["mine"].fill is fill
        assert schema.declare("mine", kind, fill=Fill.ZEROS)["mine"].fill is Fill.ZEROS
    assert schema.declare("other", Kind.PER_TOKEN)["other"].fill is Fill.ZEROS


def test_a_schema_survives_pickling() -> None:
    again = pickle.loads(pickle.dumps(DEFAULT_SCHEMA.declare("mine", Kind.PER_TOKEN)))
    assert again == DEFAULT_SCHEMA.declare("mine", Kind.PER_TOKEN)
    assert again["mine"].kind is Kind.PER_TOKEN


@pytest.mark.parametrize(
    ("declare", "text"),
    [
        (lambda: Field("x", Kind.PER_SAMPLE, length_offset=1), "expected length_offset=0"),
        (lambda: Field("x", Kind.TOKENS), "Kind.TOKENS on 'tokens' alone"),
        (lambda: Field("tokens", Kind.PER_TOKEN), "found Kind.PER_TOKEN"),
        (
            lambda: Field("total_lengths", Kind.METADATA),
            "expected Kind.PER_SAMPLE, found Kind.METADATA",
        ),
        (lambda: Field("x", "per token"), "one of Kind.TOKENS, Kind.PER_TOKEN"),
        (
            lambda: Field("x", Kind.PER_SAMPLE, fill=Fill.TOKEN_IDS),
            "expected a fill of Kind.PER_SAMPLE, one of Fill.ZEROS, Fill.ONES, Fill.IDENTIFIER, "
            "found Fill.TOKEN_IDS",
        ),
        (
            lambda: Schema((Field("x", Kind.PER_TOKEN), Field("x", Kind.METADATA))),
            "expected one declaration, found Kind.PER_TOKEN and Kind.METADATA",
        ),
    ],
    ids=["offset", "second tokens", "other tokens", "other lengths", "no kind", "fill", "twice"],
)
def test_declarations_that_no_batch_could_meet_are_refused(declare: Any, text: str) -> None:
    with pytest.raises(SchemaError, match=text):
        declare()


@pytest.mark.parametrize(
    ("kind", "offset", "values"),
    [
        (Kind.PER_TOKEN, 0, [torch.zeros(5), torch.zeros(3)]),
        (Kind.PER_TOKEN, 0, [[0.0] * 5, np.zeros((3, 2))]),
        (Kind.PER_TOKEN, -4, [[1], []]),
        (Kind.PER_RESPONSE_TOKEN, 0, [torch.zeros(2, 7), torch.zeros(3, 7)]),
        (Kind.PER_RESPONSE_TOKEN, 1, [[0, 1, 2], [0, 1, 2, 3]]),
        (Kind.PER_SAMPLE, 0, [1, 2.5]),
        (Kind.PER_SAMPLE, 0, torch.zeros(2)),
        (Kind.PER_SAMPLE, 0, np.zeros(2)),
        (Kind.PER_SAMPLE, 0, (torch.zeros(4), [1, 2, 3, 4])),
        (Kind.POSITION_IDS, 0, [torch.arange(5), list(range(3))]),
        (Kind.POSITION_IDS, 0, [torch.zeros(3, 5).long(), torch.zeros(3, 3).long()]),
        (Kind.ROUTED_EXPERTS, -1, [torch.zeros(4, 2, 2).int(), np.zeros((2, 2, 2), np.int16)]),
        (Kind.MULTIMODAL, 0, [{"pixels": torch.zeros(2)}, None]),
        (Kind.METADATA, 0, [Kind, None]),
        (Kind.PER_TOKEN, 0, None),
    ],
    ids=str,
)
def test_batches_that_keep_to_the_schema_pass(kind: Kind, offset: int, values: Any) -> None:
    schema = DEFAULT_SCHEMA.declare("x", kind, length_offset=offset)
    found = schema.validate(batch_of("x", values))
    assert ("x" in found) == (values is not None)
    rows = kind not in (Kind.PER_SAMPLE, Kind.MULTIMODAL, Kind.METADATA)
    assert not rows or all(isinstance(value, torch.Tensor) for value in found.get("x", ()))


@pytest.mark.parametrize(
    ("kind", "values", "sample", "expected", "found"),
    [
        (
            Kind.PER_TOKEN,
            [torch.rand(5), torch.rand(4)],
            1,
            "3 rows, one per token",
            "a Tensor of shape [4] and type torch.float32",
        ),
        (
            Kind.PER_RESPONSE_TOKEN,
            [[1, 2, 3, 4, 5], [1, 2, 3]],
            0,
            "2 rows, one per response token",
            "a Tensor of shape [5] and type torch.int64",
        ),
        (
            Kind.PER_RESPONSE_TOKEN,
            [None, [1, 2, 3]],
            0,
            "2 rows, one per response token",
            "None",
        ),
        (Kind.PER_TOKEN, [1.5, [1, 2, 3]], 0, "5 rows, one per token", "1.5"),
        (Kind.PER_SAMPLE, [1, "one"], 1, "a number or a tensor", "str 'one'"),
        (Kind.PER_SAMPLE, [1, None], 1, "a number or a tensor", "None"),
        (
            Kind.POSITION_IDS,
            [torch.arange(5), torch.arange(9).view(3, 3, 1)],
            1,
            "3 positions, one per token, as [tokens] or [axes, tokens]",
            "a Tensor of shape [3, 3, 1] and type torch.int64",
        ),
        (
            Kind.POSITION_IDS,
            [torch.arange(5), torch.zeros(3, 2).long()],
            1,
            "3 positions, one per token, as [tokens] or [axes, tokens]",
            "a Tensor of shape [3, 2] and type torch.int64",
        ),
        (
            Kind.POSITION_IDS,
            [torch.rand(5), torch.arange(3)],
            0,
            "5 positions, one per token, of an integer type",
            "a Tensor of shape [5] and type torch.float32",
        ),
        (
            Kind.ROUTED_EXPERTS,
            [torch.zeros(5, 2).int(), torch.zeros(3, 2, 2).int()],
            0,
            "5 rows, one per token, as [rows, layers, top_k]",
            "a Tensor of shape [5, 2] and type torch.int32",
        ),
        (Kind.MULTIMODAL, [{}, [1]], 1, "a dict of model inputs, or None", "list [1]"),
        (Kind.PER_TOKEN, [[1]], None, "2 values, one per sample", "1 values"),
        (Kind.PER_SAMPLE, 3, None, "2 values, one per sample", "3"),
        (Kind.METADATA, "ab", None, "2 values, one per sample", "str 'ab'"),
    ],
    ids=lambda value: value.name if isinstance(value, Kind) else "",
)
def test_errors_name_key_sample_expected_and_found(
    kind: Kind, values: Any, sample: int | None, expected: str, found: str
) -> None:
    schema = DEFAULT_SCHEMA.declare("scores", kind)
    with pytest.raises(SchemaError) as caught:
        schema.validate(batch_of("scores", values))
    error = caught.value
    where = "" if sample is None else f", sample {sample}"
    assert (error.key, error.sample_index) == ("scores", sample)
    assert (error.expected, error.found) == (expected, found)
    assert str(error).startswith(f"field 'scores'{where}: expected {expected}, found {found}")
    if sample is not None:
        line = f'schema = schema.declare("scores", Kind.{kind.name})'
        assert error.declaration == line
        assert str(error).endswith(f"; correct the values, or this declaration: {line}")


def test_tokens_must_be_integers_of_the_total_length() -> None:
    batch = make_samples([(5, 2), (3, 3)])
    batch["tokens"][1] = batch["tokens"][1][:2]
    with pytest.raises(SchemaError, match=r"'tokens', sample 1: expected 3 tokens, found a Tensor"):
        DEFAULT_SCHEMA.validate(batch)
    batch["tokens"][1] = torch.rand(3)
    with pytest.raises(SchemaError, match="3 tokens, of an integer type"):
        DEFAULT_SCHEMA.validate(batch)


@pytest.mark.parametrize(
    ("name", "values", "text"),
    [
        ("total_lengths", [5, 3.0], "'total_lengths', sample 1: expected an integer .* found 3.0"),
        (
            "total_lengths",
            [5, -1],
            "sample 1: expected an integer .* in tokens, found -1",
        ),
        ("response_lengths", [6, 0], "sample 0: expected at most its total length, 5, found 6"),
        ("response_lengths", [2], "expected 2 values, one per sample, found 1 values"),
        ("total_lengths", 5, "'total_lengths': expected a list of one length per sample, found 5"),
    ],
    ids=["float", "negative", "response", "number", "no list"],
)
def test_lengths_must_be_lengths(name: str, values: Any, text: str) -> None:
    with pytest.raises(SchemaError, match=text):
        DEFAULT_SCHEMA.validate(make_samples([(5, 2), (3, 3)]) | {name: values})


@pytest.mark.parametrize("absent", [True, False], ids=["absent", "None"])
def test_a_required_field_must_be_there(absent: bool) -> None:
    schema = DEFAULT_SCHEMA.declare("mine", Kind.PER_SAMPLE, required=True)
    batch = make_samples([(5, 2)]) | ({} if absent else {"mine": None})
    with pytest.raises(SchemaError, match="'mine': expected one value per sample"):
        schema.validate(batch)


def test_an_undeclared_field_is_an_error_with_the_line_that_declares_it() -> None:
    with pytest.raises(SchemaError) as caught:
        DEFAULT_SCHEMA.validate(batch_of("mine", [1, 2]))
    assert str(caught.value) == (
        "field 'mine': expected a declared field, found no declaration; use schema = "
        "schema.resolve(batch), or declare its kind, for example: "
        'schema = schema.declare("mine", Kind.PER_RESPONSE_TOKEN)'
    )


@pytest.mark.parametrize(
    ("name", "values", "found"),
    [
        (
            "rewards",
            [[0.0, 1.0], [0.0, 0.0, 1.0]],
            "of shape [3] and type torch.float32 beside a Tensor of ",
        ),
        ("scores", [0.5, torch.zeros(3)], "of shape [3] and type torch.float32 beside 0.5"),
    ],
)
def test_values_per_sample_that_differ_in_shape_are_refused(
    name: str, values: Any, found: str
) -> None:
    """Rewards of every response token stayed as they were, and a padding sample had too many."""
    schema = DEFAULT_SCHEMA.declare(name, Kind.PER_SAMPLE)
    with pytest.raises(SchemaError) as caught:
        schema.validate(batch_of(name, values))
    assert (caught.value.key, caught.value.sample_index) == (name, 1)
    assert found in caught.value.found
    line = f'schema = schema.declare("{name}", Kind.PER_RESPONSE_TOKEN)'
    assert str(caught.value).endswith(
        f"if it has a value per response token, declare it so: {line}"
    )


def test_rewards_as_long_as_all_responses_are_no_numbers() -> None:
    """They would pass until a batch whose responses differ in length."""
    batch = make_samples([(5, 3), (4, 3)]) | {"rewards": [[0.0, 0.0, 1.0]] * 2}
    with pytest.raises(SchemaError, match=r"'rewards', sample 0: expected one number per sample"):
        DEFAULT_SCHEMA.validate(batch)
    DEFAULT_SCHEMA.declare("rewards", Kind.PER_RESPONSE_TOKEN).validate(batch)
    DEFAULT_SCHEMA.validate(batch | {"rewards": torch.zeros(2, 4)})
    DEFAULT_SCHEMA.validate(make_samples([(5, 1), (4, 1)]) | {"rewards": torch.zeros(2, 1)})


def test_a_batch_without_samples_passes() -> None:
    DEFAULT_SCHEMA.validate({key: [] for key in DEFAULT_SCHEMA})


def test_a_mask_has_one_number_a_token() -> None:
    """A mask of [2, 1] would broadcast with values of [2] to [2, 2]."""
    with pytest.raises(SchemaError, match=r"sample 0: expected 2 rows, .* one number in each"):
        DEFAULT_SCHEMA.validate(make_samples([(4, 2)]) | {"loss_masks": [torch.ones(2, 1)]})
