"""Checks of arguments that people pass in, and rounding of integers. Whatever supports
`operator.index` counts as an integer and comes back as a Python int; floats and booleans are
refused, never rounded."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence, Set
from typing import Any, Literal, get_args, get_origin, get_type_hints

from mcore_batching.planning.errors import LengthError, MCoreBatchingError, named

MAX_LENGTH_TOKENS = 2**40
"""A longer length is certainly not in tokens; doubled or halved, costs stay far from overflow."""

MOST_COST = 1e100
"""Times the largest length squared and the most samples, a cost is still finite: 1e100 · 2^80 ·
10^6 < 1e308."""


def as_integer(value: Any) -> int | None:
    """`value` as a Python int, or None if it is a boolean or not an integer."""
    # operator.index takes a Torch boolean for 0 or 1. Torch is not imported here, only recognised.
    if isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool"):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def at_least(name: str, value: Any, minimum: int, error: type[MCoreBatchingError]) -> int:
    """The argument `name` as a Python int of `minimum` or more; else raises an `error`."""
    number = as_integer(value)
    if number is None:
        raise error(
            f"{named(name)} must be an integer, got {value!r:.60} ({type(value).__name__}); set "
            f"{minimum} or more"
        )
    if number < minimum:
        raise error(
            f"{named(name)} must be {minimum} or more, got {number}; increase {named(name)}"
        )
    return number


def check_options(settings: Any, error: type[MCoreBatchingError]) -> None:
    """Check each field of a frozen dataclass by its type: an integer is 1 or more, or None where
    its type allows that; a float is from 0 to `MOST_COST`; a choice is one of its literals."""
    for name, kind in types_of(settings.__class__).items():
        value = getattr(settings, name)
        if kind is bool:
            require_bool(name, value, error)
        elif get_origin(kind) is Literal:
            require_choice(name, value, get_args(kind), error)
        elif kind is float:
            object.__setattr__(settings, name, number_up_to(name, value, MOST_COST, error))
        elif kind is int or (kind == int | None and value is not None):
            # Made Python ints: NumPy's would not print as JSON.
            object.__setattr__(settings, name, at_least(name, value, 1, error))


# Searches make options anew for each size of rows.
types_of = functools.cache(get_type_hints)


def number_up_to(name: str, value: Any, most: float, error: type[MCoreBatchingError]) -> float:
    """The argument `name` as a float of 0 to `most`."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    # Compared before it becomes a float: an integer of 400 digits is none.
    if not (is_number and 0 <= value <= most):
        raise error(f"{named(name)} must be a number from 0 to {most:g}, got {value!r:.60}")
    return float(value)


def require_bool(name: str, value: Any, error: type[MCoreBatchingError]) -> None:
    """Refuse what is neither True nor False."""
    if not isinstance(value, bool):
        raise error(f"{named(name)} must be True or False, got {value!r:.80}")


def require_choice(
    name: str, value: Any, choices: Sequence[str], error: type[MCoreBatchingError]
) -> None:
    """Refuse what is none of the choices."""
    if not (isinstance(value, str) and value in choices):
        raise error(
            f"{named(name)} must be one of {', '.join(map(repr, choices))}, got {value!r:.60}"
        )


def entries(name: str, values: Any, error: type[MCoreBatchingError]) -> Sequence[Any]:
    """The argument `name` as a sequence; an `error` if it is no ordered one, as a number, dict or
    set."""
    if isinstance(values, (list, tuple, range)):
        return values
    try:
        # These iterate, but over characters, keys, or in no order.
        if isinstance(values, (str, bytes, Mapping, Set)):
            raise TypeError
        return list(values)
    except TypeError:
        raise error(
            f"{named(name)} must be a sequence, got {type(values).__name__} {values!r:.60}"
        ) from None


def one_per_sample(name: str, values: Any, num_samples: int) -> Sequence[Any]:
    """The argument `name` as a sequence of `num_samples`; a `LengthError` if it has others."""
    checked = entries(name, values, LengthError)
    if len(checked) != num_samples:
        raise LengthError(
            f"{named(name)} has {len(checked)} entries for {num_samples} samples; give one for each"
        )
    return checked


def round_up(value: int, multiple: int) -> int:
    """The least multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def check_lengths(lengths: Sequence[int], noun: str = "length") -> list[int]:
    """The lengths [samples] in tokens, or those of each sample's `noun`, as Python ints; a
    `LengthError` names one out of range."""
    checked: list[int] = []
    for index, value in enumerate(entries("lengths", lengths, LengthError)):
        # Nearly all are plain ints, and `as_integer` is a call for each of up to a million.
        number = value if type(value) is int else as_integer(value)
        if number is None or not 0 <= number <= MAX_LENGTH_TOKENS:
            raise LengthError(
                f"the {noun} of sample {index} must be an integer from 0 to {MAX_LENGTH_TOKENS}, "
                f"got {value!r:.60}; correct {noun}s",
                index=index,
            )
        checked.append(number)
    return checked
