"""Metrics of the real samples of a batch: padding samples are left out of each of them.

    sample_metrics(batch, ["rewards", "response_lengths"], group=data_parallel_group)
    {"rewards/mean": 0.4, "rewards/max": 1.0, "rewards/min": 0.0, "response_lengths/mean": 211.7, …}

Guarantees
- A metric of which there is no real sample on any rank is absent, not 0 and not NaN.
- The same collectives run on every rank, whatever it holds; what is wrong on one rank is an error
  on all of them, never a hang.
- A group's statistics count each of its real samples once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from mcore_batching.batch.errors import BatchError, SchemaError
from mcore_batching.batch.select import take
from mcore_batching.batch.values import count_of
from mcore_batching.planning.groups import group_key
from mcore_batching.rl.masked import reduce_over


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupStatistics:
    """What the values of one group have in common.

    Attributes:
        num_values: values of the group, 1 or more.
        total: their sum.
        mean: their mean.
        deviation: their sample standard deviation (``num_values - 1`` degrees of freedom), None
            for a single value.
    """

    num_values: int
    total: float
    mean: float
    deviation: float | None


def real_indices(batch: Mapping[str, Any]) -> list[int]:
    """Positions of the samples that are not padding samples, ascending.

    Args:
        batch: field name to one value a sample; without ``is_padding`` all are real.

    Raises:
        SchemaError: there is not one tag a sample.
    """
    tags, num_samples = batch.get("is_padding"), num_samples_of(batch)
    if tags is None:
        return list(range(num_samples))
    if count_of(tags) != num_samples:
        raise SchemaError(
            "is_padding",
            expected=f"{num_samples} values, one a sample",
            found=f"{count_of(tags)} values",
        )
    return [index for index, tag in enumerate(tags) if not bool(tag)]


def real_samples(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The batch without its padding samples, every field sliced alike.

    Raises:
        SchemaError: a field has not one value a sample.
    """
    return take(batch, real_indices(batch))


def num_samples_of(batch: Mapping[str, Any]) -> int:
    """Samples of a batch, padding samples included, 0 if it has no fields."""
    counts = [count_of(values) for values in batch.values() if values is not None]
    lengths = batch.get("total_lengths")
    return (count_of(lengths) if lengths is not None else next(iter(counts), 0)) or 0


def sample_metrics(
    batch: Mapping[str, Any], fields: Sequence[str], *, group: dist.ProcessGroup | None = None
) -> dict[str, float]:
    """Mean, greatest and least value of numbers per sample, over the real samples of all ranks.

    A collective over ``group``.

    Args:
        batch: field name to one value a sample.
        fields: the same on every rank; each holds one number a sample.
        group: the ranks whose samples count together; None for this process alone.

    Returns:
        ``field/mean``, ``field/max`` and ``field/min`` for each field, the same on all ranks;
        none of them if there is no real sample.

    Raises:
        SchemaError: on every rank, if on any of them a field is absent or has not one number a
            sample.
    """
    fault: SchemaError | None = None
    real: list[int] = []
    try:
        real = real_indices(batch)
    except SchemaError as error:
        fault = error
    sums: list[float] = []
    extremes: list[float] = []
    for name in fields:
        numbers = None if fault else _numbers(batch.get(name), real, num_samples_of(batch))
        sums += [len(numbers or []), sum(numbers or []), float(numbers is None)]
        extremes += [max(numbers or [-math.inf]), -min(numbers or [math.inf])]
    sums = reduce_over(sums, group, dist.ReduceOp.SUM)
    extremes = reduce_over(extremes, group, dist.ReduceOp.MAX)
    if fault is not None:
        raise fault
    metrics: dict[str, float] = {}
    for index, name in enumerate(fields):
        count, total, ranks_without = sums[3 * index : 3 * index + 3]
        if ranks_without:
            raise SchemaError(
                name,
                expected="one number a sample on every rank, since a metric of it is wanted",
                found=f"none on {int(ranks_without)} of {group.size() if group else 1} ranks",
            )
        if count:
            metrics[f"{name}/mean"] = total / count
            metrics[f"{name}/max"] = extremes[2 * index]
            metrics[f"{name}/min"] = -extremes[2 * index + 1]
    return metrics


def group_statistics(
    values: Sequence[float],
    groups: Sequence[Hashable],
    *,
    is_padding: Sequence[Any] | None = None,
) -> dict[Hashable, GroupStatistics]:
    """Statistics of each group, over its real samples.

    Args:
        values: one number a sample.
        groups: the group (uid) of each sample.
        is_padding: whether a sample is a padding sample; None if none is.

    Returns:
        group to its statistics, in order of first appearance; a group without a real sample is
        absent.

    Raises:
        BatchError: not one group, or not one tag, for each value.
        LengthError: a real sample's group is None or not hashable.
    """
    tags = [False] * len(values) if is_padding is None else list(is_padding)
    if not len(values) == len(groups) == len(tags):
        raise BatchError(
            f"expected one group and one is_padding for each of {len(values)} values, got "
            f"{len(groups)} groups and {len(tags)} tags"
        )
    members: dict[Hashable, list[float]] = {}
    for index, (value, group) in enumerate(zip(values, groups, strict=True)):
        if not bool(tags[index]):
            members.setdefault(group_key(group, index), []).append(float(value))
    return {group: _statistics(numbers) for group, numbers in members.items()}


def _statistics(numbers: Sequence[float]) -> GroupStatistics:
    total = math.fsum(numbers)
    mean = total / len(numbers)
    squares = math.fsum((number - mean) ** 2 for number in numbers)
    return GroupStatistics(
        num_values=len(numbers),
        total=total,
        mean=mean,
        deviation=math.sqrt(squares / (len(numbers) - 1)) if len(numbers) > 1 else None,
    )


def _numbers(values: Any, real: Sequence[int], num_samples: int) -> list[float] | None:
    """The values of the real samples, None if they are no numbers."""
    if values is None or count_of(values) != num_samples:
        return None
    try:
        return [float(values[index]) for index in real]
    except (TypeError, ValueError, IndexError, RuntimeError):
        return None
