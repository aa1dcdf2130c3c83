"""Time limits that grow with the load of the machine.

A limit is meant for an idle machine. On one where plain Python takes five times as long, since
others use its cores or its host gives it fewer, so may everything else.
"""

from __future__ import annotations

import time
from collections.abc import Callable

ADDITIONS = 200_000
IDLE_SECONDS = 0.02
"""Time that so many take on a core of 2020 that does nothing else."""
MOST_SLOWNESS = 20.0
SECONDS_BETWEEN_LOOKS = 10.0


def slowness() -> float:
    """How many times as long as on an idle machine plain Python takes now; 1 or more."""
    started = time.perf_counter()
    total = 0
    for number in range(ADDITIONS):
        total += number
    return min(max(1.0, (time.perf_counter() - started) / IDLE_SECONDS), MOST_SLOWNESS)


def patience(seconds: float) -> float:
    """A limit of so many seconds, as long as the machine is as slow as now."""
    return seconds * slowness()


def is_up(seconds: float, ends_within: Callable[[float], bool]) -> bool:
    """Wait for something by `ends_within`, which is true once it is over; True if the limit is up,
    as far as the load seen meanwhile extends it."""
    started, worst = time.monotonic(), 1.0
    while time.monotonic() < started + seconds * worst:
        if ends_within(min(seconds, SECONDS_BETWEEN_LOOKS)):
            return False
        worst = max(worst, slowness())
    return True
