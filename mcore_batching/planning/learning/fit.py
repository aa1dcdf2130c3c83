"""The costs of passes that a job's own times tell of; the same on every rank.

    step t      rank 0: passes timed -> evidence ┐
                rank 1: passes timed -> evidence ┴ added up -> relearnt, on both: plan of step t + 1

The fit is one ridge regression without negative coefficients, of a mean pipeline stage's forward
and backward pass together: cost of a micro-batch, of a token, of a pair of tokens, and, where ranks
share rows, the two costs of communication. It is held to the model before, so what the rows cannot
tell apart stays as it was. What a stage has of a mean one's layers is known beforehand
(`layer_costs`), and not learnt.

Bad: where stages differ by 20 % from what is known of them, times are learnt 8 % low.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from mcore_batching.planning.costs.cost import CostModel, ordered_sum
from mcore_batching.planning.learning.learnt_costs import (
    LEAST_LEARNT,
    MOST_LEARNT,
    LearntCosts,
    Timing,
)

WINDOW_STEPS = 8
"""Steps whose passes count. The oldest weighs 3 %, so twice as many would change nothing; of half
as many it would weigh 20 %."""
DECAY = 0.6
"""Weight of a step over that of the next one. Nearer 1, changed costs are learnt later; nearer 0,
one stalled step outweighs the others. At 0.6 the last step has less than half of the weight of
three steps or more, the last two have more than half of eight."""
TOLERANCE = 0.2
"""Share by which a row may be off the usual time and count in full; twice as far off it counts a
quarter. Halved, noise of 10 % is down-weighted; doubled, rows of a slow phase count in full."""
ANCHOR = 0.01
"""Weight of the model before over that of the window's passes. Halved, noise moves plans more;
doubled, a wrong first guess is found out a step or two later."""
ERROR_OF_MODEL_BEFORE = 0.2
"""Share of a row's time by which the model before is taken to be off. Passes with more noise than
this tell less than the model before, which then weighs more than `ANCHOR`."""
_LEAST_TOKEN_SHARE = 1e-3
"""Least share of a row's time that its tokens are taken to need: a token is the unit of cost, and
must not come out as 0."""
_MOST_OVERHEAD = 3.0
"""Limit of `context_parallel_overhead`: beyond it a row on twice the ranks takes twice as long. The
fit is linear about the present value, so a stalled row could raise it without end."""


def slowness(steps: Sequence[Sequence[Timing]], learnt: LearntCosts) -> float:
    """Time of a rank's passes over that of a mean stage's; 1 where nothing is known."""
    if learnt.seconds_per_unit is None:
        return 1.0
    return _usual(_compared(steps, learnt))


_Compared = list[tuple[int, Timing, float]]
"""Of usable rows the age in steps, the row, and its time over the predicted one."""


def _compared(steps: Sequence[Sequence[Timing]], learnt: LearntCosts) -> _Compared:
    speed = learnt.seconds_per_unit or 1.0  # before anything was learnt ratios compare rows alone
    return [
        (age, row, row.seconds / (speed * units))
        for age, rows in enumerate(reversed(steps))
        for row in rows
        if row.is_usable and (units := learnt.units(row.lengths, row.context_parallel)) > 0
    ]


def _usual(compared: _Compared) -> float:
    """The usual ratio of measured to predicted time in the last three steps."""
    # Of three steps one stalled one is outvoted; two in a row are taken for a change. Two fifths of
    # the rows are below it, not half: single rows may stall beside a whole stalled step.
    ratios = sorted(ratio for age, _, ratio in compared if age < 3)
    return ratios[2 * len(ratios) // 5] if ratios else 1.0


_NUM_COSTS = 5
"""Unknowns of the fit, in this order: seconds of a micro-batch, of a token and of a pair of tokens;
the change of `context_parallel_overhead`; seconds of a doubling of ranks."""


def evidence(
    steps: Sequence[Sequence[Timing]],
    learnt: LearntCosts,
    usual: float | None = None,
    stage: CostModel | None = None,
) -> list[float]:
    """One rank's part in the next model; parts of ranks are added up.

    Args:
        steps: timed rows of the rank's last steps that no other rank shares, the newest step last.
        learnt: the same on every rank.
        usual: time of a usual row over the predicted one; None: the rank's `slowness`.
        stage: costs of the rank's stage, by the same model; None: the mean stage's.

    Returns:
        matrix and right side of the normal equations; sums of forward's and of backward's share of
        each row's time, and of weights.
    """
    costs = range(_NUM_COSTS)
    sums = [0.0] * (_NUM_COSTS * (_NUM_COSTS + 1) + 3)
    mean, stage = learnt.cost_model, stage or learnt.cost_model
    learnt = replace(learnt, cost_model=stage)
    pairs = (
        (stage.per_micro_batch, mean.per_micro_batch),
        (stage.linear, mean.linear),
        (stage.quadratic, mean.quadratic),
    )
    # Of the stage's cost what a unit of the mean stage's makes.
    ratios = [own / of_mean if of_mean else 1.0 for own, of_mean in pairs] + [1.0, 1.0]
    compared = _compared(steps, learnt)
    # Off this rank's own usual time, not the model's: a slow rank's rows all count in full.
    usual = _usual(compared) if usual is None else usual
    is_known = learnt.seconds_per_unit is not None
    for age, row, ratio in compared:
        off = abs(ratio / usual - 1.0)
        # The one rule that keeps noise and stalls out: a row counts less, the further it is off.
        weight = DECAY**age
        if is_known and off > TOLERANCE:
            weight *= (TOLERANCE / off) ** 2
        # The row's time is the sum of feature * cost; over the measured time it should be 1. Errors
        # are relative, so a row that stalls for k times as long pulls only 1 / k as hard.
        features = zip(ratios, _features(row, learnt), strict=True)
        x = [share * value / row.seconds for share, value in features]
        terms = [x[i] * x[j] for i in costs for j in costs] + x
        terms += [row.forward_seconds / row.seconds, row.backward_seconds / row.seconds, 1.0]
        for number, term in enumerate(terms):
            sums[number] += weight * term
    return sums


def _features(row: Timing, learnt: LearntCosts) -> list[float]:
    """Numbers that, times the unknown costs, are a row's time on each of its ranks [_NUM_COSTS]."""
    model, size = learnt.cost_model, row.context_parallel
    tokens = float(sum(row.lengths))
    pairs = ordered_sum(
        replace(model, linear=0.0, quadratic=1.0).sample(length) for length in row.lengths
    )
    if size == 1:
        return [1.0, tokens, pairs, 0.0, 0.0]
    # Overhead o multiplies work by (1 + o)^doublings. Made linear about the present o: `grown` is
    # the factor of work there, `steep` its derivative, and the unknown is the change of o.
    doublings = (size - 1).bit_length()
    steep = doublings / size
    for _ in range(doublings - 1):
        steep *= 1.0 + model.context_parallel_overhead
    grown = steep / doublings * (1.0 + model.context_parallel_overhead)
    seconds = (learnt.seconds_per_unit or 1.0) * (1.0 + model.backward_ratio)
    work = seconds * (model.linear * tokens + model.quadratic * pairs)
    return [1.0, tokens * grown, pairs * grown, work * steep, float(doublings)]


def relearnt(
    learnt: LearntCosts, sums: Sequence[float], shared: Sequence[Sequence[Timing]] = ()
) -> LearntCosts:
    """The model after another step, from the `evidence` of all ranks, added up; `learnt` itself if
    no pass was timed. `shared` are rows of the last steps that several ranks share, the newest step
    last, as timed on a mean stage without waiting."""
    # The few rows that ranks share are compared with what other rows have told of speed, if any do.
    if learnt.seconds_per_unit is not None or not any(sums):
        both = zip(sums, evidence(shared, learnt, usual=1.0), strict=True)
        sums = [own + together for own, together in both]
    *sums, forward, backward, count = sums
    if not (forward > 0 and backward > 0):
        return learnt  # no rank timed a pass
    n, model, ratio = _NUM_COSTS, learnt.cost_model, backward / forward
    matrix, right = [list(sums[n * i : n * i + n]) for i in range(n)], list(sums[n * n :])
    before = [model.per_micro_batch, model.linear, model.quadratic]
    before += [0.0, model.context_parallel_fixed]
    # Only the proportions of the model before are held on to: speed is known well at once.
    square = ordered_sum(before[i] * dot(matrix[i], before) for i in range(n))
    scale = dot(right, before) / square if square > 0 else 1.0
    floor = [0.0] * n
    floor[1] = _LEAST_TOKEN_SHARE * right[1] / matrix[1][1] if right[1] > 0 else 0.0
    floor[3] = -model.context_parallel_overhead
    guess = [scale * each for each in before]
    costs = ridge(matrix, right, guess, floor, ANCHOR)
    # The fit's squared error over all rows, each of weight 1 at most: |x @ A - 1|².
    error = count + ordered_sum(
        x * (dot(row, costs) - 2.0 * y) for x, row, y in zip(costs, matrix, right, strict=True)
    )
    # The mean row's noise over its number and over what the model before is taken to be off: where
    # that is more than the usual anchor, fit again and hold on to the model before by it.
    anchor = error / (count * count * ERROR_OF_MODEL_BEFORE * ERROR_OF_MODEL_BEFORE)
    if anchor > ANCHOR:
        costs = ridge(matrix, right, guess, floor, min(anchor, 1.0))
    fixed, token, pair, change, doubling = costs
    if not 0 < token < math.inf:
        return learnt
    overhead = min(model.context_parallel_overhead + change, _MOST_OVERHEAD)
    return LearntCosts(
        cost_model=replace(
            model,
            linear=1.0,  # costs are in units of a token's
            quadratic=_bounded(pair / token),
            per_micro_batch=_bounded(fixed / token),
            backward_ratio=_bounded(ratio),
            context_parallel_overhead=_bounded(overhead),
            # Without a shared row the fit tells nothing of it, and a guess in seconds would scale.
            context_parallel_fixed=_bounded(doubling / token if matrix[4][4] else before[4]),
        ),
        seconds_per_unit=_bounded(token / (1.0 + ratio)) or LEAST_LEARNT,
    )


def _bounded(learnt: float) -> float:
    """A learnt number as `from_data` reads it back: wild times may leave next to nothing of a cost
    that is held to the one before."""
    return min(learnt, MOST_LEARNT) if learnt >= LEAST_LEARNT else 0.0


def ridge(
    matrix: Sequence[Sequence[float]],
    right: Sequence[float],
    guess: Sequence[float],
    floor: Sequence[float],
    anchor: float,
) -> list[float]:
    """The x of at least `floor` with the least `x @ matrix @ x - 2 * right @ x`, held to `guess`
    with the weight `anchor` over that of these normal equations [n][n], [n]."""
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
