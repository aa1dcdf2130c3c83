"""Shape, type and number of values, be they tensors, NumPy arrays, numbers or nested lists.

    shape_of([[1, 2, 3], [4, 5, 6]])          (2, 3)
    describe(torch.zeros(2, 3))               "a Tensor of shape [2, 3] and type torch.float32"
    count_of({"for": "the whole batch"})      None

NumPy is never imported, so it need not be installed. Of a list only the first element is looked at,
so the cost does not depend on its length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def shape_of(value: Any) -> tuple[int, ...] | None:
    """Shape of a numeric value: ``()`` for a number, ``(len, …)`` for a list; None if not numeric.

    An empty list has shape ``(0,)``; a list's trailing shape is that of its first element.
    """
    if isinstance(value, Tensor):
        return tuple(value.shape)
    if is_array(value):
        return tuple(value.shape) if value.dtype.kind in "biufc" else None
    if isinstance(value, bool | int | float):
        return ()
    if isinstance(value, list | tuple):
        if not value:
            return (0,)
        first = shape_of(value[0])
        return None if first is None else (len(value), *first)
    return None


def is_array(value: Any) -> bool:
    """True for a NumPy array or scalar."""
    return hasattr(getattr(value, "dtype", None), "kind") and hasattr(value, "shape")


def is_integral(value: Any) -> bool:
    """True if the elements are integers, or if there are none."""
    if isinstance(value, Tensor):
        return not value.numel() or not (
            value.dtype.is_floating_point or value.dtype.is_complex or value.dtype == torch.bool
        )
    if is_array(value):
        return not value.size or value.dtype.kind in "iu"
    if isinstance(value, list | tuple):
        return not value or is_integral(value[0])
    return isinstance(value, int) and not isinstance(value, bool)


def describe(value: Any) -> str:
    """A value in the words of an error message: its type and shape, or the value if small."""
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    shape = shape_of(value)
    if isinstance(value, Tensor) or is_array(value):
        return f"a {type(value).__name__} of shape {list(value.shape)} and type {value.dtype}"
    if shape is not None:
        return f"a {type(value).__name__} of shape {list(shape)}"
    return f"{type(value).__name__} {_short(value)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def as_number(value: Any) -> float | None:
    """A number of any library, or a tensor of one element, as a float; None for all else.

    Texts are none, whatever they spell.
    """
    texts = is_array(value) and value.dtype.kind not in "biuf"
    if texts or isinstance(value, str | bytes | bytearray):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None


def count_of(values: Any) -> int | None:
    """Number of per-sample values of a field; None if it is not a list of values."""
    if isinstance(values, str | bytes | Mapping):
        return None
    if isinstance(values, Tensor) or is_array(values):
        return int(values.shape[0]) if len(values.shape) else None
    return len(values) if isinstance(values, Sequence) else None
