"""Records of JSON-lines files, in memory: index i is the same record in every process."""

from __future__ import annotations

from collections.abc import Sequence
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


class JsonLines:
    """The records of some JSON-lines files, one after the other.

    Blank lines are skipped, but count in the line numbers of errors.

    Args:
        paths: UTF-8 files with one JSON value a line.

    Attributes:
        files: indices of the records of each file.

    Raises:
        SftDataError: a file cannot be read, or holds no record.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = tuple(paths)
        self.files: list[range] = []
        self._lines: list[tuple[str, int, bytes]] = []
        for path in self.paths:
            start = len(self._lines)
            self._lines += _lines_of(path)
            self.files.append(range(start, len(self._lines)))
            if not self.files[-1]:
                raise SftDataError("holds no record: give a file with one JSON object a line", path)

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> Any:
        """One record.

        Raises:
            SftDataError: the line is not JSON.
        """
        try:
            return parse_json(self._lines[index][2].decode())
        except ValueError as error:
            raise SftDataError(f"not a line of JSON: {error}") from None

    def error(self, index: int, problem: str) -> SftDataError:
        """An error about one record, with its file and line."""
        path, line, _ = self._lines[index]
        return SftDataError(problem, path, line)


def _lines_of(path: str) -> list[tuple[str, int, bytes]]:
    """Path, number and bytes of each line of a file that is not blank."""
    try:
        with open(path, "rb") as file:
            lines = file.read().split(b"\n")
    except OSError as error:
        raise SftDataError(
            f"cannot be read: {error.strerror}; --dynamic-batch-data takes JSON-lines files", path
        ) from error
    return [(path, number, line) for number, line in enumerate(lines, start=1) if line.strip()]
