"""Right alignment of tensors of different lengths in one block, and its inverse.

    right_align([tensor([1, 2, 3]), tensor([4])])                  [[1, 2, 3], [0, 0, 4]]
    right_aligned_rows([[1, 2, 3], [0, 0, 4]], lengths=[3, 1])     [tensor([1, 2, 3]), tensor([4])]

Both are differentiable. Values of different types or trailing shapes are refused, not converted.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mcore_batching.batch.errors import SchemaError


def right_align(
    values: Sequence[Tensor],
    *,
    fill: float = 0,
    name: str = "values",
    default: torch.dtype = torch.float32,
) -> Tensor:
    """One block of tensors of different lengths.

    Args:
        values: ``[length, ...]`` each, alike in type, device and trailing shape; those of length 0
            may differ.
        fill: stands before the shorter ones.
        name: of the values, for errors.
        default: type of a block of no values at all.

    Returns:
        ``[number of values, greatest length, ...]``.

    Raises:
        SchemaError: the values differ in type or trailing shape.
    """
    # A value without rows may have lost its trailing shape, being made of an empty list.
    filled = [value for value in values if len(value)]
    telling = next(iter([*filled, *values]), torch.zeros(0, dtype=default))
    lengths = [len(value) for value in values]
    block = telling.new_full((len(lengths), max(lengths, default=0), *telling.shape[1:]), fill)
    for index, value in enumerate(values):
        alike = (value.dtype, value.shape[1:]) == (telling.dtype, telling.shape[1:])
        if len(value) and not alike:
            raise SchemaError(
                name,
                sample_index=index,
                expected=f"type {telling.dtype} and rows of shape {list(telling.shape[1:])}, like "
                "the other samples",
                found=f"type {value.dtype} and rows of shape {list(value.shape[1:])}",
            )
    if filled:
        block[column_mask(lengths, device=block.device)] = torch.cat(filled)
    return block


def right_aligned_rows(block: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    """The last ``lengths[i]`` rows of line i, as views. Inverse of `right_align`.

    Args:
        block: ``[number of values, greatest length, ...]``.
        lengths: one per line.
    """
    width = block.shape[1]
    # Not [-length:], which is everything for a length of 0.
    return [line[width - length :] for line, length in zip(block, lengths, strict=True)]


def column_mask(lengths: Sequence[int], *, device: torch.device) -> Tensor:
    """bool ``[number of lengths, greatest length]``, True in the last ``lengths[i]`` columns."""
    width = max(lengths, default=0)
    first = width - torch.tensor(lengths, dtype=torch.int64, device=device)
    return torch.arange(width, device=device) >= first[:, None]
