"""Errors about the fields of a batch and the order of its outputs.

Each is a `ValueError` and survives pickling with its message and attributes.
"""

from __future__ import annotations

from mcore_batching.planning.errors import MCoreBatchingError


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
