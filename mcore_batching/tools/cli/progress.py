"""A bar on standard error while long work runs, as apt and pip show one: only on a terminal."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

SECONDS = 1.0  # from one drawing to the next; shorter work shows nothing
COLUMNS = 79


@contextlib.contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show what runs and for how long, and a bar once the function given has been called with the
    number of parts that are done and of all."""
    parts = [0, 0]
    ended = threading.Event()
    started = time.monotonic()

    def count(done: int, total: int) -> None:
        parts[:] = done, total

    def draw() -> None:
        while not ended.wait(SECONDS):
            done, total = parts
            bar = f"[{'#' * (30 * done // total):<30}] {done}/{total}, " if total else ""
            _show(f"{what}: {bar}{time.monotonic() - started:.0f} s".ljust(COLUMNS))
        _show(" " * COLUMNS)

    if sys.stderr is None or not sys.stderr.isatty():
        yield count
        return
    drawing = threading.Thread(target=draw, daemon=True)
    drawing.start()
    try:
        yield count
    finally:
        ended.set()
        drawing.join()


def _show(line: str) -> None:
    with contextlib.suppress(OSError):
        print(f"\r{line}\r", end="", file=sys.stderr, flush=True)
