"""Selection of samples of a batch, with all of their fields.

    take({"uids": ["a", "b", "c"], "rewards": torch.tensor([1.0, 2.0, 3.0])}, [2, 0])
    {"uids": ["c", "a"], "rewards": tensor([3.0, 1.0])}

    for mini_batch in step_batches(batch, group_steps(batch["uids"], 15)):
        ...

A field that cannot be sliced (a dict for the whole batch, a list of another length) is an error
that names it. The given batch is not changed, and its lists are not shared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mcore_batching.batch.errors import BatchError, OrderError
from mcore_batching.batch.fields.field_checks import num_samples, require_one_per_sample
from mcore_batching.batch.fields.value_checks import require_index
from mcore_batching.planning.errors import shortened
from mcore_batching.planning.integers import entries


def take(batch: Mapping[str, Any], indices: Sequence[int]) -> dict[str, Any]:
    """The samples at these indices.

    Args:
        batch: field name to one value per sample, as a list, a tensor or an array.
        indices: positions in the batch, from 0, in the order wanted.

    Returns:
        the same fields; tensors stay tensors, arrays arrays, other sequences become lists. A
        field that is None stays None.

    Raises:
        SchemaError: a field does not have one value per sample.
        OrderError: an index is not that of a sample.
    """
    count = num_samples(batch)
    for key, values in batch.items():
        if values is not None:
            require_one_per_sample(key, values, count, ", so that it can be sliced with the batch")
    indices = entries("indices", indices, BatchError)
    positions = [require_index("indices", index) for index in indices]
    # Negative ones too: they would count from the end.
    beyond = tuple(sorted({index for index in positions if not 0 <= index < count}))
    if beyond:
        raise OrderError(
            f"expected indices below {count} samples, got {shortened(beyond)}; count from 0",
            extra=beyond,
        )
    return {key: _entries(values, positions) for key, values in batch.items()}


def step_batches(batch: Mapping[str, Any], steps: Iterable[Iterable[int]]) -> list[dict[str, Any]]:
    """One batch for every optimizer step.

    Args:
        batch: as for `take`.
        steps: sample indices of each step, as from `group_steps`, or `StepPlan.sample_indices`.

    Returns:
        `take` of each step's indices. A sample in no step is in no batch.

    Raises:
        SchemaError, OrderError: as `take`; OrderError also if a sample is in two steps.
    """
    members = [
        [require_index("steps", index) for index in entries("steps", step, BatchError)]
        for step in entries("steps", steps, BatchError)
    ]
    counts = Counter(index for step in members for index in step)
    doubled = tuple(sorted(index for index, count in counts.items() if count > 1))
    if doubled:
        raise OrderError(
            f"expected every sample in one step at most, got {len(doubled)} in more: "
            f"{shortened(doubled)}; pass each step's own sample indices",
            doubled=doubled,
        )
    return [take(batch, step) for step in members]


def _entries(values: Any, positions: list[int]) -> Any:
    if values is None:
        return None
    if hasattr(values, "shape"):  # tensors and arrays take a list of indices
        return values[positions]
    return [values[position] for position in positions]
