"""Left-padded blocks `[PAD … PROMPT RESPONSE]` of samples, and per-sample values back from them.

    tokens [[4, 5], [6, 7, 8, 9, 1]]    response_lengths [1, 2]    log_probs [[-0.3], [-0.1, -0.2]]

    blocks = left_pad(samples, pad_token_id=0)
    blocks.tokens                            [[0, 0, 0, 4, 5], [6, 7, 8, 9, 1]]
    blocks.blocks["log_probs"]               [[0.0, -0.3], [-0.1, -0.2]]
    response_values(blocks, outputs)         one tensor a sample, of a model's [2, 2, ...]
    unpad(blocks)                            the samples again, their lists as tensors

The width is that of the longest sample: with max(prompt) + max(response) blocks are up to twice as
wide. Packed rows are cheaper still.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mcore_batching.batch.errors import BatchError, SchemaError
from mcore_batching.batch.fields import TRAITS, Field, Kind
from mcore_batching.batch.schema import DEFAULT_SCHEMA, Schema
from mcore_batching.batch.values import require_token_id
from mcore_batching.planning.errors import shortened
from mcore_batching.planning.integers import at_least


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LeftPadded:
    """Samples in blocks, each ending in the last column.

    Attributes:
        blocks: ``[samples, rows, ...]`` for each field with rows: ``max(total_lengths)`` per token,
            ``max(response_lengths)`` per response token, plus the field's offset;
            ``[samples, axes, width]`` for position ids of several axes.
        others: one value per sample for each other field, lengths included.
        total_lengths, response_lengths: tokens of each sample and of its response.
        schema: the kind of every field.

    Raises:
        SchemaError: a block has another number of samples or rows.
    """

    blocks: Mapping[str, Tensor]
    others: Mapping[str, list[Any]]
    total_lengths: tuple[int, ...]
    response_lengths: tuple[int, ...]
    schema: Schema

    def __post_init__(self) -> None:
        for name, block in self.blocks.items():
            dimension = _row_dimension(self.schema[name], block)
            expected = (len(self.total_lengths), max(self.num_rows(name), default=0))
            if block.dim() < 2 or (block.shape[0], block.shape[dimension]) != expected:
                raise SchemaError(
                    name,
                    expected=f"a block of {expected[0]} samples, {expected[1]} rows each",
                    found=f"shape {list(block.shape)}",
                )

    @property
    def tokens(self) -> Tensor:
        """int64 ``[samples, width]``."""
        return self.blocks["tokens"]

    @property
    def attention_mask(self) -> Tensor:
        """bool ``[samples, width]``, True where there is a token."""
        return _column_mask(self.total_lengths, self.tokens.device)

    @property
    def response_mask(self) -> Tensor:
        """bool ``[samples, max response]``, True where there is a response token."""
        return _column_mask(self.response_lengths, self.tokens.device)

    @property
    def position_ids(self) -> Tensor:
        """The batch's own, or int64 ``[samples, width]``, 0 at each sample's first token."""
        for name, block in self.blocks.items():
            if self.schema[name].kind is Kind.POSITION_IDS:
                return block
        # Padding counts nothing, so the first token is at 0 on every line.
        return (self.attention_mask.long().cumsum(1) - 1).clamp(min=0)

    def num_rows(self, name: str) -> list[int]:
        """Rows of each sample's own value of a field, without padding."""
        lengths = zip(self.total_lengths, self.response_lengths, strict=True)
        return [self.schema[name].num_rows(*each) for each in lengths]


def left_pad(
    samples: Mapping[str, Any],
    schema: Schema = DEFAULT_SCHEMA,
    *,
    pad_token_id: int,
    max_seq_len: int | None = None,
) -> LeftPadded:
    """Left-padded blocks of a batch, on the device and of the type of each field's values.

    Args:
        samples: field name to one value per sample, as for `get_data_iterator`; may be of no
            samples.
        schema: the kind of every field; undeclared ones are inferred.
        pad_token_id: fills the tokens; all else is filled with 0.
        max_seq_len: tokens that no sample should exceed; a `UserWarning` names those that do, and
            none is cut off. None: any length.

    Raises:
        SchemaError: a value does not match its kind, or values of a field differ in type or shape.
        BatchError: ``pad_token_id`` is no integer, or ``max_seq_len`` no integer of 1 or more.
    """
    pad_token_id = require_token_id("pad_token_id", pad_token_id)
    if max_seq_len is not None:
        max_seq_len = at_least("max_seq_len", max_seq_len, 1, BatchError)
    # Once, here: behind it all values are tensors of declared kinds.
    schema = schema.resolve(samples)
    given = schema.validate(samples)
    lengths = given["total_lengths"]
    long = [i for i, length in enumerate(lengths) if max_seq_len and length > max_seq_len]
    if long:
        warnings.warn(
            f"{len(long)} samples are longer than max_seq_len={max_seq_len} (sample "
            f"{shortened(long)}), up to {max(lengths)} tokens; none is cut off: increase "
            "max_seq_len, or shorten prompts and responses before the batch is made",
            stacklevel=2,
        )
    blocks = {
        key: _block(schema[key], values, pad_token_id if key == "tokens" else 0)
        for key, values in given.items()
        if TRAITS[schema[key].kind].rows
    }
    return LeftPadded(
        blocks=blocks,
        others={key: values for key, values in given.items() if key not in blocks},
        total_lengths=tuple(given["total_lengths"]),
        response_lengths=tuple(given["response_lengths"]),
        schema=schema,
    )


def unpad(left_padded: LeftPadded) -> dict[str, list[Any]]:
    """Per-sample values of blocks by field, lists as tensors; views. Inverse of `left_pad`."""
    values = {}
    for name, block in left_padded.blocks.items():
        # Rows to the front for the cut, and back where the field has them.
        rows_last = _row_dimension(left_padded.schema[name], block)
        rows = _rows_of(block.movedim(rows_last, 1), left_padded.num_rows(name))
        values[name] = [row.movedim(0, rows_last - 1) for row in rows]
    return {**values, **{name: list(others) for name, others in left_padded.others.items()}}


def response_values(left_padded: LeftPadded, values: Tensor) -> list[Tensor]:
    """Per-sample values ``[response_length, ...]`` of response tokens, as views of a right-aligned
    block ``[samples, max response, ...]`` that a model computed; a `BatchError` if it has another
    shape."""
    lengths = left_padded.response_lengths
    expected = [len(lengths), max(lengths, default=0)]
    if list(values.shape[:2]) != expected:
        raise BatchError(
            f"expected values of shape {expected}, right-aligned, got {list(values.shape)}"
        )
    return _rows_of(values, lengths)


def _block(field: Field, values: Sequence[Tensor], fill: int) -> Tensor:
    """A field's block: ``[samples, greatest length, ...]``, values right-aligned."""
    # Position ids are [axes, tokens]: alignment wants the tokens first.
    if field.kind is Kind.POSITION_IDS:
        values = [value.movedim(-1, 0) for value in values]
    # A value without rows may have lost its trailing shape, being made of an empty list.
    filled = [value for value in values if len(value)]
    # The value by which the others are compared, and which shows the type of an empty block.
    telling = next(iter([*filled, *values]), torch.zeros(0, dtype=field.default_type))
    for index, value in enumerate(values):
        alike = (value.dtype, value.shape[1:]) == (telling.dtype, telling.shape[1:])
        if len(value) and not alike:
            raise SchemaError(
                field.name,
                sample_index=index,
                expected=f"type {telling.dtype} and rows of shape {list(telling.shape[1:])}, like "
                "the other samples",
                found=f"type {value.dtype} and rows of shape {list(value.shape[1:])}",
            )
    lengths = [len(value) for value in values]
    block = telling.new_full((len(lengths), max(lengths, default=0), *telling.shape[1:]), fill)
    columns = _column_mask(lengths, block.device)
    if filled:
        block[columns] = torch.cat(filled)
    if field.kind is Kind.ROUTED_EXPERTS and block.numel():
        # The experts 0, 1, … top_k - 1: a router that replays routes wants distinct ones.
        block[~columns] = torch.arange(block.shape[-1], dtype=block.dtype, device=block.device)
    return block.movedim(1, _row_dimension(field, block))


def _row_dimension(field: Field, block: Tensor) -> int:
    """The dimension of rows of a field's block."""
    return block.dim() - 1 if field.kind is Kind.POSITION_IDS else 1


def _rows_of(block: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    """The last ``lengths[i]`` rows of line i, as views."""
    width = block.shape[1]
    # Not [-length:], which is everything for a length of 0.
    return [line[width - length :] for line, length in zip(block, lengths, strict=True)]


def _column_mask(lengths: Sequence[int], device: torch.device) -> Tensor:
    """bool ``[number of lengths, greatest length]``, True in the last ``lengths[i]`` columns."""
    first = max(lengths, default=0) - torch.tensor(lengths, dtype=torch.int64, device=device)
    return torch.arange(max(lengths, default=0), device=device) >= first[:, None]
