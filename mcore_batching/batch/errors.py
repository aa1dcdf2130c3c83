"""Errors about the fields of a batch and the order of its outputs, and errors as texts.

Each is a `ValueError` and survives pickling with its message and attributes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mcore_batching.planning.errors import MCoreBatchingError

LONGEST_TEXT = 8000
"""Characters of an error's text that other ranks are told."""


def described(error: BaseException, text: Callable[[Any], str] = str) -> str:
    """An error's type and message, as other ranks are told them.

    Args:
        error: of any class: its message may raise, or hold any number of any characters.
        text: gives the message.
    """
    name = type(error).__name__
    try:
        return readable(f"{name}: {text(error)}")
    except Exception as another:
        return f"{name} (its message raised {type(another).__name__})"


def readable(text: str) -> str:
    """A text that can be sent and printed: beyond `LONGEST_TEXT` characters the middle is left out,
    and halves of characters (lone surrogates) are escaped."""
    half, more = LONGEST_TEXT // 2, len(text) - LONGEST_TEXT
    if more > 0:
        text = f"{text[:half]} [{more} characters left out] {text[-half:]}"
    return text.encode(errors="backslashreplace").decode()


class BatchError(MCoreBatchingError, ValueError):
    """Base of the errors that `mcore_batching.batch` and `mcore_batching.rl` raise on purpose."""


class SchemaError(BatchError):
    """A field that does not hold what its kind says, or whose kind is not known.

    Attributes: `key` of the field; `sample_index`, the entry concerned, or None if the whole field
    is; `expected` and `found` in words; `declaration`, the line of code that declares the field
    (or the lines, one for each possible kind), empty if no declaration would help.
    """

    def __init__(
        self,
        key: str,
        *,
        expected: str,
        found: str,
        sample_index: int | None = None,
        declaration: str = "",
        advice: str = "declare the field by what it holds",
    ) -> None:
        """Compose the message from the parts; `advice` introduces the declaration."""
        where = "" if sample_index is None else f", sample {sample_index}"
        fix = f"; {advice}: {declaration}" if declaration else ""
        super().__init__(f"field {key!r}{where}: expected {expected}, found {found}{fix}")
        self.key = key
        self.sample_index = sample_index
        self.expected = expected
        self.found = found
        self.declaration = declaration


class OrderError(BatchError):
    """Outputs that cannot be put back into the order of the samples.

    Attributes: `missing`, sample indices without an output; `doubled`, indices with more than one;
    `extra`, indices that no sample has. Each a tuple, empty where that is not the fault.
    """

    def __init__(
        self,
        message: str,
        *,
        missing: tuple[int, ...] = (),
        doubled: tuple[int, ...] = (),
        extra: tuple[int, ...] = (),
    ) -> None:
        """Take the message as it is."""
        super().__init__(message)
        self.missing = missing
        self.doubled = doubled
        self.extra = extra
