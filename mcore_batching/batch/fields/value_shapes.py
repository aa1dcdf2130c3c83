"""Shape, type and number of values. NumPy is never imported, so it need not be installed.

shape_of(torch.zeros(2, 3))               (2, 3)
describe(torch.zeros(2, 3))               "a Tensor of shape [2, 3] and type torch.float32"
count_of({"for": "the whole batch"})      None
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def shape_of(value: Any) -> tuple[int, ...] | None:
    """Shape of a tensor, ``()`` for a number, None for anything else."""
    if isinstance(value, Tensor):
        return tuple(value.shape)
    return () if isinstance(value, numbers.Real) else None


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
