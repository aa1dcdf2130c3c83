"""Read the length of each sample from a file.

A length is an integer of 0 or more that stands in the file as such; anything else is refused with
the file and the line. Empty lines of text and JSON lines are skipped.
"""

from __future__ import annotations

import contextlib
import csv
import errno
import io
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO, TypeVar

from mcore_batching.planning import MAX_LENGTH_TOKENS
from mcore_batching.planning.files import (
    MAX_JSON_CHARACTERS,
    bounded_lines,
    open_text,
    parse_json,
)
from mcore_batching.tools.options import UsageError

# Limit of a file: 64 times the samples that a step's search takes by default. Doubled, endless
# input takes twice as long, and twice 0.3 GB, before it is refused.
MAX_LINES = 2**23
# Fewer digits than Python refuses to convert, and more than any length has.
_INTEGER = re.compile(r"[+-]?[0-9]{1,100}")
_COLUMN = "column (--column)"
_Value = TypeVar("_Value", int, str)


def read_lengths(source: str, column: str | None = None) -> list[int]:
    """Sample lengths in tokens, in file order.

    Args:
        source: a path to CSV with a heading (`.csv`), one JSON object per line (`.jsonl`, `.json`,
            `.ndjson`) or text with one integer per line; `-` for text on standard input.
        column: the CSV column or JSON key; may be left out for a CSV with a single column.
    """
    return _read(source, column, _length, f"a length of 0 to {MAX_LENGTH_TOKENS} tokens")


def read_groups(source: str, column: str) -> list[str]:
    """The group of each sample, in file order, from a column of the file of lengths; arguments as
    of `read_lengths`."""
    return _read(source, column, _group, "a group, text or an integer")


def _read(
    source: str, column: str | None, convert: Callable[[Any], _Value | None], expected: str
) -> list[_Value]:
    """The file's values as `convert` makes them; it returns None for one that is not `expected`."""
    suffix = Path(source).suffix.lower()
    name = "<stdin>" if source == "-" else source
    found: list[_Value] = []
    try:
        # newline="": the csv module splits lines itself, as a quoted cell may hold line ends.
        opened = open_text(source, newline="") if source != "-" else _standard_input()
        with opened as file:
            for number, raw in _VALUES.get(suffix, _text_values)(
                _bounded(file, name), name, column
            ):
                value = convert(raw)
                if value is None:
                    raise UsageError(f"{name}:{number}: expected {expected}, got {raw!r:.60}")
                found.append(value)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"cannot read {name}: {error}") from error
    return found


def _length(raw: Any) -> int | None:
    # A JSON number, of which true and 1.0 are none, or digits.
    is_text = isinstance(raw, str) and _INTEGER.fullmatch(raw.strip())
    number = int(raw) if is_text else raw
    return number if type(number) is int and 0 <= number <= MAX_LENGTH_TOKENS else None


def _group(raw: Any) -> str | None:
    return str(raw) if isinstance(raw, str | int) and raw != "" else None


def _standard_input() -> contextlib.AbstractContextManager[TextIO]:
    """Standard input, read as files are: as UTF-8 in any locale, without a byte order mark."""
    if sys.stdin is None:  # `<&-` in a shell
        raise OSError(errno.EBADF, "standard input is closed")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8-sig", errors="strict")
    return contextlib.nullcontext(sys.stdin)


def _bounded(file: TextIO, name: str) -> Iterator[str]:
    """The lines of a file, within the limits on their length and number."""
    for number, line in enumerate(bounded_lines(file), start=1):
        if len(line) > MAX_JSON_CHARACTERS:
            raise UsageError(
                f"{name}:{number}: longer than {MAX_JSON_CHARACTERS} characters; write one sample "
                "a line"
            )
        if number > MAX_LINES:
            raise UsageError(
                f"{name}: more than {MAX_LINES} lines; give the samples of fewer steps"
            )
        yield line


def _text_values(lines: Iterable[str], name: str, column: str | None) -> Iterator[tuple[int, str]]:
    if column is not None:
        raise UsageError(f"{_COLUMN} is for .csv and .jsonl files; leave it out for {name}")
    for number, line in enumerate(lines, start=1):
        if text := line.strip():
            yield number, text


def _csv_values(lines: Iterable[str], name: str, column: str | None) -> Iterator[tuple[int, Any]]:
    rows = csv.DictReader(lines)
    columns = list(rows.fieldnames or [])
    if column is None and len(columns) == 1:  # nothing to choose from
        column = columns[0]
    if column not in columns:
        raise _no_column(name, column, columns)
    for row in rows:
        if any(row.get(rows.restkey) or ()):  # 1,024 without quotes
            raise UsageError(
                f"{name}:{rows.line_num}: more cells than the heading's {len(columns)}; write "
                "numbers without commas between their digits"
            )
        yield rows.line_num, row[column]


def _json_values(lines: Iterable[str], name: str, column: str | None) -> Iterator[tuple[int, Any]]:
    # Line by line: a bad one is named, and a file of a million lines is never whole in memory.
    for number, text in _text_values(lines, name, None):
        place = f"{name}:{number}"
        try:
            record = parse_json(text)
        except ValueError as error:
            raise UsageError(f"{place}: not a line of JSON: {error}") from None
        if not isinstance(record, dict):
            raise UsageError(
                f"{place}: expected a JSON object, got {text!r:.60}; give one a line, or a .txt "
                "file of one length a line"
            )
        if column not in record:
            raise _no_column(place, column, record)
        yield number, record[column]


def _no_column(place: str, column: str | None, known: Iterable[str]) -> UsageError:
    choices = f" to one of {', '.join(map(repr, known)) or 'none'}"
    missing = "no column is named" if column is None else f"there is no column {column!r}"
    return UsageError(f"{place}: {missing}; set {_COLUMN}{choices}")


_VALUES = dict.fromkeys((".jsonl", ".json", ".ndjson"), _json_values) | {".csv": _csv_values}
"""The numbered values of a table, by the ending of its name."""
