"""Ridge regression of few unknowns, held to a guess and kept above a floor.

Only IEEE operations in a fixed order: every rank solves it for itself and must get the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from mcore_batching.planning.costs.cost import ordered_sum


def ridge(
    matrix: Sequence[Sequence[float]],
    right: Sequence[float],
    guess: Sequence[float],
    floor: Sequence[float],
    anchor: float,
) -> list[float]:
    """The x of at least `floor` with the least `x @ matrix @ x - 2 * right @ x`, held to a guess.

    Args:
        matrix: of the normal equations [n][n].
        right: right side of the normal equations [n].
        guess: what x is held to [n].
        floor: least value of each unknown [n].
        anchor: weight of the guess over that of the equations.
    """
    n = range(len(right))
    # In proportion to what the equations tell of each unknown; one of which they tell nothing has
    # a zero there, and with a weight of 1 becomes its guess.
    held = [anchor * matrix[i][i] or 1.0 for i in n]
    rows = [[matrix[i][j] + held[i] * (i == j) for j in n] for i in n]
    for i in n:
        rows[i].append(right[i] + held[i] * guess[i])
    while True:
        x = _solved(rows)
        below = [i for i in n if x[i] < floor[i]]
        if not below:
            return x
        # One at a time, the furthest below in the equations' own measure: with it at its floor the
        # others may come out above theirs.
        worst = max(below, key=lambda i: (floor[i] - x[i]) * math.sqrt(matrix[i][i] + held[i]))
        rows[worst] = [float(worst == j) for j in n] + [floor[worst]]


def _solved(rows: Sequence[Sequence[float]]) -> list[float]:
    """Solution of equations [n][n + 1]; a positive definite matrix needs no exchange of rows."""
    left = [list(row) for row in rows]
    for i, pivot in enumerate(left):
        for j, row in enumerate(left):
            if j != i and row[i] != 0.0:
                factor = row[i] / pivot[i]
                left[j] = [a - factor * b for a, b in zip(row, pivot, strict=True)]
    return [row[-1] / row[i] for i, row in enumerate(left)]


def dot(left: Sequence[float], right: Sequence[float]) -> float:
    """Inner product, added up in order."""
    return ordered_sum(a * b for a, b in zip(left, right, strict=True))
