"""Records of JSON-lines files, read by their byte offsets instead of held in memory.

A record costs 8 bytes of memory, whatever its length, and is parsed when it is asked for. Index i
is the same record in every process. Reading is safe after a fork (data loader workers) and after
pickling.
"""

from __future__ import annotations

import os
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from mcore_batching.integrations.megatron_lm.sft.errors import SftDataError
from mcore_batching.planning.json_text import MAX_JSON_CHARACTERS, parse_json


class JsonLines:
    """The records of some JSON-lines files, one after the other.

    Blank lines are skipped, but count in the line numbers of errors.

    Args:
        paths: UTF-8 files with one JSON value a line.

    Raises:
        SftDataError: a file cannot be read, holds no record, or has a line of more than 32 MiB.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = tuple(paths)
        self._offsets = [_offsets(path) for path in self.paths]
        self._starts = [0, *accumulate(map(len, self._offsets))]
        self._files: dict[str, int] = {}

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> Any:
        """The record of one line.

        Raises:
            SftDataError: the line is not JSON.
        """
        path, start = self._locate(index)
        raw = self._line(path, start)
        try:
            return parse_json(raw.decode("utf-8-sig" if start == 0 else "utf-8"))
        except ValueError as error:
            raise self.error(index, f"not a line of JSON: {error}") from None

    def records_of_file(self, file: int) -> range:
        """Indices of the records in file number ``file``."""
        return range(self._starts[file], self._starts[file + 1])

    def error(self, index: int, problem: str) -> SftDataError:
        """An error about one record, with its file and line."""
        path, start = self._locate(index)
        with open(path, "rb") as file:
            preceding = sum(1 for _ in iter(file.readline, b"") if file.tell() <= start)
        return SftDataError(problem, path, preceding + 1)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_files": {}}

    def __del__(self) -> None:
        for descriptor in getattr(self, "_files", {}).values():
            os.close(descriptor)

    def _locate(self, index: int) -> tuple[str, int]:
        """The file of a record and the byte at which its line begins."""
        if not 0 <= index < len(self):
            raise IndexError(f"record {index} of {len(self)}")
        file = bisect_right(self._starts, index) - 1
        return self.paths[file], self._offsets[file][index - self._starts[file]]

    def _line(self, path: str, start: int) -> bytes:
        # pread moves no file position, which forked processes would share.
        if path not in self._files:
            self._files[path] = os.open(path, os.O_RDONLY)
        parts: list[bytes] = []
        size = 1 << 16
        while True:
            part = os.pread(self._files[path], size, start)
            end = part.find(b"\n")
            if end >= 0 or not part:
                return b"".join([*parts, part[:end] if end >= 0 else part])
            parts.append(part)
            start += len(part)
            size *= 2


def _offsets(path: str) -> array[int]:
    """Byte offsets of the lines of a file that are not blank."""
    offsets = array("q")
    start = 0
    try:
        with open(path, "rb") as file:
            lines = iter(lambda: file.readline(MAX_JSON_CHARACTERS + 1), b"")
            for number, line in enumerate(lines, start=1):
                if len(line) > MAX_JSON_CHARACTERS:
                    raise SftDataError(
                        f"a line may have at most {MAX_JSON_CHARACTERS} bytes: write one record a "
                        "line",
                        path,
                        number,
                    )
                if line.strip():
                    offsets.append(start)
                start += len(line)
    except OSError as error:
        raise SftDataError(
            f"cannot be read: {error.strerror}; --dynamic-batch-data takes JSON-lines files", path
        ) from error
    if not offsets:
        raise SftDataError("holds no record: give a file with one JSON object a line", path)
    return offsets
