"""Files of strangers, read within bounds, and files written whole.

As Python values a JSON document takes up to 40 times its length in bytes, so its length is bounded.
Who reads a file meanwhile, or is left after an interruption, has the old one or the new one, not a
half.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from mcore_batching.planning.errors import MCoreBatchingError

MAX_JSON_CHARACTERS = 2**25
"""Limit of a document, or of a line of JSON lines: a plan of 3 million samples; 1.3 GB parsed.
Doubled, a hostile file takes twice that before it is refused."""


def open_text(path: str | Path, newline: str | None = None) -> TextIO:
    """Open a file for reading, as UTF-8 with or without a byte order mark; a named pipe waits for
    its writer. A device may have no end: bound what is read."""
    return open(path, encoding="utf-8-sig", newline=newline)


def bounded_lines(file: TextIO) -> Iterator[str]:
    """The lines of a file; one that is too long ends one character over the limit."""
    return iter(partial(file.readline, MAX_JSON_CHARACTERS + 1), "")


def read_text(path: str | Path) -> str:
    """The text of a file, or as much as shows that it is over the limit."""
    with open_text(path) as file:
        return file.read(MAX_JSON_CHARACTERS + 1)


def read_document(path: str | Path) -> str:
    """`read_text` of a regular file; an `OSError` for a device or a pipe, which could make a rank
    of a job wait for ever."""
    mode = os.stat(path).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # open() refuses a folder itself
        raise OSError(errno.EINVAL, "it is a device or a pipe; copy its content to a file")
    return read_text(path)


def parse_json(text: str) -> Any:
    """The value that a text holds, a byte order mark left out; a `ValueError` if it is no JSON,
    longer than `MAX_JSON_CHARACTERS`, or nested deeper than Python can follow."""
    if len(text) > MAX_JSON_CHARACTERS:
        raise ValueError(f"it is longer than the {MAX_JSON_CHARACTERS} characters that are read")
    try:
        return json.loads(text.removeprefix("\ufeff"))
    except RecursionError as error:  # "[" a hundred thousand times
        raise ValueError(str(error)) from None


def parse_json_dict(text: str, what: str, error: type[MCoreBatchingError]) -> dict[str, Any]:
    """The object that a text holds; an `error` about `what` was expected if it holds none."""
    try:
        raw = parse_json(text)
    except ValueError as fault:
        raise error(f"expected {what}: {fault}") from None
    if not isinstance(raw, dict):
        raise error(f"expected {what}: a JSON object, got {text!r:.80}")
    return raw


def write_whole(path: str | Path, content: bytes) -> None:
    """Write a file, or leave it as it was; a link stays one, a device or a pipe is written to
    directly."""
    place = Path(path)
    if place.exists() and not place.is_file():  # /dev/stdout: of a pipe, it leads to no path
        place.write_bytes(content)
        return
    place = place.resolve()  # renaming onto a link would replace the link
    beside = place.with_name(f".{place.name}-{os.getpid()}.tmp")
    try:
        beside.write_bytes(content)
        beside.replace(place)
    finally:
        beside.unlink(missing_ok=True)
