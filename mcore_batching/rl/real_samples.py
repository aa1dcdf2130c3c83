"""The real samples of a batch (all but padding samples), those of each group, and metrics of them.

sample_metrics(batch, ["rewards"], group=data_parallel_group)
{"rewards/mean": 0.4, "rewards/max": 1.0, "rewards/min": 0.0}
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from mcore_batching.batch.consensus import Consensus
from mcore_batching.batch.errors import BatchError, SchemaError
from mcore_batching.batch.fields import num_samples, require_one_per_sample
from mcore_batching.batch.values import as_number, describe, is_tagged
from mcore_batching.planning.groups import group_key
from mcore_batching.planning.integers import entries


def real_indices(batch: Mapping[str, Any]) -> list[int]:
    """Positions of the samples that are not padding samples, ascending; all without
    ``is_padding``."""
    tags, count = batch.get("is_padding"), num_samples(batch)
    if tags is None:
        return list(range(count))
    require_one_per_sample("is_padding", tags, count)
    return [index for index, tag in enumerate(tags) if not is_tagged("is_padding", index, tag)]


def real_samples(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The batch without its padding samples, in every field: tensors stay tensors, arrays arrays,
    other sequences become new lists.

    Raises:
        SchemaError: a field does not have one value per sample.
    """
    positions, count = real_indices(batch), num_samples(batch)
    taken: dict[str, Any] = {}
    for key, values in batch.items():
        if values is None:
            taken[key] = None
            continue
        require_one_per_sample(key, values, count)
        is_array = hasattr(values, "shape")  # it takes a list of indices
        taken[key] = values[positions] if is_array else [values[index] for index in positions]
    return taken


def numbers_of(batch: Mapping[str, Any], name: str, indices: Iterable[int]) -> list[float]:
    """The values of a field at these indices as floats."""
    values: Any = batch.get(name)
    require_one_per_sample(name, values, num_samples(batch))
    numbers = []
    for index in indices:
        number = as_number(values[index])  # of any library, or a tensor of one element
        if number is None:
            raise SchemaError(
                name,
                sample_index=index,
                expected="one number per sample",
                found=describe(values[index]),
            )
        numbers.append(number)
    return numbers


def indices_by_group(
    batch: Mapping[str, Any], name: str, indices: Iterable[int]
) -> dict[Hashable, list[int]]:
    """The indices of each group's samples; groups, by value, in order of first appearance.

    indices_by_group({"uids": ["a", "b", "a", "pad"]}, "uids", [0, 1, 2])
    {"a": [0, 2], "b": [1]}
    """
    groups: Any = batch.get(name)
    require_one_per_sample(name, groups, num_samples(batch))
    members: dict[Hashable, list[int]] = {}  # a dict keeps the order of first appearance
    for index in indices:
        members.setdefault(group_key(groups[index], index), []).append(index)
    return members


def sample_metrics(
    batch: Mapping[str, Any], fields: Sequence[str], *, group: dist.ProcessGroup | None = None
) -> dict[str, float]:
    """Mean, maximum and minimum of per-sample numbers, over the real samples of all ranks. A
    collective over ``group``, for ranks without samples too.

    Args:
        batch: field name to one value per sample; ``is_padding`` marks those that are not real.
        fields: names of fields of one number per sample, the same on every rank.
        group: the data-parallel ranks; None for this process alone.

    Returns:
        ``field/mean``, ``field/max`` and ``field/min`` of each field, the same on all ranks; none
        of them if no rank has a real sample.

    Raises:
        BatchError: on every rank, if on any a field is absent or does not have one number per
            sample, or if the fields differ between ranks.
    """
    with Consensus(group).agreement("summing up metrics") as agree:
        real = real_indices(batch)
        names = entries("fields", fields, BatchError)
        if not all(isinstance(name, str) for name in names):
            raise BatchError(f"fields must hold names of fields, got {names!r:.60}")
        numbers = [numbers_of(batch, name, real) for name in names]
        agree.same("fields", list(names))
        # Sums and counts travel, not means: ranks have different numbers of samples.
        counts = agree.sum("counts", [len(each) for each in numbers])
        sums = agree.sum("sums", [sum(each) for each in numbers])
        maxima = agree.max("maxima", [max(each, default=-math.inf) for each in numbers])
        minima = agree.min("minima", [min(each, default=math.inf) for each in numbers])
    metrics: dict[str, float] = {}  # of no real sample on any rank none, not NaN
    reduced = zip(names, counts.value, sums.value, maxima.value, minima.value, strict=True)
    for name, count, added, most, fewest in reduced:
        if count:
            metrics[f"{name}/mean"] = added / count
            metrics[f"{name}/max"] = most
            metrics[f"{name}/min"] = fewest
    return metrics
