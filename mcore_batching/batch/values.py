"""Single values: shape, type and number, and checks of what would be misread without an error.

shape_of(torch.zeros(2, 3))               (2, 3)
describe(torch.zeros(2, 3))               "a Tensor of shape [2, 3] and type torch.float32"
count_of({"for": "the whole batch"})      None

NumPy is never imported, so it need not be installed.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mcore_batching.batch.errors import BatchError, OrderError, SchemaError
from mcore_batching.planning.errors import named
from mcore_batching.planning.integers import as_integer, entries

UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
"""Become int64: torch has few operations for them, and Megatron's indexed datasets hold uint16."""


def tensor_of(name: str, index: int, value: Any) -> Any:
    """A sample's value; lists and arrays of numbers become a tensor, NumPy's scalars Python's.
    Refuses lists that hold no numbers, or nested lists of different lengths."""
    if type(value) is Tensor and value.dtype not in UNSIGNED:
        return value
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
    return value.long() if isinstance(value, Tensor) and value.dtype in UNSIGNED else value


def require_loss_masks(masks: Sequence[Tensor]) -> None:
    """Refuse loss masks with an entry that is negative, infinite or NaN."""
    # NaN would make every loss of the step NaN, and a negative weight turn a gradient round.
    outlier = _first_outside(masks, math.inf)
    if outlier is not None:
        raise SchemaError(
            "loss_masks",
            sample_index=outlier[0],
            expected="finite weights of 0 or more",
            found=str(outlier[2]),
        )


def require_vocabulary(
    name: str,
    values: Sequence[Tensor],
    vocabulary_size: int,
    weights: Sequence[Tensor] | None = None,
) -> None:
    """Refuse token ids that are outside the model's vocabulary (its embedding's entries, padding
    included), but for those of tokens with a loss weight of 0."""
    # Megatron would not notice: each tensor-parallel rank masks ids outside its part of the
    # embedding, and one outside all parts trains as a vector of zeros.
    flat = [value.flatten() for value in values]
    of_tokens = None if weights is None else [weight.flatten() for weight in weights]
    outlier = _first_outside(flat, vocabulary_size, of_tokens)
    if outlier is not None:
        index, place, token = outlier
        needed = max(vocabulary_size, *flat[index].tolist()) + 1
        raise SchemaError(
            name,
            sample_index=index,
            expected=f"token ids of 0 to {vocabulary_size - 1} (use the model's tokenizer, or "
            f"build it with vocab_size={needed})",
            found=f"{token} at place {place}",
        )


def _first_outside(
    values: Sequence[Tensor], end: float, weights: Sequence[Tensor] | None = None
) -> tuple[int, int, Any] | None:
    """Sample, place and value of the first of ``[values]`` that is not in ``[0, end)``; one of
    weight 0 may be anything, such as -100."""
    if not values:
        return None
    flat = joined(values)
    if weights is None and all_within(flat, end):
        return None
    outside = ~((flat >= 0) & (flat < end))
    if weights is not None:
        outside &= joined(weights) != 0
    if not outside.any():
        return None
    # One by one only to name one.
    for index, part in enumerate(outside.split_with_sizes([len(value) for value in values])):
        if part.any():
            place = int(part.nonzero()[0])
            return index, place, values[index][place].item()
    return None


def all_within(values: Tensor, end: float) -> bool:
    """True if all values are in ``[0, end)``, of which NaN is not."""
    if not values.numel():
        return True
    least, most = values.aminmax()
    return bool(least >= 0 and most < end)


def joined(values: Sequence[Tensor]) -> Tensor:
    """Tensors one behind the other, on the host, of the type that torch promotes theirs to."""
    with torch.no_grad():
        try:  # one copy from a device, since the host waits for each
            return torch.cat([*values]).cpu()
        except RuntimeError:  # of several devices, if it is not another fault
            return torch.cat([value.cpu() for value in values])


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


def shape_of(value: Any) -> tuple[int, ...] | None:
    """Shape of a tensor, ``()`` for a number, None for anything else."""
    if isinstance(value, Tensor):
        return tuple(value.shape)
    # By type first: whether a class is registered as a number takes a microsecond.
    return () if type(value) in (int, float) or isinstance(value, numbers.Real) else None


def is_array(value: Any) -> bool:
    """True for a NumPy array or scalar."""
    # A torch dtype has no `kind`.
    return hasattr(getattr(value, "dtype", None), "kind") and hasattr(value, "shape")


def is_integral(value: Any) -> bool:
    """True for a tensor of an integer type, and for one without elements."""
    # An empty list became a float tensor without saying anything of its type.
    return isinstance(value, Tensor) and not (
        value.numel()
        and (value.dtype.is_floating_point or value.dtype.is_complex or value.dtype == torch.bool)
    )


def describe(value: Any) -> str:
    """A value for an error message: its type and shape, or the value itself if small."""
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    if isinstance(value, Tensor) or is_array(value):
        return f"a {type(value).__name__} of shape {list(value.shape)} and type {value.dtype}"
    text = repr(value)  # of a list of a million tokens only the beginning
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def as_number(value: Any) -> float | None:
    """A number of any library, or a tensor of one element, as a float; None for anything else."""
    # float("1") would work, but a text in a field of numbers is a mistake.
    texts = is_array(value) and value.dtype.kind not in "biuf"
    if texts or isinstance(value, str | bytes | bytearray):
        return None
    if isinstance(value, Tensor) and value.is_complex():  # float() reads 1 of 1 + 0j
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None


def count_of(values: Any) -> int | None:
    """Number of per-sample values of a field; None if it is not a list of values."""
    if isinstance(values, str | bytes | Mapping):  # these have a length, but no samples
        return None
    if isinstance(values, Tensor) or is_array(values):
        return int(values.shape[0]) if len(values.shape) else None
    return len(values) if isinstance(values, Sequence) else None
