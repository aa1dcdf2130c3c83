"""The real samples of a batch (all but padding samples), and those of each group."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any

from mcore_batching.batch.errors import SchemaError
from mcore_batching.batch.fields import num_samples, require_one_per_sample
from mcore_batching.batch.values import as_number, describe, is_tagged
from mcore_batching.planning.groups import group_key


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
        if values is not None:
            require_one_per_sample(key, values, count)
        if values is None or hasattr(values, "shape"):  # tensors and arrays take a list of indices
            taken[key] = None if values is None else values[positions]
        else:
            taken[key] = [values[position] for position in positions]
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
