"""Selection of samples of a batch, all of their fields alike.

    take({"uids": ["a", "b", "c"], "rewards": torch.tensor([1.0, 2.0, 3.0])}, [2, 0])
    {"uids": ["c", "a"], "rewards": tensor([3.0, 1.0])}

    for mini_batch in step_batches(batch, group_steps(batch["uids"], 15)):
        ...

A field that cannot be sliced (a dict for the whole batch, a list of another length) is refused by
name, never attached whole. The given batch is not changed, and its lists are not shared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mcore_batching.batch.errors import BatchError, OrderError
from mcore_batching.batch.field_checks import num_samples, require_one_per_sample
from mcore_batching.batch.value_checks import require_index
from mcore_batching.planning.integers import entries


def take(batch: Mapping[str, Any], indices: Sequence[int]) -> dict[str, Any]:
    """The samples at these indices.

    Args:
        batch: field name to one value per sample, as a list, a tensor or an array.
        indices: positions in the batch, from 0, in the order wanted.

    Returns:
        the same fields, each of its own container type (a tuple becomes a list); the values are
        the given ones. A field that is None stays None.

    Raises:
        SchemaError: a field has not one value per sample.
        OrderError: an index is not that of a sample.
    """
    count = num_samples(batch)
    for key, values in batch.items():
        if values is not None:
            require_one_per_sample(key, values, count, ", so that it can be sliced with the batch")
    indices = entries("indices", indices, BatchError)
    positions = [require_index("indices", index) for index in indices]
    beyond = tuple(sorted({index for index in positions if not 0 <= index < count}))
    if beyond:
        raise OrderError(
            f"expected indices of a batch of {count} samples, got "
            f"{', '.join(map(str, beyond[:10]))}{' and more' if len(beyond) > 10 else ''}; count "
            "from its first sample, 0",
            extra=beyond,
        )
    return {key: _entries(values, positions) for key, values in batch.items()}


def step_batches(batch: Mapping[str, Any], steps: Iterable[Iterable[int]]) -> list[dict[str, Any]]:
    """The batch of every optimizer step, from the samples of all.

    Args:
        batch: as for `take`.
        steps: sample indices of each step, as from `group_steps`, or `StepPlan.sample_indices`.

    Returns:
        for each step `take` of its indices; samples in no step are in no batch.

    Raises:
        SchemaError, OrderError: as `take`; OrderError also if a sample is in two steps.
    """
    listed = [
        [require_index("steps", index) for index in entries("steps", step, BatchError)]
        for step in entries("steps", steps, BatchError)
    ]
    counts = Counter(index for step in listed for index in step)
    doubled = tuple(sorted(index for index, count in counts.items() if count > 1))
    if doubled:
        raise OrderError(
            f"expected every sample in one step at most, got {len(doubled)} in more: "
            f"{', '.join(map(str, doubled[:10]))}; pass each step's own sample indices",
            doubled=doubled,
        )
    return [take(batch, step) for step in listed]


def _entries(values: Any, positions: list[int]) -> Any:
    if values is None:
        return None
    if hasattr(values, "shape"):
        return values[positions]
    return [values[position] for position in positions]
