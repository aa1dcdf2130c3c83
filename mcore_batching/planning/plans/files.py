"""Files written whole: who reads meanwhile, or is left after an interruption, has the old file or
the new one, not a half."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: str | Path, content: bytes) -> None:
    """Write a file, or leave it as it was; a link stays one, a device or a pipe is written to
    directly."""
    place = Path(path).resolve()  # renaming onto a link would replace the link
    if place.exists() and not place.is_file():  # /dev/stdout, say
        place.write_bytes(content)
        return
    beside = place.with_name(f".{place.name}-{os.getpid()}.tmp")
    try:
        beside.write_bytes(content)
        beside.replace(place)
    finally:
        beside.unlink(missing_ok=True)
