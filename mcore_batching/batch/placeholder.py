"""One fabricated sample for a micro-batch that has no real one.

It has one token and an empty response, so that it contributes to no sum over response tokens, and
one value for every requested field, of the type, device and trailing shape that real values have;
without a real sample to copy from, of the kind's default type and shape.

    make_placeholder(schema, ["tokens", "loss_masks", "rewards"], batch)
    {"tokens": [tensor([0])], "loss_masks": [tensor([], dtype=torch.int32)], "rewards": [0.0]}

`check_filled` then finds a field without a value, or of a wrong length, here and not in some
`torch.cat` later. It runs in production.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mcore_batching.batch.errors import SchemaError
from mcore_batching.batch.field_checks import checked_values
from mcore_batching.batch.fields import Field, Fill, Kind, declaration_line
from mcore_batching.batch.value_checks import require_token_id, tensor_of

_TOTAL_LENGTH, _RESPONSE_LENGTH = 1, 0

# Numbers per sample that are not 0 in a sample of one token.
_LENGTHS = {"total_lengths": _TOTAL_LENGTH, "max_seq_lens": _TOTAL_LENGTH}


def make_placeholder(
    schema: Mapping[str, Field],
    batch_keys: Iterable[str],
    example_batch: Mapping[str, Any] | None,
    *,
    pad_token_id: int = 0,
) -> dict[str, list[Any]]:
    """A sample of one token and an empty response.

    Args:
        schema: the kind of every requested field.
        batch_keys: the fields to give a value.
        example_batch: field name to values of samples whose type, device and trailing shape are
            taken; a placeholder will do. Fields may be empty, None or absent, and so may the batch.
        pad_token_id: the one token.

    Returns:
        for each key a list of one value: ``[1]`` tokens; 1 row per token, 0 rows per response
        token, plus the field's offset, by its fill; 0 per sample; position 0 in the example's
        number of axes; ``{}`` for multimodal inputs; None for metadata.

    Raises:
        SchemaError: a requested field is not declared, or got no value of the right length.
        BatchError: ``pad_token_id`` is no integer.
    """
    keys = list(batch_keys)
    pad_token_id = require_token_id("pad_token_id", pad_token_id)
    filled: dict[str, list[Any]] = {}
    for key in keys:
        field = schema.get(key)
        if field is not None:
            filled[key] = [_filled(field, _example(field, example_batch), pad_token_id)]
    check_filled(
        filled,
        schema=schema,
        keys=keys,
        total_lengths=[_TOTAL_LENGTH],
        response_lengths=[_RESPONSE_LENGTH],
    )
    return filled


def check_filled(
    filled: Mapping[str, Any],
    *,
    schema: Mapping[str, Field],
    keys: Iterable[str],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
) -> None:
    """Check that fabricated samples have a value for every requested field, each a tensor.

    Args:
        filled: field name to one value per fabricated sample.
        schema: the kind of every requested field.
        keys: the fields that were requested.
        total_lengths: tokens of each fabricated sample.
        response_lengths: tokens of its response.

    Raises:
        SchemaError: a requested field is not declared or has not exactly one value per sample, a
            value has the wrong length.
    """
    for key in keys:
        if key not in schema:
            raise SchemaError(
                key,
                expected="a declared field, since fabricated samples need to know its kind",
                found="no declaration",
                declaration=declaration_line(key, Kind.PER_RESPONSE_TOKEN),
                advice="declare it with its Kind, for example",
            )
        checked_values(schema[key], filled.get(key), total_lengths, response_lengths)


def _example(field: Field, example_batch: Mapping[str, Any] | None) -> Any:
    """The first value of a field that is not None, lists and arrays as tensors."""
    values = (example_batch or {}).get(field.name)
    telling = (value for value in (() if values is None else values) if value is not None)
    example = next(telling, None)
    if field.kind in (Kind.MULTIMODAL, Kind.METADATA):
        return None
    if isinstance(example, list | tuple) and not example:
        return None
    return tensor_of(field.name, 0, example)


def _filled(field: Field, example: Any, pad_token_id: int) -> Any:
    """A placeholder's value of a field, given an example or None."""
    if field.kind is Kind.METADATA:
        return None
    if field.kind is Kind.MULTIMODAL:
        return {}
    if field.kind is Kind.PER_SAMPLE:
        zero = filled_with(0, 0 if example is None else example)
        return zero + _LENGTHS[field.name] if field.name in _LENGTHS else zero
    rows = field.num_rows(_TOTAL_LENGTH, _RESPONSE_LENGTH) or 0
    if field.kind is Kind.TOKENS or field.fill is Fill.TOKEN_IDS:
        return filled_with(pad_token_id, zero_rows(example, rows, torch.int64))
    if field.fill is Fill.ONES:
        return filled_with(1, zero_rows(example, rows, torch.int64))
    if field.kind is Kind.POSITION_IDS and example is not None and example.dim() > 1:
        return example.new_zeros((example.shape[0], 1))
    if field.kind is Kind.ROUTED_EXPERTS:
        return _distinct_experts(example, rows)
    return zero_rows(example, rows, field.default_type)


def _distinct_experts(example: Tensor | None, rows: int) -> Tensor:
    if example is None or example.dim() != 3:
        # A rank that has never seen a sample cannot know the number of layers.
        return torch.zeros((rows, 0, 0), dtype=torch.int64)
    # Zeros would send every slot of the token to expert 0.
    slots = torch.arange(example.shape[2], dtype=example.dtype, device=example.device)
    return slots.expand(rows, *example.shape[1:]).clone()


def filled_with(number: int, zeros: Any) -> Any:
    """The number wherever `zeros` has one, of its type and shape."""
    if isinstance(zeros, Tensor):
        return torch.full_like(zeros, number, requires_grad=False)
    return type(zeros)(number)


def zero_rows(example: Tensor | None, rows: int, default: torch.dtype) -> Tensor:
    """``rows`` rows of zeros of the example's type, device and trailing shape."""
    if example is None:
        return torch.zeros(rows, dtype=default)
    return example.new_zeros((rows, *example.shape[1:]))
