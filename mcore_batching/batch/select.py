"""Some samples of a batch, with everything that belongs to them.

    for mini_batch in step_batches(batch, group_steps(batch["uids"], 15)):
        mini_batch["uids"]     # those of this step's samples, in their order

Guarantees
- Every field is sliced alike, metadata included: entry i of each still belongs to sample i.
- What cannot be sliced (a dict for the whole batch, a list of another length) is refused by name,
  never attached whole.
- The given batch is not changed, and its lists are not shared.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mcore_batching.batch.errors import OrderError, SchemaError
from mcore_batching.batch.values import count_of, describe, is_array


def take(batch: Mapping[str, Any], indices: Sequence[int]) -> dict[str, Any]:
    """The samples at these indices.

    Args:
        batch: field name to one value a sample, as a list, a tensor or an array.
        indices: positions in the batch, from 0, in the order wanted.

    Returns:
        the same fields, each of its own container type (a tuple becomes a list); the values are
        the given ones. A field that is None stays None.

    Raises:
        SchemaError: a field has not one value a sample.
        OrderError: an index is not that of a sample.
    """
    num_samples = _num_samples(batch)
    positions = [_position(index) for index in indices]
    beyond = tuple(sorted({index for index in positions if not 0 <= index < num_samples}))
    if beyond:
        raise OrderError(
            f"expected indices from 0 to {num_samples - 1}, got {', '.join(map(str, beyond[:10]))}"
            f"{' and more' if len(beyond) > 10 else ''}; count from the batch's first sample",
            extra=beyond,
        )
    return {key: _entries(values, positions) for key, values in batch.items()}


def step_batches(batch: Mapping[str, Any], steps: Iterable[Sequence[int]]) -> list[dict[str, Any]]:
    """The batch of every optimizer step.

    Args:
        batch: as for `take`.
        steps: sample indices of each step, as from `group_steps`, or `StepPlan.sample_indices`.

    Returns:
        for each step what `take` makes of its indices; samples in no step are in no batch.

    Raises:
        SchemaError, OrderError: as `take`; OrderError also if a sample is in two steps.
    """
    steps = list(steps)
    counts = Counter(_position(index) for step in steps for index in step)
    doubled = tuple(sorted(index for index, count in counts.items() if count > 1))
    if doubled:
        raise OrderError(
            f"expected every sample in one step at most, got {len(doubled)} in more: "
            f"{', '.join(map(str, doubled[:10]))}; pass each step's own sample indices",
            doubled=doubled,
        )
    return [take(batch, step) for step in steps]


def _num_samples(batch: Mapping[str, Any]) -> int:
    present = {key: values for key, values in batch.items() if values is not None}
    if not present:
        raise SchemaError("total_lengths", expected="a batch with fields", found="none")
    leading = "total_lengths" if "total_lengths" in present else next(iter(present))
    expected = count_of(present[leading])
    for key, values in present.items():
        count = count_of(values)
        if count is None or count != expected:
            raise SchemaError(
                key,
                expected="one value a sample, so that it can be sliced with the batch"
                if expected is None or key == leading
                else f"{expected} values like {leading!r}, so that it can be sliced with the batch",
                found=describe(values) if count is None else f"{count} values",
            )
    return expected or 0


def _position(index: Any) -> int:
    try:
        return operator.index(index)
    except TypeError:
        raise OrderError(
            f"expected integer indices, got {index!r:.60}; pass positions in the batch"
        ) from None


def _entries(values: Any, positions: list[int]) -> Any:
    if values is None:
        return None
    if isinstance(values, Tensor):
        return values[torch.tensor(positions, dtype=torch.int64, device=values.device)]
    if is_array(values):
        return values.take(positions, axis=0)
    return [values[position] for position in positions]
