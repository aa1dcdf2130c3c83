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
) -> list[float]:
    """Coefficients of 0 or more with the least sum of squared relative errors."""
    rows = [[value / m for value in row] for row, m in zip(features, measured, strict=True)]
    size = range(3)
    matrix = [[ordered_sum(row[i] * row[j] for row in rows) for j in size] for i in size]
    return nonnegative_solution(matrix, [ordered_sum(row[i] for row in rows) for i in size])


def nonnegative_solution(matrix: Sequence[Sequence[float]], right: Sequence[float]) -> list[float]:
    """The x of 0 or more with the least `x @ matrix @ x - 2 * right @ x`: normal equations.

    With only a few unknowns, every choice of those that are 0 can be tried.

    Args:
        matrix: symmetric, no diagonal entry negative [unknowns][unknowns].
        right: [unknowns].
    """
    # To unknowns of about one size: Σ length² is up to 1e9 times the constant feature.
    unknowns = range(len(right))
    scales = [math.sqrt(matrix[i][i]) or 1.0 for i in unknowns]
    scaled = [[matrix[i][j] / scales[i] / scales[j] for j in unknowns] for i in unknowns]
    wanted = [right[i] / scales[i] for i in unknowns]
    best, found = 0.0, [0.0 for _ in unknowns]
    for size in range(1, len(right) + 1):
        for chosen in itertools.combinations(unknowns, size):
            solution = _solve(scaled, wanted, chosen)
            if solution is None or min(solution) < 0:
                continue
            # Where the gradient is 0, the value is -right @ x.
            value = -ordered_sum(wanted[i] * each for i, each in zip(chosen, solution, strict=True))
            # One unknown more has to be worth more than what rounding gives.
            if value < best * (1 + 1e-14):
                best, found = value, [0.0 for _ in unknowns]
                for i, each in zip(chosen, solution, strict=True):
                    found[i] = each / scales[i]
    return found


def _solve(
    matrix: Sequence[Sequence[float]], right: Sequence[float], chosen: Sequence[int]
) -> list[float] | None:
    """Solution of the equations of some unknowns alone; None where they are singular."""
    rows = [[*(matrix[i][j] for j in chosen), right[i]] for i in chosen]
    size = len(chosen)
    for column in range(size):
        pivot = max(range(column, size), key=lambda r: abs(rows[r][column]))
        if abs(rows[pivot][column]) < 1e-12:
            return None
        rows[column], rows[pivot] = rows[pivot], rows[column]
        for row in range(size):
            if row != column:
                factor = rows[row][column] / rows[column][column]
                rows[row] = [a - factor * b for a, b in zip(rows[row], rows[column], strict=True)]
    return [rows[i][size] / rows[i][i] for i in range(size)]
