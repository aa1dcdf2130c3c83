"""Real samples of a batch (all but padding samples), and their groups."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

from mcore_batching.batch.errors import SchemaError
from mcore_batching.batch.fields.field_checks import num_samples, require_one_per_sample
from mcore_batching.batch.fields.value_checks import is_tagged
from mcore_batching.batch.fields.value_shapes import as_number, describe
from mcore_batching.batch.rows.select import take
from mcore_batching.planning.groups import group_key


def real_indices(batch: Mapping[str, Any]) -> list[int]:
    """Positions of the samples that are not padding samples, ascending.

    Args:
        batch: field name to one value per sample; without ``is_padding`` all are real.

    Raises:
        SchemaError: ``is_padding`` does not have one True or False per sample.
    """
    tags, count = batch.get("is_padding"), num_samples(batch)
    if tags is None:
        return list(range(count))
    require_one_per_sample("is_padding", tags, count)
    return [index for index, tag in enumerate(tags) if not is_tagged("is_padding", index, tag)]


def as_numbers(
    name: str, values: Sequence[Any], indices: Iterable[int], use: str = ""
) -> list[float]:
    """The values at these indices as floats; ``use`` ends the error's "one number per sample".

    Raises:
        SchemaError: a value is not one number.
    """
    numbers = []
    for index in indices:
        number = as_number(values[index])  # of any library, or a tensor of one element
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
    """The batch without its padding samples, in every field.

    Raises:
        SchemaError: a field does not have one value per sample.
    """
    return take(batch, real_indices(batch))


def indices_by_group(
    groups: Sequence[Hashable], indices: Iterable[int]
) -> dict[Hashable, list[int]]:
    """The indices of each group's samples; groups in order of first appearance.

        indices_by_group(["a", "b", "a", "pad"], [0, 1, 2])    {"a": [0, 2], "b": [1]}

    Args:
        groups: the group of every sample; integers of NumPy and PyTorch equal Python's.
        indices: the samples to group.

    Raises:
        LengthError: a group is None or not hashable.
    """
    members: dict[Hashable, list[int]] = {}  # a dict keeps the order of first appearance
    for index in indices:
        members.setdefault(group_key(groups[index], index), []).append(index)
    return members
