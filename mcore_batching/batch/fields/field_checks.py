"""Values checked against their declarations, once, where a batch enters. Lists and arrays become
tensors here, so code behind this check handles tensors only (but for numbers per sample, multimodal
inputs and metadata)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mcore_batching.batch.errors import SchemaError
from mcore_batching.batch.fields.fields import INTEGRAL, Field, Kind, declaration_line
from mcore_batching.batch.fields.values import (
    count_of,
    describe,
    is_integral,
    is_tagged,
    require_loss_masks,
    shape_of,
    tensor_of,
)
from mcore_batching.planning.integers import as_integer

_ROWS_OF = {
    Kind.TOKENS: "tokens",
    Kind.PER_TOKEN: "rows, one per token",
    Kind.PER_RESPONSE_TOKEN: "rows, one per response token",
    Kind.POSITION_IDS: "positions, one per token",
    Kind.ROUTED_EXPERTS: "rows, one per token",
}
_NUM_DIMENSIONS = {
    Kind.TOKENS: (1, "[tokens]"),
    Kind.ROUTED_EXPERTS: (3, "[rows, layers, top_k]"),
}


def num_samples(batch: Mapping[str, Any]) -> int:
    """Number of samples of a batch, padding samples included: values of ``total_lengths``, else of
    the first field that is not None, else 0."""
    # Any field would do, but this one is there in every whole batch, and a list of its own.
    fields = ("total_lengths", *batch)
    name = next((name for name in fields if batch.get(name) is not None), None)
    if name is None:
        return 0
    count = count_of(batch[name])
    if count is None:
        raise SchemaError(name, expected="one value per sample", found=describe(batch[name]))
    return count


def require_one_per_sample(name: str, values: Any, num_samples: int) -> None:
    """Refuse a field that is None, or has not as many values as the batch has samples."""
    count = count_of(values)
    if count == num_samples:
        return
    found = describe(values) if count is None else f"{count} values"
    raise SchemaError(
        name,
        expected=f"{num_samples} values, one per sample",
        found="no such field" if values is None else found,
    )


def read_lengths(batch: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    """Total and response length of every sample, in tokens; refuses lengths that are no integers,
    or of a response longer than its sample."""
    totals, responses = (_lengths(name, batch) for name in ("total_lengths", "response_lengths"))
    require_one_per_sample("response_lengths", responses, len(totals))
    for index, (total, response) in enumerate(zip(totals, responses, strict=True)):
        if response > total:
            raise SchemaError(
                "response_lengths",
                sample_index=index,
                expected=f"at most its total length, {total}",
                found=str(response),
            )
    return totals, responses


def _lengths(name: str, batch: Mapping[str, Any]) -> list[int]:
    values: Any = batch.get(name)
    if count_of(values) is None:
        raise SchemaError(name, expected="a list of one length per sample", found=describe(values))
    if {*map(type, values)} == {int} and min(values) >= 0:  # one by one only to name one
        return list(values)
    lengths = []
    for index, value in enumerate(values):
        length = as_integer(value)
        if length is None or length < 0:
            raise SchemaError(
                name,
                sample_index=index,
                expected="an integer of 0 or more, in tokens",
                found=describe(value),
            )
        lengths.append(length)
    return lengths


def checked_values(
    field: Field, values: Any, total_lengths: Sequence[int], response_lengths: Sequence[int]
) -> list[Any]:
    """The values of a field, one per sample, each of its kind or a `SchemaError`: lists and arrays
    as tensors, ``is_padding`` as booleans, metadata and multimodal inputs as given."""
    require_one_per_sample(field.name, values, len(total_lengths))
    if field.kind in (Kind.METADATA, Kind.MULTIMODAL):
        found = list(values)
    elif field.name == "is_padding":
        return [is_tagged(field.name, index, tag) for index, tag in enumerate(values)]
    else:
        found = [_value(field, index, value) for index, value in enumerate(values)]
    # After all became tensors: from here on a value has a shape and a type, or none at all.
    for index, value in enumerate(found):
        expected = unmet(field, value, total_lengths[index], response_lengths[index])
        if expected is not None:
            raise SchemaError(
                field.name,
                sample_index=index,
                expected=expected,
                found=describe(value),
                declaration=field.declaration,
                advice="correct the values, or this declaration",
            )
    if field.kind is Kind.PER_SAMPLE:
        _require_one_shape(field.name, found, response_lengths)
    if field.name == "loss_masks" and field.kind is Kind.PER_RESPONSE_TOKEN:
        require_loss_masks(found)
    return found


def _value(field: Field, index: int, value: Any) -> Any:
    # A response of no tokens, say.
    if isinstance(value, list | tuple) and not value and field.kind is not Kind.PER_SAMPLE:
        # torch.as_tensor([]) is float32, which token ids must not be.
        return torch.zeros(0, dtype=field.default_type)
    return tensor_of(field.name, index, value)


def _require_one_shape(name: str, values: Any, response_lengths: Sequence[int]) -> None:
    """Refuse per-sample values of different shapes, and rewards that are per token."""
    shapes = [shape_of(value) for value in values]
    # They are stacked into one tensor per row, where a shape of its own has no place.
    odd = next((index for index, shape in enumerate(shapes) if shape != shapes[0]), None)
    expected = "one number, or tensors of one shape, in all samples"
    # Per-token rewards of responses that happen to share a length also have one shape. With one
    # token each the two readings are the same.
    as_responses = {(length,) for length in response_lengths} - {(1,)}
    if odd is None and name == "rewards" and shapes and set(shapes) == as_responses:
        odd, expected = 0, "one number per sample (give vectors another name)"
    if odd is not None:
        raise SchemaError(
            name,
            sample_index=odd,
            expected=expected,
            found=describe(values[odd]) + (f" beside {describe(values[0])}" if odd else ""),
            declaration=declaration_line(name, Kind.PER_RESPONSE_TOKEN),
            advice="if it has a value per response token, declare it so",
        )


def unmet(field: Field, value: Any, total_length: int, response_length: int) -> str | None:
    """The requirement on the field's values that this one does not meet; None if it does."""
    kind = field.kind
    if kind is Kind.METADATA:
        return None
    if isinstance(value, Tensor) and value.is_meta:  # it has a shape, but nothing to train on
        return "values, not a tensor on the meta device"
    if isinstance(value, Tensor) and value.is_complex():  # a loss would drop the imaginary part
        return "real numbers"
    if kind is Kind.MULTIMODAL:
        fits = value is None or isinstance(value, Mapping)
        return None if fits else "a dict of model inputs, or None"
    shape = shape_of(value)
    if kind is Kind.PER_SAMPLE:
        return None if shape is not None else "a number or a tensor"
    rows = field.num_rows(total_length, response_length)
    expected = f"{rows} {_ROWS_OF[kind]}"
    if not shape:
        return expected
    if field.name == "loss_masks" and len(shape) > 1:  # [R, 1] would broadcast with [R] to [R, R]
        return f"{expected}, one number in each"
    if kind is Kind.POSITION_IDS:
        if len(shape) > 2 or shape[-1] != rows:
            return f"{expected}, as [tokens] or [axes, tokens]"
    elif shape[0] != rows:
        return expected
    dimensions, axes = _NUM_DIMENSIONS.get(kind, (len(shape), ""))
    # What was an empty list has lost its trailing dimensions.
    if len(shape) != dimensions and shape != (0,):
        return f"{expected}, as {axes}"
    if kind in INTEGRAL and not is_integral(value):
        return f"{expected}, of an integer type"
    return None
