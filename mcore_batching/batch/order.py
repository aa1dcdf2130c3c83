"""Permutation of per-sample values between plan order and the order the samples came in.

restore_order(["c", "a", "b"], sample_indices=[2, 0, 1], num_samples=3)    ["a", "b", "c"]
apply_order(["a", "b", "c"], sample_indices=[2, 0, 1])                     ["c", "a", "b"]
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import islice
from typing import TypeVar

from mcore_batching.batch.errors import BatchError, OrderError
from mcore_batching.batch.values import read_indices
from mcore_batching.planning.errors import shortened
from mcore_batching.planning.integers import entries

T = TypeVar("T")

_MAX_MISSING = 10**6
"""Missing indices kept in an error; a wrong `num_samples` may be any number."""


def restore_order(values: Sequence[T], sample_indices: Sequence[int], num_samples: int) -> list[T]:
    """Values in plan order, put into origin order. Inverse of `apply_order`.

    Args:
        values: one per real sample, of all micro-batches in turn; none for placeholders.
        sample_indices: origin index of each value's sample, those of all rows in turn.
        num_samples: of the batch, each of which has a value.

    Returns:
        ``num_samples`` values: ``result[sample_indices[k]] is values[k]``.

    Raises:
        OrderError: the indices are not one per value, and 0 to ``num_samples - 1`` once each.
    """
    values = entries("values", values, BatchError)
    sample_indices = _require_permutation(len(values), sample_indices, num_samples)
    place = {index: k for k, index in enumerate(sample_indices)}
    return [values[place[index]] for index in range(num_samples)]


def apply_order(values: Sequence[T], sample_indices: Sequence[int]) -> list[T]:
    """Values in origin order, put into plan order. Inverse of `restore_order`.

    Args:
        values: one per sample, in origin order.
        sample_indices: origin index of the sample that is k-th in the plan, for each k.

    Returns:
        ``result[k] is values[sample_indices[k]]``.

    Raises:
        OrderError: the indices are not 0 to ``len(values) - 1`` once each.
    """
    values = entries("values", values, BatchError)
    sample_indices = _require_permutation(len(values), sample_indices, len(values))
    return [values[index] for index in sample_indices]


def _require_permutation(num_values: int, given: Sequence[int], num_samples: int) -> list[int]:
    """The indices as Python ints; they are 0 to ``num_samples - 1`` once each."""
    sample_indices = read_indices("sample_indices", given)
    (num_samples,) = read_indices("num_samples", [num_samples])
    counts = Counter(sample_indices)
    # A generator: with num_samples 2**31 a list would fill the memory.
    absent = (index for index in range(num_samples) if index not in counts)
    missing = tuple(islice(absent, _MAX_MISSING))
    doubled = tuple(sorted(index for index, count in counts.items() if count > 1))
    extra = tuple(sorted(index for index in counts if not 0 <= index < num_samples))
    # All faults in one error: what is missing beside what is extra shows batches mixed up.
    if num_values == len(sample_indices) and not (missing or doubled or extra):
        return sample_indices
    named = (("missing", missing), ("doubled", doubled), ("extra", extra))
    faults = "; ".join(f"{name} {shortened(indices)}" for name, indices in named if indices)
    raise OrderError(
        f"expected one value for each of {num_samples} samples, got {num_values} values and "
        f"{len(sample_indices)} sample_indices"
        + (f" ({faults})" if faults else "")
        + "; pass one output per real sample, none for placeholders",
        missing=missing,
        doubled=doubled,
        extra=extra,
    )
