"""Permutation of per-sample values between plan order and the order the samples came in.

    restore_order(["c", "a", "b"], sample_indices=[2, 0, 1], num_samples=3)    ["a", "b", "c"]
    apply_order(["a", "b", "c"], sample_indices=[2, 0, 1])                     ["c", "a", "b"]

The two are each other's inverse. Every sample has exactly one value: nothing is lost, doubled, cut
off or filled with None, or both raise an `OrderError` that names the indices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import islice
from typing import TypeVar

from mcore_batching.batch.errors import BatchError, OrderError
from mcore_batching.batch.value_checks import require_index
from mcore_batching.planning.integers import entries

T = TypeVar("T")

_MAX_MISSING = 10**6  # indices of an error: `num_samples` may be any number
_MAX_LISTED = 10  # indices of each fault in a message


def restore_order(values: Sequence[T], sample_indices: Sequence[int], num_samples: int) -> list[T]:
    """Values in plan order, put into origin order. Inverse of `apply_order`.

    Args:
        values: one output per sample, in the order in which the samples were run.
        sample_indices: origin index of each of them.
        num_samples: of the batch; the indices are 0 to ``num_samples - 1``.

    Returns:
        ``num_samples`` values: ``result[sample_indices[k]] is values[k]``.

    Raises:
        OrderError: not one index per value, or the indices are not 0 to ``num_samples - 1``, each
            exactly once.
    """
    sample_indices = _require_permutation(values, sample_indices, num_samples)
    place = {index: k for k, index in enumerate(sample_indices)}
    return [values[place[index]] for index in range(num_samples)]


def apply_order(values: Sequence[T], sample_indices: Sequence[int]) -> list[T]:
    """Values in origin order, put into plan order. Inverse of `restore_order`.

    Args:
        values: one per sample, in origin order.
        sample_indices: origin index of each sample in plan order.

    Returns:
        ``result[k] is values[sample_indices[k]]``.

    Raises:
        OrderError: the indices are not 0 to ``len(values) - 1``, each exactly once.
    """
    values = entries("values", values, BatchError)
    sample_indices = _require_permutation(values, sample_indices, len(values))
    return [values[index] for index in sample_indices]


def _require_permutation(
    values: Sequence[object], given: Sequence[int], num_samples: int
) -> list[int]:
    """The indices as Python ints."""
    sample_indices = [
        require_index("sample_indices", index)
        for index in entries("sample_indices", given, BatchError)
    ]
    values = entries("values", values, BatchError)
    num_samples = require_index("num_samples", num_samples)
    counts = Counter(sample_indices)
    absent = (index for index in range(num_samples) if index not in counts)
    missing = tuple(islice(absent, _MAX_MISSING))
    doubled = tuple(sorted(index for index, count in counts.items() if count > 1))
    extra = tuple(sorted(index for index in counts if not 0 <= index < num_samples))
    if len(values) == len(sample_indices) and not (missing or doubled or extra):
        return sample_indices
    faults = [
        f"{name} {', '.join(map(str, indices[:_MAX_LISTED]))}"
        + (f" and {len(indices) - _MAX_LISTED} more" if len(indices) > _MAX_LISTED else "")
        for name, indices in (("missing", missing), ("doubled", doubled), ("extra", extra))
        if indices
    ]
    raise OrderError(
        f"expected one value for each of {num_samples} samples, indices 0 to {num_samples - 1} "
        f"once each; got {len(values)} values and {len(sample_indices)} sample_indices"
        + (f" ({'; '.join(faults)})" if faults else "")
        + "; pass one output for each real sample, none for placeholders",
        missing=missing,
        doubled=doubled,
        extra=extra,
    )
