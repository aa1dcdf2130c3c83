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

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mcore_batching.batch.errors import SchemaError
from mcore_batching.batch.field_checks import check_values
from mcore_batching.batch.fields import Field, Fill, Kind, declaration_line
from mcore_batching.batch.value_checks import require_token_id
from mcore_batching.batch.value_shapes import is_array, shape_of

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
        fill = _FILL.get(field.kind) if field is not None else None
        if field is not None and fill is not None:
            filled[key] = [fill(field, _example(key, example_batch), pad_token_id)]
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
    """Check that fabricated samples have a value for every requested field.

    Args:
        filled: field name to one value per fabricated sample.
        schema: the kind of every requested field.
        keys: the fields that were requested.
        total_lengths: tokens of each fabricated sample.
        response_lengths: tokens of its response.

    Raises:
        SchemaError: a requested field is not declared or has not exactly one value per sample, a
            value has the wrong length, or a token is routed to one expert twice.
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
        field = schema[key]
        if filled.get(key) is None:
            raise SchemaError(
                key,
                expected=f"{len(total_lengths)} values, one per fabricated sample",
                found=f"none: Kind.{field.kind.name} has no rule for fabricated samples",
                declaration=field.declaration,
                advice="declare the field with a Kind that has one, otherwise than by",
            )
        check_values(field, filled[key], total_lengths, response_lengths)
        if field.kind is Kind.ROUTED_EXPERTS:
            for index, value in enumerate(filled[key]):
                _require_distinct_experts(field, index, value)


def _require_distinct_experts(field: Field, index: int, value: Any) -> None:
    ordered = torch.as_tensor(value).sort(dim=-1).values
    if ordered.dim() == 3 and bool((ordered[..., 1:] == ordered[..., :-1]).any()):
        raise SchemaError(
            field.name,
            sample_index=index,
            expected="a different expert in every slot of a fabricated token",
            found=f"experts {torch.as_tensor(value)[0, 0].tolist()}",
        )


def _example(key: str, example_batch: Mapping[str, Any] | None) -> Any:
    """The first value of the field that is not None, None if there is none."""
    values = (example_batch or {}).get(key)
    if values is None:
        return None
    return next((value for value in values if value is not None), None)


def _fill_tokens(field: Field, example: Any, pad_token_id: int) -> Any:
    del field
    if example is None:
        return torch.tensor([pad_token_id], dtype=torch.int64)
    token = zero_rows(example, 1, torch.int64)
    token[0] = pad_token_id
    return token


def _fill_per_token(field: Field, example: Any, pad_token_id: int) -> Any:
    rows = field.num_rows(_TOTAL_LENGTH, _RESPONSE_LENGTH) or 0
    number = {Fill.ONES: 1, Fill.TOKEN_IDS: pad_token_id}.get(field.fill)
    if number is None:
        return zero_rows(example, rows, torch.float32)
    return filled_with(number, zero_rows(example, rows, torch.int64))


def _fill_per_sample(field: Field, example: Any, pad_token_id: int) -> Any:
    del pad_token_id
    zero = 0 if example is None else _zero(example)
    return zero + _LENGTHS[field.name] if field.name in _LENGTHS else zero


def _fill_position_ids(field: Field, example: Any, pad_token_id: int) -> Any:
    del field, pad_token_id
    shape = shape_of(example)
    if shape is None or len(shape) < 2:
        return zero_rows(example, 1, torch.int64)
    if isinstance(example, Tensor):
        return example.new_zeros((shape[0], 1))
    if is_array(example):
        return example[:, :0].sum(axis=1, dtype=example.dtype, keepdims=True)
    return [[0] for _ in example]


def _fill_routed_experts(field: Field, example: Any, pad_token_id: int) -> Any:
    del pad_token_id
    rows = field.num_rows(_TOTAL_LENGTH, _RESPONSE_LENGTH) or 0
    # A rank that has never seen a sample cannot know the number of layers.
    layers, top_k = (shape_of(example) or ())[1:] or (0, 0)
    if isinstance(example, list | tuple):
        return [[list(range(top_k)) for _ in range(layers)] for _ in range(rows)]
    if example is None:
        return torch.zeros((rows, layers, top_k), dtype=torch.int64)
    experts = zero_rows(example, rows, torch.int64)
    # Zeros would send every slot of the token to expert 0.
    for slot in range(top_k):
        experts[..., slot] = slot
    return experts


def _fill_multimodal(field: Field, example: Any, pad_token_id: int) -> Any:
    del field, example, pad_token_id
    return {}


def _fill_metadata(field: Field, example: Any, pad_token_id: int) -> Any:
    del field, example, pad_token_id


# To fill a value of each kind, given the field, an example value or None, and the pad token.
_FILL: dict[Kind, Callable[[Field, Any, int], Any]] = {
    Kind.TOKENS: _fill_tokens,
    Kind.PER_TOKEN: _fill_per_token,
    Kind.PER_RESPONSE_TOKEN: _fill_per_token,
    Kind.PER_SAMPLE: _fill_per_sample,
    Kind.POSITION_IDS: _fill_position_ids,
    Kind.ROUTED_EXPERTS: _fill_routed_experts,
    Kind.MULTIMODAL: _fill_multimodal,
    Kind.METADATA: _fill_metadata,
}


def filled_with(number: int, zeros: Any) -> Any:
    """The number wherever `zeros` has one, of its type and shape."""
    if isinstance(zeros, Tensor):
        return torch.full_like(zeros, number)
    if is_array(zeros):
        return (zeros + number).astype(zeros.dtype)
    if isinstance(zeros, list | tuple):
        return [filled_with(number, value) for value in zeros]
    return type(zeros)(number)


def zero_rows(example: Any, rows: int, default: torch.dtype) -> Any:
    """``rows`` rows of zeros of the example's type, device and trailing shape."""
    if isinstance(example, Tensor):
        return example.new_zeros((rows, *example.shape[1:]))
    if is_array(example):
        return _zero_row(example).repeat(rows, axis=0)
    if isinstance(example, list | tuple):
        return [_zero(example[0]) if example else 0 for _ in range(rows)]
    return torch.zeros(rows, dtype=default)


def _zero_row(example: Any) -> Any:
    # The sum of no rows: zeros of the right type, even where the example holds NaN.
    return example[:0].sum(axis=0, dtype=example.dtype, keepdims=True)


def _zero(example: Any) -> Any:
    """Zero of the example's type and shape."""
    if isinstance(example, Tensor):
        return torch.zeros_like(example)
    if is_array(example):
        return _zero_row(example[None])[0]
    if isinstance(example, list | tuple):
        return [_zero(value) for value in example]
    return type(example)(0)
