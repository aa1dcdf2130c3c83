"""JSON from files that strangers may have written: bounded in length, hence in memory, since as
Python values a document takes up to 40 times its length in bytes."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any, TextIO

from mcore_batching.planning.errors import MCoreBatchingError

MAX_JSON_CHARACTERS = 2**25
"""Limit of a document, or of a line of JSON lines: a plan of 3 million samples; 1.3 GB parsed.
Doubled, a hostile file takes twice that before it is refused."""


def open_text(path: str | Path, newline: str | None = None) -> TextIO:
    """A file opened for reading, as UTF-8 with or without a byte order mark. An `OSError` if it
    cannot be read, or is a device or a pipe, which may have no end; a shell's ``<(command)`` is
    read."""

    def opener(name: str, flags: int) -> int:
        # Opening a pipe would wait for who writes to it, for ever if nobody does.
        descriptor = os.open(name, flags | getattr(os, "O_NONBLOCK", 0))
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISFIFO(mode) and _is_open_here(name):
            os.set_blocking(descriptor, True)
        elif not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # of a folder open says so itself
            os.close(descriptor)
            raise OSError(errno.EINVAL, "it is a device or a pipe; copy what it holds to a file")
        return descriptor

    return open(path, encoding="utf-8-sig", newline=newline, opener=opener)


def _is_open_here(name: str) -> bool:
    """True of ``/dev/fd/63`` and the like: what this process was started with."""
    return os.path.dirname(os.path.realpath(name)) in (f"/proc/{os.getpid()}/fd", "/dev/fd")


def read_document(path: str | Path) -> str:
    """The text of a file that holds one JSON document; at most one character over the limit."""
    with open_text(path) as file:
        return file.read(MAX_JSON_CHARACTERS + 1)


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
