"""Per-sample lists and packed rows into left-padded blocks, and back.

    per-sample lists    left_pad          →   LeftPadded   →   unpad               per-sample lists
    packed row          left_pad_packed   →   LeftPadded   →   pack_left_padded    packed row

Guarantees
- Each is the inverse of the other: nothing is cut off, whatever the lengths. Past ``max_seq_len``
  there is a warning.
- Padding of routed experts names a different expert in every slot; tokens are padded with
  ``pad_token_id``, all else with 0.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mcore_batching.batch.default_schema import DEFAULT_SCHEMA
from mcore_batching.batch.fields import Field, Kind
from mcore_batching.batch.packed import PackedMicroBatch
from mcore_batching.batch.packing import pack
from mcore_batching.batch.schema import Schema
from mcore_batching.rl.left_padded import LeftPadded, row_dimension
from mcore_batching.rl.right_aligned import column_mask, right_align, right_aligned_rows

_WITHOUT_ROWS = (Kind.PER_SAMPLE, Kind.MULTIMODAL, Kind.METADATA)
_INTEGRAL = (Kind.TOKENS, Kind.POSITION_IDS, Kind.ROUTED_EXPERTS)


def left_pad(
    samples: Mapping[str, Any],
    schema: Schema = DEFAULT_SCHEMA,
    *,
    pad_token_id: int,
    max_seq_len: int | None = None,
) -> LeftPadded:
    """Blocks of per-sample values.

    Args:
        samples: field name to one value a sample, as for `pack`; may be of no samples.
        schema: the kind of every field, where the data does not leave exactly one.
        pad_token_id: fills the tokens.
        max_seq_len: tokens that a sample should not exceed; longer ones are warned of and kept.

    Returns:
        the blocks, each on the device and of the type of the field's values.

    Raises:
        SchemaError: a value is not what its kind says, or a field's values differ in type or in
            trailing shape.
    """
    schema = schema.resolve(samples)
    schema.validate(samples)
    given = {key: list(values) for key, values in samples.items() if values is not None}
    totals = tuple(int(length) for length in given["total_lengths"])
    _warn_of_long_samples(totals, max_seq_len)
    blocks = {
        key: _block(schema[key], values, pad_token_id if key == "tokens" else 0)
        for key, values in given.items()
        if schema[key].kind not in _WITHOUT_ROWS
    }
    return LeftPadded(
        blocks=blocks,
        others={key: values for key, values in given.items() if key not in blocks},
        total_lengths=totals,
        response_lengths=tuple(int(length) for length in given["response_lengths"]),
        schema=schema,
    )


def unpad(left_padded: LeftPadded) -> dict[str, list[Any]]:
    """Per-sample values of blocks: what `left_pad` was given, with its lists as tensors.

    Returns:
        field name to one value a sample; those of blocks are views.
    """
    values = {
        name: _rows_of(left_padded, name, block) for name, block in left_padded.blocks.items()
    }
    return {**values, **{name: list(others) for name, others in left_padded.others.items()}}


def left_pad_packed(
    row: PackedMicroBatch, *, pad_token_id: int, max_seq_len: int | None = None
) -> LeftPadded:
    """Blocks of the samples of a packed row, in its order, whole ones under context parallelism.

    Args:
        row: the micro-batch.
        pad_token_id: as for `left_pad`.
        max_seq_len: as for `left_pad`.

    Raises:
        SchemaError: as `left_pad`.
    """
    return left_pad(row.fields, row.schema, pad_token_id=pad_token_id, max_seq_len=max_seq_len)


def pack_left_padded(
    left_padded: LeftPadded, *, sample_indices: Sequence[int], **options: Any
) -> PackedMicroBatch:
    """A packed row of the samples of blocks, in their order.

    Args:
        left_padded: the blocks.
        sample_indices: as for `pack`.
        **options: as for `pack`.

    Raises:
        SchemaError, ValueError: as `pack`.
    """
    return pack(
        unpad(left_padded), schema=left_padded.schema, sample_indices=sample_indices, **options
    )


def _block(field: Field, values: Sequence[Any], fill: int) -> Tensor:
    default = torch.int64 if field.kind in _INTEGRAL else torch.float32
    # Position ids of several axes have their tokens last; rows come first while aligning.
    tokens_last = field.kind is Kind.POSITION_IDS
    tensors = [
        torch.zeros(0, dtype=default)
        if isinstance(value, list | tuple) and not value
        else torch.as_tensor(value)
        for value in values
    ]
    block = right_align(
        [value.movedim(-1, 0) if tokens_last else value for value in tensors],
        fill=fill,
        name=field.name,
        default=default,
    )
    if field.kind is Kind.ROUTED_EXPERTS and block.numel():
        padding = ~column_mask([len(value) for value in values], device=block.device)
        experts = torch.arange(block.shape[-1], dtype=block.dtype, device=block.device)
        block[padding] = experts
    return block.movedim(1, -1) if tokens_last else block


def _rows_of(left_padded: LeftPadded, name: str, block: Tensor) -> list[Tensor]:
    dimension = row_dimension(left_padded.schema[name], block)
    rows = right_aligned_rows(block.movedim(dimension, 1), left_padded.num_rows(name))
    return [row.movedim(0, -1) for row in rows] if dimension != 1 else rows


def _warn_of_long_samples(total_lengths: Sequence[int], max_seq_len: int | None) -> None:
    if max_seq_len is None:
        return
    long = [index for index, length in enumerate(total_lengths) if length > max_seq_len]
    if long:
        warnings.warn(
            f"{len(long)} samples are longer than max_seq_len={max_seq_len}, sample {long[0]} "
            f"first, up to {max(total_lengths)} tokens; none is cut off: increase max_seq_len, or "
            "shorten prompts and responses before the batch is made",
            stacklevel=3,
        )
