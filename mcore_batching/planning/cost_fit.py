"""Fit a cost model to measured times.

The model of a forward pass over a row of sequences is `fixed + a·tokens + b·Σ length²` seconds with
no coefficient negative. Least squares of *relative* errors make a short row count as much as a long
one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from mcore_batching.planning.cost import CostModel, ordered_sum
from mcore_batching.planning.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """The measured times of one row."""

    lengths: tuple[int, ...]
    """Tokens of each sequence of the row."""
    forward_seconds: float
    """One forward pass."""
    backward_seconds: float
    """The backward pass after it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CostFit:
    """A cost model and how well it fits."""

    cost_model: CostModel
    """In units of one token's forward work outside attention."""
    seconds_per_unit: float
    """Seconds of one such unit."""
    mean_relative_error: float
    """Of the predicted forward times, mean over rows."""
    max_relative_error: float
    """Of the predicted forward time of the worst row."""


def fit_cost_model(timings: Sequence[Timing]) -> CostFit:
    """Fit a cost model to measured rows.

    Args:
        timings: three or more rows that differ in tokens and in the lengths of their sequences.

    Raises:
        ConfigError: fewer than three rows, a time that is not positive, or times that do not grow
            with tokens.
    """
    if len(timings) < 3:
        raise ConfigError(f"a fit needs timings of 3 rows or more, got {len(timings)}")
    for timing in timings:
        if not (timing.forward_seconds > 0 and timing.backward_seconds > 0):
            raise ConfigError(
                f"forward_seconds and backward_seconds must be positive, got {timing}; time more "
                "repeats, or longer rows"
            )
    features = [
        (1.0, float(sum(t.lengths)), float(sum(length * length for length in t.lengths)))
        for t in timings
    ]
    measured = [timing.forward_seconds for timing in timings]
    fixed, per_token, per_pair = _least_squares(features, measured)
    if per_token <= 0:
        raise ConfigError(
            "the measured times do not grow with tokens: time rows of more different sizes"
        )
    predicted = [
        fixed * one + per_token * tokens + per_pair * pairs for one, tokens, pairs in features
    ]
    errors = [abs(p - m) / m for p, m in zip(predicted, measured, strict=True)]
    ratios = sorted(timing.backward_seconds / timing.forward_seconds for timing in timings)
    return CostFit(
        cost_model=CostModel(
            linear=1.0,
            quadratic=per_pair / per_token,
            per_micro_batch=fixed / per_token,
            backward_ratio=ratios[len(ratios) // 2],
        ),
        seconds_per_unit=per_token,
        mean_relative_error=ordered_sum(errors) / len(errors),
        max_relative_error=max(errors),
    )


def _least_squares(
    features: Sequence[tuple[float, float, float]], measured: Sequence[float]
) -> tuple[float, float, float]:
    """Coefficients of 0 or more with the least sum of squared relative errors.

    With only three of them, every choice of those that are 0 can be tried.
    """
    # To columns of about one size: Σ length² is up to 1e9 times the constant feature.
    scales = [max(row[i] for row in features) or 1.0 for i in range(3)]
    rows = [
        [row[i] / scales[i] / m for i in range(3)]
        for row, m in zip(features, measured, strict=True)
    ]
    best = (math.inf, (0.0, 0.0, 0.0))
    for size in (3, 2, 1):
        for chosen in itertools.combinations(range(3), size):
            solution = _solve(rows, chosen)
            if solution is None or min(solution) < 0:
                continue
            full = [0.0, 0.0, 0.0]
            for i, value in zip(chosen, solution, strict=True):
                full[i] = value
            error = ordered_sum(
                (ordered_sum(a * b for a, b in zip(row, full, strict=True)) - 1.0) ** 2
                for row in rows
            )
            if error < best[0]:
                best = (error, (full[0], full[1], full[2]))
    a, b, c = best[1]
    return a / scales[0], b / scales[1], c / scales[2]


def _solve(rows: Sequence[Sequence[float]], chosen: Sequence[int]) -> list[float] | None:
    """Least squares of `rows @ x = 1` in some columns; None where they are singular."""
    matrix = [
        [ordered_sum(row[i] * row[j] for row in rows) for j in chosen]
        + [ordered_sum(row[i] for row in rows)]
        for i in chosen
    ]
    size = len(chosen)
    for column in range(size):
        pivot = max(range(column, size), key=lambda r: abs(matrix[r][column]))
        if abs(matrix[pivot][column]) < 1e-12 * len(rows):
            return None
        matrix[column], matrix[pivot] = matrix[pivot], matrix[column]
        for row in range(size):
            if row != column:
                factor = matrix[row][column] / matrix[column][column]
                matrix[row] = [
                    a - factor * b for a, b in zip(matrix[row], matrix[column], strict=True)
                ]
    return [matrix[i][size] / matrix[i][i] for i in range(size)]
