"""Read one value per sample from a file: its length, or its group.

A length is an integer of 0 or more that stands in the file as such, a group a text or an integer;
anything else is refused with the file and the line. Empty lines of text and JSON lines are skipped.
"""

from __future__ import annotations

import csv
import errno
import io
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO, TypeVar

from mcore_batching.planning import MAX_LENGTH_TOKENS, Argument, MCoreBatchingError
from mcore_batching.planning.json_text import MAX_JSON_CHARACTERS, open_text, parse_json

# Fewer digits than Python refuses to convert, and more than any length has.
_INTEGER = re.compile(r"[+-]?[0-9]{1,100}")
MAX_LINES = 2**23
"""Limit of a file: 64 times the samples that a step's search takes by default; 0.3 GB of integers.
Doubled, a wrong file of endless lines takes twice the memory before it is refused."""
_JSON_SUFFIXES = (".jsonl", ".json", ".ndjson")

_COLUMN = Argument("column")
_GROUP_COLUMN = Argument("group_column")

_Value = TypeVar("_Value")
_Parse = Callable[[Any, str, int], _Value]
"""Reads a value, from the value as it stands in the file, the file's name and the line."""


class LengthsFileError(MCoreBatchingError, ValueError):
    """A file that cannot be read, or that holds anything but lengths, or groups."""


def read_lengths(source: str, column: str | None = None) -> list[int]:
    """Sample lengths in tokens, in file order.

    Args:
        source: a path to CSV with a heading (`.csv`), one JSON object per line (`.jsonl`, `.json`,
            `.ndjson`) or text with one integer per line; `-` for text on standard input.
        column: the CSV column or JSON key; may be left out for a CSV with a single column.

    Raises:
        LengthsFileError: names the file, and the line where there is one.
        OSError: standard input cannot be read.
    """
    return _read(source, column, _COLUMN, _integer)


def read_groups(source: str, group_column: str | None = None) -> list[str | int]:
    """The group (uid) of each sample, in file order.

    Args:
        source: as for `read_lengths`, with one group per line of text.
        group_column: as `column` of `read_lengths`.

    Raises:
        LengthsFileError: names the file, and the line where there is one.
    """
    return _read(source, group_column, _GROUP_COLUMN, _group)


def _read(
    source: str, column: str | None, argument: Argument, parse: _Parse[_Value]
) -> list[_Value]:
    """The values of a file. `argument` is the one that the caller passes `column` by."""
    if source == "-":
        _refuse_column(column, argument, "standard input")
        return [
            parse(text, "<stdin>", line)
            for line, text in _filled(_bounded(_standard_input(), "<stdin>"))
        ]
    suffix = Path(source).suffix.lower()
    try:
        # newline="": the csv module splits lines itself, as a quoted cell may hold line ends.
        with open_text(source, newline="") as file:
            lines = _bounded(file, source)
            if suffix == ".csv":
                return _read_csv(lines, source, column, argument, parse)
            if suffix in _JSON_SUFFIXES:
                return _read_json_lines(lines, source, column, argument, parse)
            _refuse_column(column, argument, source)
            return [parse(text, source, line) for line, text in _filled(lines)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise LengthsFileError(f"cannot read {source}: {error}") from error


def _standard_input() -> TextIO:
    """Standard input, read as files are: UTF-8 in any locale, without a byte order mark."""
    stream = sys.stdin
    if stream is None:  # `<&-` in a shell
        raise OSError(errno.EBADF, "standard input is closed")
    if isinstance(stream, io.TextIOWrapper) and stream.encoding != "utf-8-sig":
        stream.reconfigure(encoding="utf-8-sig", errors="strict")
    return stream


def _refuse_column(column: str | None, argument: Argument, source: str) -> None:
    if column is not None:
        raise LengthsFileError(
            argument,
            f" is for .csv and .jsonl files, not for {source}; leave out ",
            argument,
            ", or rename the file",
        )


def _no_column(
    place: str, kind: str, column: str | None, argument: Argument, known: Iterable[str]
) -> LengthsFileError:
    choices = f" to one of {', '.join(map(repr, known)) or 'none'}"
    if column is None:
        return LengthsFileError(f"{place}: ", argument, " is not set; set ", argument, choices)
    return LengthsFileError(f"{place}: there is no {kind} {column!r}; set ", argument, choices)


def _bounded(file: TextIO, source: str) -> Iterator[str]:
    """The lines of a file, within the limits on their length and number."""
    # One character more than the limit shows that a line is too long, and no more is read of it.
    lines = iter(lambda: file.readline(MAX_JSON_CHARACTERS + 1), "")
    try:
        for number, line in enumerate(lines, start=1):
            if len(line) > MAX_JSON_CHARACTERS:
                raise LengthsFileError(
                    f"{source}:{number}: longer than {MAX_JSON_CHARACTERS} characters; write one "
                    "sample per line"
                )
            if number > MAX_LINES:
                raise LengthsFileError(
                    f"{source}: more than {MAX_LINES} lines; give the samples of fewer steps"
                )
            yield line
    except UnicodeDecodeError as error:
        raise LengthsFileError(f"cannot read {source}: {error}") from None


def _filled(lines: Iterable[str]) -> Iterator[tuple[int, str]]:
    """The lines that are not blank, with their numbers."""
    for number, line in enumerate(lines, start=1):
        if text := line.strip():
            yield number, text


def _read_csv(
    file: Iterable[str],
    source: str,
    column: str | None,
    argument: Argument,
    parse: _Parse[_Value],
) -> list[_Value]:
    rows = csv.DictReader(file)
    columns = list(rows.fieldnames or [])
    if column is None and len(columns) == 1:  # nothing to choose from
        column = columns[0]
    if column is None or column not in columns:
        raise _no_column(source, "column", column, argument, columns)
    return [parse(row[column], source, rows.line_num) for row in rows]


def _read_json_lines(
    file: Iterable[str],
    source: str,
    column: str | None,
    argument: Argument,
    parse: _Parse[_Value],
) -> list[_Value]:
    values: list[_Value] = []
    # Line by line: a bad one is named, and a file of a million lines is never whole in memory.
    for line, text in _filled(file):
        try:
            record = parse_json(text)
        except ValueError as error:
            raise LengthsFileError(f"{source}:{line}: not a line of JSON: {error}") from None
        if not isinstance(record, dict):
            raise LengthsFileError(
                f"{source}:{line}: expected a JSON object, got {text!r:.60}; name it .txt"
            )
        if column is None or column not in record:
            raise _no_column(f"{source}:{line}", "key", column, argument, record)
        values.append(parse(record[column], source, line))
    return values


def _integer(value: Any, source: str, line: int) -> int:
    number: int | None = None
    if type(value) is int:  # a JSON number; true and 1.0 are none
        number = value
    elif isinstance(value, str) and _INTEGER.fullmatch(value.strip()):
        number = int(value)
    if number is None or not 0 <= number <= MAX_LENGTH_TOKENS:
        raise LengthsFileError(
            f"{source}:{line}: expected a length of 0 to {MAX_LENGTH_TOKENS} tokens, "
            f"got {value!r:.60}"
        )
    return number


def _group(value: Any, source: str, line: int) -> str | int:
    if type(value) is int:
        return value
    if isinstance(value, str) and value.strip():
        return value.strip()
    raise LengthsFileError(f"{source}:{line}: expected a text or an integer, got {value!r:.60}")
