"""What the batch layer refuses, by name and with what was found: the rows of `REFUSALS.md`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from batch_cases import make_samples, pack_on_all_ranks, refusals
from torch import ones, rand, tensor, zeros

from mcore_batching import batch
from mcore_batching.batch import (
    DEFAULT_SCHEMA,
    Kind,
    Schema,
    SchemaError,
    StepTotals,
    fields,
    gather_response,
    make_placeholder,
    restore_order,
    row_index,
    token_mean,
)
from mcore_batching.batch import values as value_checks
from mcore_batching.batch.columns import Columns
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


REFUSALS = refusals(__file__, torch, batch, row_index, value_checks, globals())


@pytest.mark.parametrize(("call", "error", "text"), REFUSALS)
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
