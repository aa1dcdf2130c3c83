"""Figures: numbers that travel with an agreement, each by its name and with how ranks join it.

{"longest": largest(40), "samples": total(8), "seconds": least([0.2, 3.0])}     on rank 0
{"longest": largest(72), "samples": total(5), "seconds": least([0.4, 1.0])}     on rank 1
{"longest": 72, "samples": 13, "seconds": [0.2, 1.0]}                           joined
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Value = float | Sequence[float]


@dataclass(frozen=True)
class Figure:
    """One rank's part of a figure: its kind ("largest", "least", "total" or "rank total"), and
    values, as many on every rank; those of "least" are negated and joined as "largest"."""

    kind: str
    values: list[Any]
    is_list: bool

    @property
    def shape(self) -> str:
        """Kind and count, which must be the same on all ranks."""
        return f"{self.kind} of {len(self.values)}" if self.is_list else self.kind

    @property
    def has_maxima(self) -> bool:
        """True if ranks join it by maxima, False if by sums."""
        return self.kind in ("largest", "least")

    def read(self, joined: list[Any]) -> Any:
        """The figure's value, from the joined values of all ranks."""
        values = [-each for each in joined] if self.kind == "least" else joined
        return values if self.is_list else values[0]


def largest(value: Value) -> Figure:
    """For each number, the largest of all ranks."""
    return _figure("largest", value)


def least(value: Value) -> Figure:
    """For each number, the least of all ranks."""
    return _figure("least", value)


def total(value: Value) -> Figure:
    """For each number, the sum over replicas; the ranks of a replica give the same number."""
    return _figure("total", value)


def rank_total(value: Value) -> Figure:
    """For each number, the sum over all ranks."""
    return _figure("rank total", value)


def _figure(kind: str, value: Value) -> Figure:
    values = list(value) if isinstance(value, Sequence) else [value]
    # Negated, so that messages need maxima and sums alone.
    sent = [-each for each in values] if kind == "least" else values
    return Figure(kind, sent, is_list=isinstance(value, Sequence))
