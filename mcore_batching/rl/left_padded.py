"""Samples as left-padded blocks, `[PAD … PROMPT RESPONSE]`.

    tokens      [[0, 0, 0, 4, 5], [6, 7, 8, 9, 1]]    total_lengths [2, 5]
    log_probs   [[0.0, -0.3], [-0.1, -0.2]]           response_lengths [1, 2]

Every sample ends in the last column, prompt and response in one segment. The width is that of the
longest sample, max(prompt_i + response_i), not max(prompt) + max(response): where long prompts have
short answers and the other way round, that is nearly half. Against packed rows it still is padding:
it costs ``num_samples * width`` tokens, whatever the lengths.

Guarantees
- Blocks that are not aligned to the lengths are refused.
- `response_values` reads what belongs to response tokens, so that nobody slices ``[:n]`` and gets
  padding, or ``[-0:]`` and gets everything.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, overload

from torch import Tensor

from mcore_batching.batch.errors import BatchError, SchemaError
from mcore_batching.batch.fields import Field, Kind
from mcore_batching.batch.schema import Schema
from mcore_batching.rl.right_aligned import column_mask, right_aligned_rows


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LeftPadded:
    """Samples whose rows end in the last column.

    Attributes:
        blocks: ``[samples, rows, ...]`` for each field with rows: ``width`` rows a token,
            ``max(response_lengths)`` a response token, plus the field's offset;
            ``[samples, axes, width]`` for position ids of several axes.
        others: one value a sample for each other field, lengths included.
        total_lengths: tokens of each sample.
        response_lengths: tokens of its response.
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
        """Refuse blocks that are not aligned to these lengths."""
        for name, block in self.blocks.items():
            dimension = row_dimension(self.schema[name], block)
            expected = (self.num_samples, max(self.num_rows(name), default=0))
            if block.dim() < 2 or (block.shape[0], block.shape[dimension]) != expected:
                raise SchemaError(
                    name,
                    expected=f"a block of {expected[0]} samples, {expected[1]} rows each",
                    found=f"shape {list(block.shape)}",
                )

    @property
    def num_samples(self) -> int:
        """Samples, each a line of every block."""
        return len(self.total_lengths)

    @property
    def width(self) -> int:
        """Columns of the tokens: those of the longest sample."""
        return max(self.total_lengths, default=0)

    @property
    def tokens(self) -> Tensor:
        """int64 ``[samples, width]``."""
        return self.blocks["tokens"]

    @property
    def attention_mask(self) -> Tensor:
        """bool ``[samples, width]``, True where there is a token."""
        return column_mask(self.total_lengths, device=self.tokens.device)

    @property
    def response_mask(self) -> Tensor:
        """bool ``[samples, max response]``, True where there is a response token."""
        return column_mask(self.response_lengths, device=self.tokens.device)

    @property
    def position_ids(self) -> Tensor:
        """The batch's own, or ``[samples, width]`` counted from each sample's first token."""
        for name, block in self.blocks.items():
            if self.schema[name].kind is Kind.POSITION_IDS:
                return block
        return (self.attention_mask.long().cumsum(1) - 1).clamp(min=0)

    @property
    def num_bytes(self) -> int:
        """Memory of the blocks."""
        return sum(block.numel() * block.element_size() for block in self.blocks.values())

    def num_rows(self, name: str) -> list[int]:
        """Rows of each sample's own value of a field, without padding."""
        lengths = zip(self.total_lengths, self.response_lengths, strict=True)
        return [self.schema[name].num_rows(*each) or 0 for each in lengths]


@overload
def response_values(left_padded: LeftPadded, values: str | Tensor, index: int) -> Tensor: ...


@overload
def response_values(
    left_padded: LeftPadded, values: str | Tensor, index: None = None
) -> list[Tensor]: ...


def response_values(
    left_padded: LeftPadded, values: str | Tensor, index: int | None = None
) -> Tensor | list[Tensor]:
    """The values of the response tokens, without padding.

    Args:
        left_padded: the blocks.
        values: a field per response token, or a right-aligned ``[samples, max response, ...]``
            tensor that was computed from them.
        index: of one sample, None for all.

    Returns:
        ``[response_length, ...]`` (plus the field's offset), a view: of the sample, or a list.

    Raises:
        BatchError: no such field, no such sample, or a tensor of another shape.
    """
    lengths: Sequence[int] = left_padded.response_lengths
    if isinstance(values, str):
        if values not in left_padded.blocks or (
            left_padded.schema[values].kind is not Kind.PER_RESPONSE_TOKEN
        ):
            raise BatchError(
                f"expected a field per response token, got {values!r}; name one of "
                f"{', '.join(_response_fields(left_padded)) or 'none'}"
            )
        lengths = left_padded.num_rows(values)
        values = left_padded.blocks[values]
    expected = [left_padded.num_samples, max(lengths, default=0)]
    if list(values.shape[:2]) != expected:
        raise BatchError(
            f"expected values of shape {expected} and any further dimensions, right-aligned to the "
            f"longest response, got {list(values.shape)}"
        )
    if index is None:
        return right_aligned_rows(values, lengths)
    if not 0 <= index < left_padded.num_samples:
        raise BatchError(
            f"expected a sample from 0 to {left_padded.num_samples - 1}, got index={index}"
        )
    return values[index, values.shape[1] - lengths[index] :]


def _response_fields(left_padded: LeftPadded) -> list[str]:
    kinds = {name: left_padded.schema[name].kind for name in left_padded.blocks}
    return [name for name, kind in kinds.items() if kind is Kind.PER_RESPONSE_TOKEN]


def row_dimension(field: Field, block: Tensor) -> int:
    """Along which dimension of a field's block its rows are."""
    return block.dim() - 1 if field.kind is Kind.POSITION_IDS else 1
