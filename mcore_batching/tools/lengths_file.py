"""Reading one value a sample from files: its length, or its group.

Guarantees: every length read is an integer of 0 or more that stands in the file as such, every
group a text or an integer; anything else is refused with the file and the line. Empty lines of text
and JSON lines are passed over.
"""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from mcore_batching.planning.checks import MAX_LENGTH_TOKENS
from mcore_batching.planning.errors import PlanningError

# Fewer digits than Python refuses to convert, and more than any length has.
_INTEGER = re.compile(r"[+-]?[0-9]{1,100}")
# What a line of a text file is, by the flag that names a column in files of other kinds.
_STANDS_ALONE = {"--column": "integer", "--group-column": "group"}
_JSON_SUFFIXES = (".jsonl", ".json", ".ndjson")


_Value = TypeVar("_Value")
_Parse = Callable[[Any, str, int], _Value]
"""A value as it stands in the file, the file's name and the line, to what it means."""


class LengthsFileError(PlanningError):
    """A file that cannot be read or holds something else than lengths, or groups."""


def read_lengths(source: str, column: str | None = None) -> list[int]:
    """Read sample lengths in tokens, in file order.

    Args:
        source: `-` for text on standard input, or a path. `.csv` is read as CSV with a heading,
            `.jsonl`, `.json` and `.ndjson` as one JSON object a line, all else as text with one
            integer a line.
        column: the CSV column or JSON key; needed for these unless a CSV has a single column.

    Raises:
        LengthsFileError: names the file, and the line where there is one.
    """
    return _read(source, column, "--column", _integer)


def read_groups(source: str, column: str | None = None) -> list[str | int]:
    """Read the group (uid) of each sample, in file order.

    Args:
        source: as for `read_lengths`, with one group a line of text.
        column: as for `read_lengths`.

    Raises:
        LengthsFileError: names the file, and the line where there is one.
    """
    return _read(source, column, "--group-column", _group)


def _read(source: str, column: str | None, flag: str, parse: _Parse[_Value]) -> list[_Value]:
    if source == "-":
        _refuse_column(column, flag, "standard input")
        return [parse(text, "<stdin>", line) for line, text in _filled_lines(sys.stdin)]
    suffix = Path(source).suffix.lower()
    try:
        with Path(source).open(encoding="utf-8-sig", newline="") as file:
            if suffix == ".csv":
                return _read_csv(file, source, column, flag, parse)
            if suffix in _JSON_SUFFIXES:
                return _read_json_lines(file, source, column, flag, parse)
            _refuse_column(column, flag, source)
            return [parse(text, source, line) for line, text in _filled_lines(file)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise LengthsFileError(f"cannot read {source}: {error}") from None


def _refuse_column(column: str | None, flag: str, source: str) -> None:
    if column is not None:
        raise LengthsFileError(
            f"{flag} is for .csv and .jsonl files, but {source} is read as text with one "
            f"{_STANDS_ALONE[flag]} a line; leave {flag} out, or rename the file"
        )


def _filled_lines(file: Iterable[str]) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(file, start=1):
        text = line.strip()
        if text:
            yield number, text


def _read_csv(
    file: Iterable[str], source: str, column: str | None, flag: str, parse: _Parse[_Value]
) -> list[_Value]:
    rows = csv.DictReader(file)
    columns = list(rows.fieldnames or [])
    if column is None and len(columns) == 1:
        column = columns[0]
    if column is None or column not in columns:
        asked = f"{flag} is not set" if column is None else f"there is no column {column!r}"
        raise LengthsFileError(
            f"{source}: {asked}; set {flag} to one of {', '.join(map(repr, columns)) or 'none'}"
        )
    return [parse(row[column], source, rows.line_num) for row in rows]


def _read_json_lines(
    file: Iterable[str], source: str, column: str | None, flag: str, parse: _Parse[_Value]
) -> list[_Value]:
    values: list[_Value] = []
    for line, text in _filled_lines(file):
        try:
            record = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise LengthsFileError(f"{source}:{line}: not a line of JSON: {error}") from None
        if not isinstance(record, dict):
            raise LengthsFileError(
                f"{source}:{line}: expected a JSON object, got {text!r:.60}; write values that "
                "stand alone into a .txt file"
            )
        if column is None or column not in record:
            asked = f"{flag} is not set" if column is None else f"there is no key {column!r}"
            raise LengthsFileError(
                f"{source}:{line}: {asked}; set {flag} to one of "
                f"{', '.join(map(repr, record)) or 'none'}"
            )
        values.append(parse(record[column], source, line))
    return values


def _integer(value: Any, source: str, line: int) -> int:
    number: int | None = None
    if type(value) is int:
        number = value
    elif isinstance(value, str) and _INTEGER.fullmatch(value.strip()):
        number = int(value)
    if number is None or not 0 <= number <= MAX_LENGTH_TOKENS:
        raise LengthsFileError(
            f"{source}:{line}: expected a length in tokens, an integer from 0 to "
            f"{MAX_LENGTH_TOKENS}, got {value!r:.60}"
        )
    return number


def _group(value: Any, source: str, line: int) -> str | int:
    if type(value) is int:
        return value
    if isinstance(value, str) and value.strip():
        return value.strip()
    raise LengthsFileError(
        f"{source}:{line}: expected a group, a text or an integer, got {value!r:.60}"
    )
