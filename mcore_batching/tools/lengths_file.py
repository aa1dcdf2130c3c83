"""Read the length of each sample from a file.

A length is an integer of 0 or more that stands in the file as such; anything else is refused with
the file and the line. Empty lines of text and JSON lines are skipped.
"""

from __future__ import annotations

import contextlib
import csv
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from mcore_batching.planning import MAX_LENGTH_TOKENS, Argument, MCoreBatchingError
from mcore_batching.planning.json_text import open_text, parse_json

# Fewer digits than Python refuses to convert, and more than any length has.
_INTEGER = re.compile(r"[+-]?[0-9]{1,100}")
_JSON_SUFFIXES = (".jsonl", ".json", ".ndjson")
_COLUMN = Argument("column")


class LengthsFileError(MCoreBatchingError, ValueError):
    """A file that cannot be read, or that holds anything but lengths."""


def read_lengths(source: str, column: str | None = None) -> list[int]:
    """Sample lengths in tokens, in file order.

    Args:
        source: a path to CSV with a heading (`.csv`), one JSON object per line (`.jsonl`, `.json`,
            `.ndjson`) or text with one integer per line; `-` for text on standard input.
        column: the CSV column or JSON key; may be left out for a CSV with a single column.
    """
    return [_length(value, place) for place, value in _values(source, column)]


def _values(source: str, column: str | None) -> Iterator[tuple[str, Any]]:
    """`file:line` and value of each sample."""
    suffix = Path(source).suffix.lower()
    name = "<stdin>" if source == "-" else source
    if column is not None and suffix not in (".csv", *_JSON_SUFFIXES):
        raise LengthsFileError(_COLUMN, f" is for .csv and .jsonl files; leave it out for {name}")
    try:
        # newline="": the csv module splits lines itself, as a quoted cell may hold line ends.
        opened = open_text(source, newline="") if source != "-" else None
        with opened or contextlib.nullcontext(sys.stdin) as lines:
            if suffix == ".csv":
                yield from _csv_values(lines, name, column)
            elif suffix in _JSON_SUFFIXES:
                yield from _json_values(lines, name, column)
            else:
                yield from _filled(lines, name)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise LengthsFileError(f"cannot read {name}: {error}") from error


def _filled(lines: Iterable[str], name: str) -> Iterator[tuple[str, str]]:
    """The lines that are not blank, with their places."""
    for number, line in enumerate(lines, start=1):
        if text := line.strip():
            yield f"{name}:{number}", text


def _csv_values(lines: Iterable[str], name: str, column: str | None) -> Iterator[tuple[str, Any]]:
    rows = csv.DictReader(lines)
    columns = list(rows.fieldnames or [])
    if column is None and len(columns) == 1:  # nothing to choose from
        column = columns[0]
    if column not in columns:
        raise _no_column(name, column, columns)
    for row in rows:
        yield f"{name}:{rows.line_num}", row[column]


def _json_values(lines: Iterable[str], name: str, column: str | None) -> Iterator[tuple[str, Any]]:
    # Line by line: a bad one is named, and a file of a million lines is never whole in memory.
    for place, text in _filled(lines, name):
        try:
            record = parse_json(text)
        except ValueError as error:
            raise LengthsFileError(f"{place}: not a line of JSON: {error}") from None
        if not isinstance(record, dict):
            raise LengthsFileError(
                f"{place}: expected a JSON object, got {text!r:.60}; give one a line, or a .txt "
                "file of one length a line"
            )
        if column not in record:
            raise _no_column(place, column, record)
        yield place, record[column]


def _no_column(place: str, column: str | None, known: Iterable[str]) -> LengthsFileError:
    choices = f" to one of {', '.join(map(repr, known)) or 'none'}"
    missing = "no column is named" if column is None else f"there is no column {column!r}"
    return LengthsFileError(f"{place}: {missing}; set ", _COLUMN, choices)


def _length(value: Any, place: str) -> int:
    number: int | None = None
    if type(value) is int:  # a JSON number; true and 1.0 are none
        number = value
    elif isinstance(value, str) and _INTEGER.fullmatch(value.strip()):
        number = int(value)
    if number is None or not 0 <= number <= MAX_LENGTH_TOKENS:
        raise LengthsFileError(
            f"{place}: expected a length of 0 to {MAX_LENGTH_TOKENS} tokens, got {value!r:.60}"
        )
    return number
