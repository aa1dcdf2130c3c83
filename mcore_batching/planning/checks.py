"""Checks on numbers that people pass in.

Guarantees: whatever supports `operator.index` (Python, NumPy and Torch integers) is accepted and
comes back as a Python int; floats and booleans are refused, never rounded.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from mcore_batching.planning.errors import LengthError, PlanningError

# Beyond this a length is certainly not in tokens; below it, costs are far from overflow.
MAX_LENGTH_TOKENS = 2**40


def as_integer(value: Any) -> int | None:
    """`value` as a Python int, or None if it is a bool or not an integer."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def at_least(name: str, value: Any, minimum: int, error: type[PlanningError]) -> int:
    """`value` as a Python int that is `minimum` or more; `error` says so otherwise."""
    number = as_integer(value)
    if number is None:
        raise error(
            f"{name} must be an integer, got {value!r} ({type(value).__name__}); "
            f"set {name} to an integer of {minimum} or more"
        )
    if number < minimum:
        raise error(f"{name} must be {minimum} or more, got {number}; increase {name}")
    return number


def check_lengths(lengths: Sequence[int]) -> list[int]:
    """The lengths [samples] in tokens, as Python ints.

    Raises:
        LengthError: an entry is no integer, is negative, or is beyond `MAX_LENGTH_TOKENS`; it names
            the sample.
    """
    checked: list[int] = []
    for index, length in enumerate(lengths):
        number = length if type(length) is int else as_integer(length)
        if number is None:
            raise LengthError(
                f"the length of sample {index} must be an integer number of tokens, got "
                f"{length!r} ({type(length).__name__}); pass lengths as integers",
                index=index,
            )
        if not 0 <= number <= MAX_LENGTH_TOKENS:
            raise LengthError(
                f"the length of sample {index} must be between 0 and {MAX_LENGTH_TOKENS} tokens, "
                f"got {number}; correct entry {index} of lengths",
                index=index,
            )
        checked.append(number)
    return checked


def check_owners(owners: Sequence[int], num_samples: int, data_parallel: int) -> list[int]:
    """The data-parallel rank that holds each sample [samples], as Python ints.

    Raises:
        LengthError: not one owner a sample, or an owner that is no rank of the layout.
    """
    if len(owners) != num_samples:
        raise LengthError(
            f"owners must name one rank for each of the {num_samples} samples, got {len(owners)} "
            "entries; pass owners in the order of lengths"
        )
    checked: list[int] = []
    for index, owner in enumerate(owners):
        rank = as_integer(owner)
        if rank is None or not 0 <= rank < data_parallel:
            raise LengthError(
                f"the owner of sample {index} must be a data-parallel rank from 0 to "
                f"{data_parallel - 1}, got {owner!r}; correct owners or set data_parallel",
                index=index,
            )
        checked.append(rank)
    return checked
