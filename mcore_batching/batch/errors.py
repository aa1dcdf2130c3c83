"""Errors about the fields of a batch, the order of its outputs and ranks that disagree."""

from __future__ import annotations

from collections.abc import Mapping

from mcore_batching.planning.errors import MCoreBatchingError

LONGEST_TEXT = 8000
"""Characters of an error's text sent to other ranks: a traceback's worth. 1,000 failing ranks then
gather 8 MB; doubled, 16."""


def described(error: BaseException) -> str:
    """An error's type and message for other ranks, also where its `__str__` raises."""
    name = type(error).__name__
    try:
        return readable(f"{name}: {error}")
    except Exception as another:
        # A __str__ that raises must not keep this rank from reporting.
        return f"{name} (its message raised {type(another).__name__})"


def readable(text: str) -> str:
    """A text of at most `LONGEST_TEXT` characters (the middle is cut out) that UTF-8 can encode."""
    # The beginning names the error, the end of a traceback the line.
    half, more = LONGEST_TEXT // 2, len(text) - LONGEST_TEXT
    if more > 0:
        text = f"{text[:half]} [{more} characters left out] {text[-half:]}"
    # Lone surrogates, from file names for instance, cannot be encoded: they are escaped.
    return text.encode(errors="backslashreplace").decode()


class BatchError(MCoreBatchingError, ValueError):
    """Base of the errors that `mcore_batching.batch` and `mcore_batching.rl` raise on purpose."""


class SchemaError(BatchError):
    """The values of a field do not match its kind, or its kind cannot be inferred.

    Attributes: `key` of the field; `sample_index`, None if the whole field is at fault; `expected`
    and `found` in words; `declaration`, the line of code that declares the field (one for each
    possible kind), empty if no declaration would help.
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

    Attributes: tuples of sample indices, empty where that is not the fault: `missing` have no
    output, `doubled` more than one, `extra` are of no sample.
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


class CollectiveError(MCoreBatchingError, RuntimeError):
    """Base of the errors that all ranks raise together.

    Attributes:
        failures: by global rank, what was wrong there; long texts are cut to `LONGEST_TEXT`.
    """

    headline = "a collective step failed"

    def __init__(self, failures: Mapping[int, str]) -> None:
        # Every rank's own line, in the order of ranks: the cause is often on one of many.
        self.failures = dict(failures)
        lines = [f"  rank {rank}: {text}" for rank, text in sorted(self.failures.items())]
        super().__init__("\n".join([f"{self.headline}:", *lines]))


class RankFailedError(CollectiveError, BatchError):
    """Work that failed on some ranks."""

    headline = "failed on some ranks, so none goes on"


class DisagreementError(CollectiveError, BatchError):
    """Values that differ between ranks and must not."""

    headline = "the ranks disagree, so none goes on"
