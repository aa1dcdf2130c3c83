"""Checks of single values that would otherwise be misread without an error."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mcore_batching.batch.errors import BatchError, OrderError, SchemaError
from mcore_batching.batch.fields.value_shapes import as_number, describe, is_array
from mcore_batching.planning.errors import named
from mcore_batching.planning.integers import as_integer, entries

_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
"""Become int64: torch has few operations for them, and Megatron's indexed datasets hold uint16."""


def tensor_of(name: str, index: int, value: Any) -> Any:
    """A sample's value; lists and arrays of numbers become a tensor, NumPy's scalars Python's.
    Refuses lists that hold no numbers, or nested lists of different lengths."""
    try:
        # A tensor without dimensions would be a value of another kind than a number.
        if is_array(value) and not len(value.shape):
            return value.item()
        if isinstance(value, list | tuple) or is_array(value):
            value = torch.as_tensor(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise SchemaError(
            name,
            sample_index=index,
            expected="numbers, in lists of one length",
            found=f"{describe(value)} ({error})",
        ) from None
    return value.long() if isinstance(value, Tensor) and value.dtype in _UNSIGNED else value


def require_loss_masks(masks: Sequence[Tensor]) -> None:
    """Refuse loss masks with an entry that is negative, infinite or NaN."""
    # NaN would make every loss of the step NaN, and a negative weight turn a gradient round.
    outlier = _first_outside([mask.flatten() for mask in masks], math.inf)
    if outlier is not None:
        index, _, value = outlier
        raise SchemaError(
            "loss_masks",
            sample_index=index,
            expected="finite weights of 0 or more",
            found=str(value),
        )


def require_vocabulary(
    name: str,
    values: Sequence[Tensor],
    vocabulary_size: int,
    weights: Sequence[Tensor] | None = None,
) -> None:
    """Refuse token ids that are outside the model's vocabulary (its embedding's entries, padding
    included), but for those of tokens whose loss weight is 0."""
    # Megatron would not notice: each tensor-parallel rank masks ids outside its part of the
    # embedding, and one outside all parts trains as a vector of zeros.
    ids = [value.long().flatten() for value in values]
    if weights is not None:  # a label that no loss looks at may be anything, such as -100
        ids = [
            each.masked_fill(weight.flatten().to(each.device) == 0, 0)
            for each, weight in zip(ids, weights, strict=True)
        ]
    outlier = _first_outside(ids, vocabulary_size)
    if outlier is not None:
        index, place, token = outlier
        needed = max(vocabulary_size, *ids[index].tolist()) + 1  # for this sample at least
        raise SchemaError(
            name,
            sample_index=index,
            expected=f"token ids of 0 to {vocabulary_size - 1} (use the model's tokenizer, or "
            f"build it with vocab_size={needed})",
            found=f"{token} at place {place}",
        )


def _first_outside(values: Sequence[Tensor], end: float) -> tuple[int, int, Any] | None:
    """Sample, place and value of the first entry that is not in ``[0, end)``."""

    def fits(tensor: Tensor) -> bool:
        # A comparison with NaN is False.
        return bool(((tensor >= 0) & (tensor < end)).all())

    # One question per device, not per sample: the host waits for each answer.
    devices = {each.device for each in values if each.numel()}  # empty ones need no answer
    if all(fits(torch.cat([each for each in values if each.device == on])) for on in devices):
        return None
    index = next(i for i, each in enumerate(values) if not fits(each))
    found = values[index].tolist()
    place = next(i for i, entry in enumerate(found) if not 0 <= entry < end)
    return index, place, found[place]


def is_tagged(name: str, index: int, tag: Any) -> bool:
    """A sample's tag, such as ``is_padding``: one boolean or number; None counts as False."""
    # Not bool(tag): the text "False" is true.
    number = 0.0 if tag is None else as_number(tag)
    if number is None or not math.isfinite(number):  # NaN is true, too
        raise SchemaError(name, sample_index=index, expected="True or False", found=describe(tag))
    return bool(number)


def read_indices(name: str, values: Any) -> list[int]:
    """The indices in the argument `name`, as Python ints; an `OrderError` if one is no integer."""
    read = []
    for value in entries(name, values, BatchError):
        number = as_integer(value)
        if number is None:
            raise OrderError(f"expected integer {name}, got {value!r:.60}; pass positions")
        read.append(number)
    return read


def require_token_id(name: str, value: Any) -> int:
    """The argument `name` as a token id; a `BatchError` if it is no integer that fits into
    int64."""
    number = as_integer(value)
    if number is None or not -(2**63) <= number < 2**63:
        raise BatchError(f"{named(name)} must be a token's id, got {value!r:.60}")
    return number
