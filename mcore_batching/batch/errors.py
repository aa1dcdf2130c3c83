"""Errors about the fields of a batch, the order of its outputs, and groups over ranks.

Guarantees: each is a `ValueError`; its message says what was expected, what came, and what to write
instead; it survives pickling with its message and attributes, so that a rank can send it to others.
"""

from __future__ import annotations

from collections.abc import Hashable

from mcore_batching.planning.errors import MCoreBatchingError


class BatchError(MCoreBatchingError, ValueError):
    """Base of the errors that `mcore_batching.batch` and `mcore_batching.rl` raise on purpose."""


class SchemaError(BatchError):
    """A field that does not hold what its kind says, or whose kind is not known.

    Attributes: `key` of the field; `sample_index`, the entry concerned, or None if the whole field
    is; `expected` and `found` in words; `declaration`, the line of code that declares the field
    (or the lines, one for each reading that is left), empty if no declaration would help.
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


class SplitGroupError(BatchError):
    """Groups whose samples are on several ranks, so that none can compute their statistics.

    Attributes: `ranks_of_group`, global ranks of each such group, by its uid.
    """

    def __init__(self, message: str, *, ranks_of_group: dict[Hashable, tuple[int, ...]]) -> None:
        """Take the message as it is."""
        super().__init__(message)
        self.ranks_of_group = ranks_of_group
