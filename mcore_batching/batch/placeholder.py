"""One fabricated sample for a micro-batch that has no real one.

    make_placeholder(schema, ["tokens", "loss_masks", "rewards"], batch)
    {"tokens": [tensor([0])], "loss_masks": [tensor([], dtype=torch.int32)], "rewards": [0.0]}

Its response is empty, so it adds nothing to a sum over response tokens. Each value is checked like
a real one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from mcore_batching.batch.fields import Field, Fill, Kind, checked_values, undeclared
from mcore_batching.batch.values import require_token_id, tensor_of


def make_placeholder(
    schema: Mapping[str, Field],
    batch_keys: Iterable[str],
    example_batch: Mapping[str, Any] | None,
    *,
    pad_token_id: int = 0,
) -> dict[str, list[Any]]:
    """A sample of one token and an empty response, with a list of one value for each key.

    Args:
        schema: the kind of every requested field.
        batch_keys: the fields to give a value: ``[1]`` for tokens; 1 row per token and 0 rows per
            response token, plus the field's offset; 0 per sample; position 0 on every axis; ``{}``
            for multimodal inputs; None for metadata.
        example_batch: field name to values that give type, device and trailing shape; fields
            may be empty, None or absent, and so may the batch.
        pad_token_id: the one token.

    Raises:
        SchemaError: a requested field is not declared, or got no value of the right length.
        BatchError: ``pad_token_id`` is no integer.
    """
    pad_token_id = require_token_id("pad_token_id", pad_token_id)
    filled: dict[str, list[Any]] = {}
    for key in batch_keys:
        if key not in schema:
            raise undeclared(key, "declare")
        values = (example_batch or {}).get(key)
        present = (value for value in (() if values is None else values) if value is not None)
        made = fabricated(schema[key], next(present, None), 1, 0, pad_token_id)
        filled[key] = checked_values(schema[key], [made], [1], [0])
    return filled


def fabricated(
    field: Field, example: Any, total_length: int, response_length: int, pad_token_id: int
) -> Any:
    """A field's value in a sample of these lengths; `example` is a real value, or None."""
    if field.kind is Kind.METADATA:
        return None
    if field.kind is Kind.MULTIMODAL:
        return {}
    if isinstance(example, list | tuple) and not example:
        example = None  # an empty list shows neither type nor trailing shape
    example = tensor_of(field.name, 0, example)
    if field.kind is Kind.PER_SAMPLE:
        lengths = {"response_lengths": response_length, "total_lengths": total_length}
        number = (lengths | {"max_seq_lens": total_length}).get(field.name, 0)
        return filled_with(number, 0 if example is None else example)
    rows = field.num_rows(total_length, response_length)
    is_routed = field.kind is Kind.ROUTED_EXPERTS
    has_ids = field.kind is Kind.TOKENS or field.fill is Fill.TOKEN_IDS
    if example is None or (is_routed and example.dim() != 3):
        # A rank without any sample so far lacks the number of layers.
        is_integral = has_ids or field.fill is Fill.ONES
        dtype = torch.int64 if is_integral else field.default_type
        example = torch.zeros((0, 0, 0) if is_routed else (0,), dtype=dtype)
    if field.kind is Kind.POSITION_IDS:
        positions = torch.arange(rows, dtype=example.dtype, device=example.device)
        return positions.expand(*example.shape[:-1], rows).clone()
    if is_routed:
        # Zeros would send every slot of the token to expert 0.
        slots = torch.arange(example.shape[2], dtype=example.dtype, device=example.device)
        return slots.expand(rows, *example.shape[1:]).clone()
    number = pad_token_id if has_ids else int(field.fill is Fill.ONES)
    return example.new_full((rows, *example.shape[1:]), number)


def filled_with(number: int, like: Any) -> Any:
    """The number, of the type and shape of a value per sample."""
    if isinstance(like, Tensor):
        return torch.full_like(like, number)
    return type(like)(number)
