"""Loops over numbers that numba compiles where it is installed (extra `fast`), and Python runs
where it is not, with the same results to the last bit.

A kernel takes indexable numbers only, lists without numba and arrays with it, and calls no other
kernel. What was compiled is kept on disk. numba's own `NUMBA_DISABLE_JIT=1` turns all of it off.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, MutableSequence, Sequence
from typing import Any, TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., Any])
Value = TypeVar("Value", float, int)
Numbers = MutableSequence[float]
"""A list, or an array of float64."""
Integers = MutableSequence[int]
"""A list, or an array of int64."""


def kernel(function: Function) -> Function:
    """Decorator: compiles a function over numbers at its first call, with numba."""
    chosen: Callable[..., Any] | None = None

    @functools.wraps(function)
    def run(*arguments: Any) -> Any:
        nonlocal chosen
        # At the first call, not on import: a command that makes no plan does not load numba.
        if chosen is None:
            compile_ = _compiler()
            chosen = compile_(function) if compile_ else function
        return chosen(*arguments)

    return cast("Function", run)


def numbers(values: Sequence[float]) -> Numbers:
    """A copy of numbers, as kernels take them."""
    # An array even of a few: numba compiles for one type, and would do it again for lists.
    return _arrays().array(values, dtype=float) if _compiler() else list(values)


def zeros(count: int) -> Numbers:
    """So many zeros, as kernels take them; an array of them is made in no time."""
    return _arrays().zeros(count) if _compiler() else [0.0] * count


def integers(values: Sequence[int]) -> Integers:
    """A copy of integers, as kernels take them."""
    # Of 64 bits on every platform, as numba's own: NumPy's default may have 32.
    return _arrays().array(values, dtype="int64") if _compiler() else list(values)


def as_list(values: MutableSequence[Value]) -> list[Value]:
    """Numbers or integers as Python's own."""
    return values if isinstance(values, list) else cast("Any", values).tolist()


@functools.cache
def _arrays() -> Any:
    import numpy

    return numpy


@functools.cache
def _compiler() -> Callable[[Callable[..., Any]], Callable[..., Any]] | None:
    """Compiles a function for all processes of this user; None where that cannot be."""
    try:
        import numba

        # Without fast math every operation is IEEE's, in the order written: the same plan as
        # without numba.
        compile_ = functools.partial(numba.njit, cache=True)
        compile_(_nothing)()  # raises where what is compiled cannot be kept
    except Exception:
        # Any: a numba that does not go with its numpy raises more than ImportError, and a plan
        # needs neither.
        return None
    return None if numba.config.DISABLE_JIT else compile_


def _nothing() -> None:
    """A function to try the compiler with."""
