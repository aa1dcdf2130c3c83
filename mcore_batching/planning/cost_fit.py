"""Least squares for costs that are learnt: no coefficient negative, held to what was known."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from mcore_batching.planning.cost import CostModel, ordered_sum

_REFINEMENTS, _SHARES = 18, 8
"""Of the search for the share of a doubling: rounds, and shares tried to either side in each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """The measured times of one row."""

    lengths: tuple[int, ...]
    """Tokens of each sequence of the row."""
    forward_seconds: float
    """One forward pass."""
    backward_seconds: float
    """The backward pass after it."""
    context_parallel: int = 1
    """Ranks that the row is cut over."""


LEAST_SECONDS, MOST_SECONDS = 1e-12, 1e6
"""Of a pass that a clock can have told: less than its steps, eleven days. Sums of squares of times
between them are numbers."""


def is_usable(timing: Timing) -> bool:
    """True if both times of a row may have been measured."""
    both = timing.forward_seconds, timing.backward_seconds
    return all(LEAST_SECONDS <= seconds <= MOST_SECONDS for seconds in both)


class SharedRow(NamedTuple):
    """The measured cost of a row on several ranks, on each of them."""

    doublings: int
    """From one rank to its own number."""
    part: float
    """Cost of its samples over its ranks, if communication were free."""
    rest: float
    """Its cost, but for that of a micro-batch."""
    weight: float
    """Of a squared error in its cost."""


def communication_fitted(
    model: CostModel, rows: Sequence[SharedRow], anchor: float = 0.0
) -> CostModel:
    """A model with the share and the fixed cost of a doubling that fit rows on several ranks best.

    The same numbers on every platform, as all costs.

    Args:
        model: the rest of the model.
        rows: one or more, with a weight.
        anchor: weight of the model's own share and fixed cost over that of all rows.
    """
    slopes = [r.doublings * r.part for r in rows]
    of_share = anchor * ordered_sum(r.weight * s * s for r, s in zip(rows, slopes, strict=True))
    of_fixed = ordered_sum(r.weight * r.doublings * r.doublings for r in rows)
    known_share, known_fixed = model.context_parallel_overhead, model.context_parallel_fixed
    # Every share is tried on sums: rows are a hundred or more, their sizes a handful.
    sums = {
        size: [
            ordered_sum(each)
            for each in zip(*(_moments(r) for r in rows if r.doublings == size), strict=True)
        ]
        for size in sorted({r.doublings for r in rows})
    }

    def fitted(share: float) -> tuple[float, float]:
        """Sum of squared errors, and the fixed cost of a doubling with which it is so."""
        left = [(n, _grown(1.0, share, n), *of_size) for n, of_size in sums.items()]
        above = ordered_sum(n * (rest - grown * part) for n, grown, _, rest, part, *_ in left)
        fixed = max(0.0, (above + anchor * known_fixed * of_fixed) / (of_fixed * (1.0 + anchor)))
        total = ordered_sum(
            rests
            - grown * (2.0 * mixed - grown * parts)
            # Of each error its fixed part, n * fixed, is still to be taken off.
            - n * fixed * (2.0 * (rest - grown * part) - n * fixed * weight)
            for n, grown, weight, rest, part, rests, mixed, parts in left
        )
        off_share, off_fixed = share - known_share, fixed - known_fixed
        total += of_share * off_share * off_share + anchor * of_fixed * off_fixed * off_fixed
        return total, fixed

    # Of shares that leave something to communicate, ever finer ones about the best: beyond the
    # most, (1 + share) ** doublings >= 1 + doublings * share is more than a row's whole cost.
    most = max([(r.rest / r.part - 1.0) / r.doublings for r in rows if r.part > 0] + [0.0])
    best = known_share if anchor else 0.0
    step = max(most, best) / _SHARES
    for _ in range(_REFINEMENTS if step > 0 else 0):
        shares = [max(0.0, best + step * number) for number in range(-_SHARES, _SHARES + 1)]
        best = min([best, *shares], key=lambda share: fitted(share)[0])
        step /= _SHARES / 2
    return replace(model, context_parallel_overhead=best, context_parallel_fixed=fitted(best)[1])


def _moments(row: SharedRow) -> tuple[float, ...]:
    """Terms that a row adds to the sums from which the squared errors of its size follow."""
    weight, rest, part = row.weight, row.rest, row.part
    squares = (rest * rest, rest * part, part * part)
    return weight, weight * rest, weight * part, *(weight * each for each in squares)


def _grown(part: float, share: float, doublings: int) -> float:
    for _ in range(doublings):
        part *= 1.0 + share
    return part


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


def anchored_solution(
    matrix: Sequence[Sequence[float]],
    right: Sequence[float],
    guess: Sequence[float],
    anchor: float,
) -> list[float]:
    """`nonnegative_solution`, held to a guess of it.

    Args:
        matrix: likewise.
        right: likewise.
        guess: [unknowns]; an unknown of which the equations tell nothing becomes it.
        anchor: weight of the guess over that of the equations.
    """
    both, targets = [list(row) for row in matrix], list(right)
    for i, value in enumerate(guess):
        weight = anchor * matrix[i][i] or 1.0
        both[i][i] += weight
        targets[i] += weight * value
    return nonnegative_solution(both, targets)


def best_scale(
    matrix: Sequence[Sequence[float]], right: Sequence[float], guess: Sequence[float]
) -> float:
    """The factor times which a guess suits normal equations best; 1 where they tell nothing."""
    square = dot([dot(row, guess) for row in matrix], guess)
    return dot(right, guess) / square if square > 0 else 1.0


def dot(left: Sequence[float], right: Sequence[float]) -> float:
    """The sum of products, the same on every platform."""
    return ordered_sum(a * b for a, b in zip(left, right, strict=True))


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
