"""Plan functions that misbehave, where another process can import them."""

from __future__ import annotations

import os
import time
from typing import Any


class UnreadableError(Exception):
    """It can be pickled, and not read again."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"{one} and {other}")


def shout(text: str) -> str:
    os.write(1, b"straight to standard output\n")
    print("by print", flush=True)
    return text.upper()


def sleep_for(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def process_id() -> int:
    return os.getpid()


def end_the_process() -> None:
    os._exit(7)


def give(what: str) -> Any:
    if what == "function":
        return lambda: None
    raise UnreadableError(1, 2)
