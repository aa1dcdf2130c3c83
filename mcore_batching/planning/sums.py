"""Floating-point sums that are the same under every Python version.

Guarantees: terms are added one by one in the given order. The built-in `sum` compensates rounding
from Python 3.12 on and does not before, so that two ranks could differ in the last bit.
"""

from __future__ import annotations

from collections.abc import Iterable


def ordered_sum(values: Iterable[float]) -> float:
    """The sum of `values`, added from first to last."""
    total = 0.0
    for value in values:
        total += value
    return total
