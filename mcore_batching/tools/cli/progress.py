"""A line on the terminal while work takes long.

Nothing is printed to anything but a terminal, nothing in the first seconds, and nothing stays.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

FIRST_SECONDS, EVERY_SECONDS = 3.0, 0.5
"""Until the first line, so that short work stays silent, and between two."""


@contextlib.contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show that the work of a ``with`` block goes on.

    Args:
        what: the work, in a word.

    Yields:
        a function to tell how many parts are done, and of how many.
    """
    parts = (0, 0)

    def tell(done: int, total: int) -> None:
        nonlocal parts
        parts = (done, total)

    # In a log, or in a pipe, a line that is written over would stay as many lines.
    if sys.stderr is None or not sys.stderr.isatty():
        yield tell
        return
    over, started = threading.Event(), time.monotonic()

    def show() -> None:
        width = 0  # of the longest line so far, which a shorter one must overwrite
        while not over.wait(EVERY_SECONDS if width else FIRST_SECONDS):
            line = f"{what}: {_so_far(*parts, time.monotonic() - started)}"
            _overwrite(f"{line:<{width}}")
            width = max(width, len(line))
        if width:
            _overwrite(" " * width)
            _overwrite("")

    # A daemon: Ctrl-C must not wait for it.
    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield tell
    finally:
        over.set()
        thread.join()


def _so_far(done: int, total: int, seconds: float) -> str:
    if total < 2:  # of one part nobody knows how much is left
        return f"{seconds:.0f} s"
    left = f", {seconds / done * (total - done):.0f} s left" if done else ""
    return f"step {done} of {total}, {seconds:.0f} s{left}"


def _overwrite(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # of a terminal that is gone
        print(f"\r{line}", end="", file=sys.stderr, flush=True)
