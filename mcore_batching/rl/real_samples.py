"""Real samples of a batch, those that are not padding samples, and the groups they belong to."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

from mcore_batching.batch.errors import SchemaError
from mcore_batching.batch.field_checks import num_samples, require_one_per_sample
from mcore_batching.batch.select import take
from mcore_batching.batch.value_checks import is_tagged
from mcore_batching.batch.value_shapes import as_number, describe
from mcore_batching.planning.groups import group_key


def real_indices(batch: Mapping[str, Any]) -> list[int]:
    """Positions of the samples that are not padding samples, ascending.

    Args:
        batch: field name to one value per sample; without ``is_padding`` all are real.

    Raises:
        SchemaError: there is not one tag per sample.
    """
    tags, count = batch.get("is_padding"), num_samples(batch)
    if tags is None:
        return list(range(count))
    require_one_per_sample("is_padding", tags, count)
    return [index for index, tag in enumerate(tags) if not is_tagged("is_padding", index, tag)]


def as_numbers(
    name: str, values: Sequence[Any], indices: Iterable[int], use: str = ""
) -> list[float]:
    """The values at these indices, one number each; texts are none. `use` is for the error.

    Raises:
        SchemaError: a value is not one number.
    """
    numbers = []
    for index in indices:
        number = as_number(values[index])
        if number is None:
            raise SchemaError(
                name,
                sample_index=index,
                expected=f"one number per sample{use}",
                found=describe(values[index]),
            )
        numbers.append(number)
    return numbers


def real_samples(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The batch without its padding samples, every field sliced alike.

    Raises:
        SchemaError: a field has not one value per sample.
    """
    return take(batch, real_indices(batch))


def indices_by_group(
    groups: Sequence[Hashable], indices: Iterable[int]
) -> dict[Hashable, list[int]]:
    """Those of the indices that belong to each group, groups in order of first appearance.

        indices_by_group(["a", "b", "a", "pad"], [0, 1, 2])    {"a": [0, 2], "b": [1]}

    Args:
        groups: the group of every sample; integers of NumPy and PyTorch count by their value.
        indices: of the samples that count.

    Raises:
        LengthError: a group among them is None or not hashable.
    """
    members: dict[Hashable, list[int]] = {}
    for index in indices:
        members.setdefault(group_key(groups[index], index), []).append(index)
    return members
