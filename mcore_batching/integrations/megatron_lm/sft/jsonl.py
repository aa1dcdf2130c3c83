"""The records of JSON-lines files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mcore_batching.planning.errors import MCoreBatchingError
from mcore_batching.planning.json_text import parse_json


class SftDataError(MCoreBatchingError, ValueError):
    """Data that cannot be trained on.

    Attributes: `path` of the file and its `line`, counted from 1; None if not of a single one.
    """

    def __init__(self, problem: str, path: str | None = None, line: int | None = None) -> None:
        where = ":".join(str(part) for part in (path, line) if part is not None)
        super().__init__(f"{where}: {problem}" if where else problem)
        self.path = path
        self.line = line


def records_of(path: str) -> Iterator[tuple[int, Any]]:
    """Line number, from 1, and value of each line of a UTF-8 file that is not blank.

    Raises:
        SftDataError: the file cannot be read, or a line is not JSON.
    """
    try:
        with open(path, "rb") as file:
            # Not by text mode's lines, which end at a carriage return inside a text, too.
            lines = file.read().split(b"\n")
    except OSError as error:
        raise SftDataError(
            f"cannot be read: {error.strerror}; give --dynamic-batch-data JSON-lines files", path
        ) from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                yield number, parse_json(line.decode())
            except ValueError as error:
                raise SftDataError(f"not a line of JSON: {error}", path, number) from None
