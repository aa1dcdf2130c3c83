"""What the batch layer refuses, by name and with what was found: a call, its error, its text."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from batch_cases import make_samples, pack_on_all_ranks
from torch import arange, ones, rand, tensor, zeros

from mcore_batching.batch import (
    DEFAULT_SCHEMA,
    BatchError,
    Field,
    Fill,
    Kind,
    OrderError,
    Schema,
    SchemaError,
    StepTotals,
    apply_order,
    fields,
    gather_response,
    make_placeholder,
    restore_order,
    token_mean,
)
from mcore_batching.batch.columns import Columns
from mcore_batching.batch.row_index import Slice, padded_offsets
from mcore_batching.batch.values import require_vocabulary

TOKEN, RESPONSE, SAMPLE = Kind.PER_TOKEN, Kind.PER_RESPONSE_TOKEN, Kind.PER_SAMPLE
POSITIONS, EXPERTS, META = Kind.POSITION_IDS, Kind.ROUTED_EXPERTS, Kind.METADATA
declare = DEFAULT_SCHEMA.declare


def batch_of(name: str, values: Any) -> dict[str, Any]:
    """Two samples, (5, 2) and (3, 3), with one more field."""
    return make_samples([(5, 2), (3, 3)]) | {name: values}


def validate(name: str, values: Any, kind: Kind | None = None, **batch: Any) -> Any:
    """Check such a batch, its field declared anew if there is a kind."""
    schema = DEFAULT_SCHEMA if kind is None else declare(name, kind)
    return schema.validate(batch_of(name, values) | batch)


UNMET: list[tuple[Kind, Any, int | None, str, str]] = [
    (TOKEN, [rand(5), rand(4)], 1, "3 rows, one per token", "[4] and type torch.float32"),
    (RESPONSE, [[*range(5)], [1, 2, 3]], 0, "2 rows, one per response token", "[5] and type"),
    (RESPONSE, [None, [1, 2, 3]], 0, "2 rows, one per response token", "None"),
    (TOKEN, [1.5, [1, 2, 3]], 0, "5 rows, one per token", "1.5"),
    (SAMPLE, [1, "one"], 1, "a number or a tensor", "str 'one'"),
    (SAMPLE, [1, None], 1, "a number or a tensor", "None"),
    *[
        (
            POSITIONS,
            [arange(5), odd.long()],
            1,
            "3 positions, one per token, as [tokens] or [axes, tokens]",
            f"a Tensor of shape {list(odd.shape)} and type torch.int64",
        )
        for odd in (zeros(3, 3, 1), zeros(3, 2))
    ],
    (
        POSITIONS,
        [rand(5), arange(3)],
        0,
        "5 positions, one per token, of an integer type",
        "a Tensor of shape [5] and type torch.float32",
    ),
    (
        EXPERTS,
        [zeros(5, 2).int(), zeros(3, 2, 2).int()],
        0,
        "5 rows, one per token, as [rows, layers, top_k]",
        "a Tensor of shape [5, 2] and type torch.int32",
    ),
    (Kind.MULTIMODAL, [{}, [1]], 1, "a dict of model inputs, or None", "list [1]"),
    (TOKEN, [[1]], None, "2 values, one per sample", "1 values"),
    (SAMPLE, 3, None, "2 values, one per sample", "3"),
    (META, "ab", None, "2 values, one per sample", "str 'ab'"),
]


@pytest.mark.parametrize(("kind", "values", "sample", "expected", "found"), UNMET)
def test_a_value_of_another_kind_is_named_with_its_sample_and_declaration(
    kind: Kind, values: Any, sample: int | None, expected: str, found: str
) -> None:
    with pytest.raises(SchemaError) as caught:
        validate("scores", values, kind)
    error = caught.value
    where = "" if sample is None else f", sample {sample}"
    assert (error.key, error.sample_index, error.expected) == ("scores", sample, expected)
    assert found in error.found
    assert str(error).startswith(f"field 'scores'{where}: expected {expected}, found {error.found}")
    if sample is not None:
        line = f'schema = schema.declare("scores", Kind.{kind.name})'
        assert error.declaration == line
        assert str(error).endswith(f"; correct the values, or this declaration: {line}")


# Of a text even "False" is true.
TAGS: list[Any] = ["False", [1, 2], np.array([0, 1]), math.nan, tensor(math.inf)]
NO_INDICES: list[Any] = [0.0, "0", None, True, [0], tensor(True)]
NO_SEQUENCES: list[Any] = [3, None, {0: 1}, {0, 1}, "ab", tensor(3)]
TOO_LONG = "a row may have at most 2147483647 tokens"

PER_SAMPLE_LINE = (
    "; if it has a value per response token, declare it so: schema = schema.declare"
    r'\("{}", Kind.PER_RESPONSE_TOKEN\)$'
)
INVALID: list[tuple[str, Any, str]] = [
    (
        "mine",
        [1, 2],
        "^field 'mine': expected a declared field, found no declaration; use schema = "
        r"schema.resolve\(batch\), or declare its kind, for example: "
        r'schema = schema.declare\("mine", Kind.PER_RESPONSE_TOKEN\)$',
    ),
    # Lengths, tokens, and other integers; int64 would make 6 of 6.5.
    ("total_lengths", [5, 3.0], ", sample 1: expected an integer .* found 3.0"),
    ("total_lengths", [5, -1], ", sample 1: .* in tokens, found -1"),
    ("total_lengths", 5, "expected a list of one length per sample, found 5"),
    ("response_lengths", [6, 0], ", sample 0: expected at most its total length, 5, found 6"),
    ("response_lengths", [2], "expected 2 values, one per sample, found 1 values"),
    ("tokens", [arange(5), arange(2)], ", sample 1: expected 3 tokens, found a Tensor"),
    ("tokens", [[1] * 5, [4, 6.5, 7]], ", sample 1: expected 3 tokens, of an integer type"),
    ("tokens", [[1] * 5, [4, [5], 6]], ", sample 1: expected numbers, in lists of one"),
    ("position_ids", [[1] * 5, [4, 6.5, 7]], ", sample 1: .*of an integer type"),
    # Masks are finite weights of 0 or more, one a token.
    *[
        ("loss_masks", [make([1.0, 0.5]), make([bad, 0, 1])], f", sample 1: .* more, found {bad}")
        for make in (list, torch.tensor, np.array)
        for bad in (math.nan, -1.0, -0.5, math.inf)
    ],
    ("loss_masks", [["1", "2"], [1, 1, 1]], ", sample 0"),
    ("loss_masks", [[1, None], [1, 1, 1]], ", sample 0"),
    ("loss_masks", [[1, [2]], [1, 1, 1]], ", sample 0"),
    # [2, 1] would broadcast with [2] to [2, 2].
    ("loss_masks", [ones(2, 1), ones(3)], ", sample 0: expected 2 rows, .* one number in each"),
    # Of a complex number a loss took the real part, with a warning at most.
    ("tokens", [[1j, 2, 3, 4, 5], [4, 5, 6]], "expected"),
    ("loss_masks", [[1, 1j], [1, 1, 1]], "expected"),
    ("advantages", [zeros(2), zeros(3, dtype=torch.complex64)], "expected"),
    ("attention_mask", [np.ones(5, np.complex64), [1, 1, 1]], "expected"),
    ("rewards", [1.0, 1j], "expected"),
    ("rewards", zeros(2, dtype=torch.complex64), "expected"),
    ("rollout_routed_experts", [zeros(4, 1, 1), zeros(2, 1, 1) * 1j], "expected"),
    # Of a text even "False" is true.
    *[("is_padding", [False, bad], ", sample 1: expected True or False") for bad in TAGS],
    # Values per sample that are vectors, or of several shapes.
    (
        "rewards",
        [[0.0, 1.0], [0.0, 0.0, 1.0]],
        r", sample 1: .*of shape \[3\] and type torch.float32 beside a Tensor of .*"
        + PER_SAMPLE_LINE.format("rewards"),
    ),
    (
        "raw_reward",
        [0.5, zeros(3)],
        r", sample 1: .*of shape \[3\] and type torch.float32 beside 0.5"
        + PER_SAMPLE_LINE.format("raw_reward"),
    ),
]


@pytest.mark.parametrize(("name", "values", "text"), INVALID)
def test_invalid(name: str, values: Any, text: str) -> None:
    with pytest.raises(SchemaError, match=text if text[0] == "^" else f"'{name}'.*{text}"):
        validate(name, values)


Row = tuple[Callable[[], Any], type[Exception], str]


def fabricate(wrong: Any) -> Any:
    """Make a placeholder with this value."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fields, "fabricated", lambda *given: wrong)
        return make_placeholder(DEFAULT_SCHEMA, ["log_probs"], None)


def resolve_and_validate(values: Any) -> Any:
    batch = batch_of("mine", values)
    return DEFAULT_SCHEMA.resolve(batch).validate(batch)


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


def loss_of(*values: Any) -> Any:
    (row,) = pack_on_all_ranks(make_samples([(4, 2), (5, 3)]))
    return token_mean([*values], row, StepTotals())


REFUSALS: list[Row] = [
    # Declarations that no batch could meet.
    (lambda: Field("x", SAMPLE, length_offset=1), SchemaError, "expected length_offset=0"),
    (lambda: Field("x", Kind.TOKENS), SchemaError, "Kind.TOKENS on 'tokens' alone"),
    (lambda: Field("tokens", TOKEN), SchemaError, "found Kind.PER_TOKEN"),
    (lambda: Field("total_lengths", META), SchemaError, "Kind.PER_SAMPLE, found Kind.METADATA"),
    (lambda: Field("x", "per token"), SchemaError, "one of Kind.TOKENS, Kind.PER_TOKEN"),  # type: ignore[arg-type]
    (
        lambda: Field("x", SAMPLE, fill=Fill.TOKEN_IDS),
        SchemaError,
        "expected a fill of Kind.PER_SAMPLE, one of Fill.ZEROS, Fill.ONES, Fill.IDENTIFIER, found "
        "Fill.TOKEN_IDS",
    ),
    (
        lambda: Schema((Field("x", TOKEN), Field("x", META))),
        SchemaError,
        "expected one declaration, found Kind.PER_TOKEN and Kind.METADATA",
    ),
    # Fields that are not there, or not declared.
    *[
        (
            lambda more=more: declare("mine", SAMPLE, required=True).validate(
                make_samples([(5, 2)]) | more
            ),
            SchemaError,
            "'mine': expected one value per sample",
        )
        for more in ({}, {"mine": None})
    ],
    (
        lambda: make_placeholder(DEFAULT_SCHEMA, ["tokens", "mine"], make_samples([(4, 2)])),
        SchemaError,
        "^field 'mine': expected a declared field, found no declaration; declare its kind, for "
        r'example: schema = schema.declare\("mine", Kind.PER_RESPONSE_TOKEN\)$',
    ),
    *[
        (
            lambda values=values: DEFAULT_SCHEMA.resolve(batch_of("mine", values)),
            SchemaError,
            f"2 values, one per sample, found {found}",
        )
        for values, found in (([1], "1 values"), (3, "3"), ({}, "dict {}"))
    ],
    *[
        (lambda values=values: resolve_and_validate(values), SchemaError, "'mine'.* expected")
        for values in ([zeros(5), zeros(3) * 1j], zeros(2, dtype=torch.complex64))
    ],
    # What one tensor of a column cannot hold.
    (lambda: columns_of(ones(2).to_sparse(), ones(1)), SchemaError, "'mine'.*sample 0: .* dense"),
    (
        lambda: columns_of(ones(2, 1), ones(1, 2)),
        SchemaError,
        r"'mine'.*rows of one shape .* \[1\], \[2\]; .*METADATA",
    ),
    (
        lambda: columns_of(ones(2), ones(1).to(torch.float8_e4m3fn)),
        SchemaError,
        "'mine'.*types that have one in common",
    ),
    # Rows.
    *[
        (lambda huge=huge: padded_offsets([3, 2], 1, huge), BatchError, TOO_LONG)
        for huge in (2**31, 10**400)
    ],
    (lambda: Slice((0, 6), 2, 0), BatchError, "6 tokens cannot be cut into 4 .* pad them to 8"),
    (lambda: Slice((0, 8, 13), 4, 0), BatchError, "5 tokens cannot be cut into 8 equal"),
    (lambda: Slice((0, 8), 2, -1), BatchError, "a rank below context_parallel_size=2, got -1"),
    (lambda: Slice((0, 8), 2, 2), BatchError, "a rank below context_parallel_size=2, got 2"),
    (lambda: packed("advantages"), ValueError, "as Kind.PER_RESPONSE_TOKEN.*Kind.PER_TOKEN"),
    (
        lambda: packed("ragged", declare("ragged", TOKEN, length_offset=1), ragged=[rand(5, 2)]),
        ValueError,
        "'ragged' cannot be packed.*at most one row per token",
    ),
    (
        lambda: packed(
            "tokens",
            declare("mrope", POSITIONS),
            position_ids=[arange(4)],
            mrope=[arange(4)],
        ),
        SchemaError,
        "one field of kind POSITION_IDS .* position_ids, mrope",
    ),
    *[
        (
            lambda shape=shape: gathered(shape),
            ValueError,
            r"shape \[4, ...\], one value per token .* got \[",
        )
        for shape in ((3,), (1, 4), ())
    ],
    (
        lambda: gathered((2,), 2),
        ValueError,
        "the 2 ranks that share the row, got 1; set group to the",
    ),
    (
        lambda: loss_of(zeros(2), zeros(5)),
        ValueError,
        r"sample 1 .*expected values of shape \[3\].*got \[5\]",
    ),
    (lambda: loss_of(zeros(2)), ValueError, "expected values of 2 samples, got 1"),
    # Placeholders: here, and not in some ``torch.cat`` later.
    (lambda: fabricate(zeros(1)), SchemaError, "sample 0: expected 0 rows, .* found a Tensor of"),
    (lambda: fabricate(None), SchemaError, "expected 0 rows, one per response token, found None"),
    # Orders; that no machine holds so many samples is found at once.
    *[
        (call, OrderError, "expected integer ")
        for bad in NO_INDICES
        for call in (
            lambda bad=bad: restore_order(["a", "b"], [1, bad], 2),
            lambda bad=bad: apply_order(["a", "b"], [1, bad]),
        )
    ],
    *[
        (
            lambda bad=bad: restore_order(["a", "b"], bad, 2),
            BatchError,
            "sample_indices must be a sequence",
        )
        for bad in NO_SEQUENCES
    ],
    (lambda: apply_order(["a", "b"], [0, 0]), OrderError, "missing 1; doubled 0"),
    (lambda: restore_order(["a"], [0], 2**31), OrderError, "for each of 2147483648 samples"),
    # Token ids.
    (
        lambda: require_vocabulary("tokens", [tensor([0, 63]), tensor([5, 64, 70])], 64),
        SchemaError,
        r"'tokens', sample 1: expected token ids of 0 to 63 \(use the model's tokenizer, or build "
        r"it with vocab_size=71\), found 64 at place 1",
    ),
    (
        lambda: require_vocabulary("labels", [tensor([5, -100])], 64, [tensor([0.0, 0.5])]),
        SchemaError,
        "'labels', sample 0: .* found -100 at place 1",
    ),
]


@pytest.mark.parametrize(("call", "error", "text"), REFUSALS, ids=[row[-1] for row in REFUSALS])
def test_refused(call: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()


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
    require_vocabulary("tokens", [tensor([0, 63]), tensor([5])], 64)
    require_vocabulary("labels", [tensor([5, -100])], 64, [tensor([1.0, 0.0])])
    require_vocabulary("labels", [zeros(0, dtype=torch.int64)] * 2, 64)
