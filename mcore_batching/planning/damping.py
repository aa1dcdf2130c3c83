"""How much each measurement of the last steps counts: less where it is off, and where it is old.

- A measurement counts the less the further it is off what was expected, beyond `TOLERANCE`; but
  where the last two steps are off both, something has changed, and theirs alone count.
- A step counts `DECAY` times as much as the one after it.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TypeVar

WINDOW_STEPS = 8
"""Steps whose measurements count."""
DECAY = 0.6
"""Weight of a step over that of the next one: the last two steps have 64 % of all."""
TOLERANCE = 0.2
"""Relative error up to which a measurement counts in full."""

Measured = TypeVar("Measured")
Anything = TypeVar("Anything")
Steps = Sequence[Sequence[tuple[Measured, float, float]]]
"""Of each step its measurements: anything, what was expected, and the ratio of what was measured to
it."""


def has_changed(steps: Steps[Measured]) -> bool:
    """True if most of either of the last two steps is off: one that is has stalled."""
    last = [each for each in reversed(steps) if each][:2]
    usual = [statistics.median_low(abs(ratio - 1) for *_, ratio in each) for each in last]
    return min(usual, default=0.0) > TOLERANCE


def damped(
    steps: Steps[Measured], *, tolerance: float = TOLERANCE
) -> list[tuple[float, Measured, float, float]]:
    """The measurements of some steps, each with its weight before it.

    Args:
        steps: the newest step last.
        tolerance: relative error up to which a measurement counts in full.
    """
    weighted = []
    decay = 1.0
    for measurements in reversed(steps):
        for measured, expected, ratio in measurements:
            off = abs(ratio - 1)
            share = 1.0 if off <= tolerance else (tolerance / off) * (tolerance / off)
            weighted.append((decay * share, measured, expected, ratio))
        decay *= DECAY
    return weighted


def last_two(steps: Sequence[Sequence[Anything]]) -> list[Sequence[Anything]]:
    """The last two steps with measurements; the others are left empty."""
    found = [number for number, each in enumerate(steps) if each][-2:]
    return [each if number in found else [] for number, each in enumerate(steps)]
