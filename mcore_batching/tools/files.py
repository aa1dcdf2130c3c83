"""Files written whole: beside their place first, then renamed to it.

An interrupted command leaves either the old file or the new one, never half of it. A device or a
pipe is written to directly, and so is a file in a folder that takes no new files.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Write a file, or leave it as it was.

    Args:
        path: where to; a link stays one.
        content: text, written as UTF-8, or bytes.

    Raises:
        OSError: it cannot be written; names `path`.
    """
    data = content.encode() if isinstance(content, str) else content
    place = Path(os.path.realpath(path))  # renaming onto a link would replace the link
    replaceable = place.is_file() and os.access(place, os.W_OK) and os.access(place.parent, os.W_OK)
    try:
        if replaceable or not place.exists():
            _replace(place, data)
        else:
            # A pipe that nobody reads is an error at once, where a plain open would wait.
            descriptor = os.open(place, os.O_WRONLY | os.O_TRUNC | getattr(os, "O_NONBLOCK", 0))
            os.set_blocking(descriptor, True)
            with open(descriptor, "wb") as file:
                file.write(data)
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


def _replace(place: Path, data: bytes) -> None:
    beside = place.with_name(f".mcore_batching-{secrets.token_hex(8)}.tmp")
    try:
        with beside.open("xb") as file:
            file.write(data)
        # A new file takes the process's mode: keep the one that people gave the old file.
        if place.exists():
            beside.chmod(place.stat().st_mode)
        beside.replace(place)
    finally:
        beside.unlink(missing_ok=True)
