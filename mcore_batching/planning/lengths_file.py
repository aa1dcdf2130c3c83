"""Reading sample lengths from files.

Guarantees: every number read is an integer of 0 or more that stands in the file as such; anything
else is refused with the file and the line. Empty lines of text and JSON lines are passed over.
"""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from mcore_batching.planning.checks import MAX_LENGTH_TOKENS
from mcore_batching.planning.errors import PlanningError

# Fewer digits than Python refuses to convert, and more than any length has.
_INTEGER = re.compile(r"[+-]?[0-9]{1,100}")
_JSON_SUFFIXES = (".jsonl", ".json", ".ndjson")


class LengthsFileError(PlanningError):
    """A lengths file that cannot be read or holds something else than lengths."""


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
    if source == "-":
        _refuse_column(column, "standard input")
        return [_integer(text, "<stdin>", line) for line, text in _filled_lines(sys.stdin)]
    suffix = Path(source).suffix.lower()
    try:
        with Path(source).open(encoding="utf-8-sig", newline="") as file:
            if suffix == ".csv":
                return _read_csv(file, source, column)
            if suffix in _JSON_SUFFIXES:
                return _read_json_lines(file, source, column)
            _refuse_column(column, source)
            return [_integer(text, source, line) for line, text in _filled_lines(file)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise LengthsFileError(f"cannot read {source}: {error}") from None


def _refuse_column(column: str | None, source: str) -> None:
    if column is not None:
        raise LengthsFileError(
            f"--column is for .csv and .jsonl files, but {source} is read as text with one integer "
            "a line; leave --column out, or rename the file"
        )


def _filled_lines(file: Iterable[str]) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(file, start=1):
        text = line.strip()
        if text:
            yield number, text


def _read_csv(file: Iterable[str], source: str, column: str | None) -> list[int]:
    rows = csv.DictReader(file)
    columns = list(rows.fieldnames or [])
    if column is None and len(columns) == 1:
        column = columns[0]
    if column is None or column not in columns:
        asked = "--column is not set" if column is None else f"there is no column {column!r}"
        raise LengthsFileError(
            f"{source}: {asked}; set --column to one of {', '.join(map(repr, columns)) or 'none'}"
        )
    return [_integer(row[column], source, rows.line_num) for row in rows]


def _read_json_lines(file: Iterable[str], source: str, column: str | None) -> list[int]:
    lengths: list[int] = []
    for line, text in _filled_lines(file):
        try:
            record = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise LengthsFileError(f"{source}:{line}: not a line of JSON: {error}") from None
        if not isinstance(record, dict):
            raise LengthsFileError(
                f"{source}:{line}: expected a JSON object, got {text!r:.60}; write lengths that "
                "stand alone into a .txt file"
            )
        if column is None or column not in record:
            asked = "--column is not set" if column is None else f"there is no key {column!r}"
            raise LengthsFileError(
                f"{source}:{line}: {asked}; set --column to one of "
                f"{', '.join(map(repr, record)) or 'none'}"
            )
        lengths.append(_integer(record[column], source, line))
    return lengths


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
