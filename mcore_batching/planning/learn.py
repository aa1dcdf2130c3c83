"""Costs of a micro-batch, of a token and of a pair of tokens, fitted to the times of a job's rows.

    rank 0: rows timed -> evidence ┐
    rank 1: rows timed -> evidence ┴ added up -> after(), on both: the costs of the next plan

One ridge regression without negative costs, of a mean pipeline stage's forward and backward pass
together. It is held to the costs before, at first those of the model's shape: costs that the rows
do not separate keep their proportion. Errors are relative, so a row that stalls for k times as long
pulls 1 / k as hard. All else of the cost model stays as it is. Only rows in which no rank waited
for another one may be given.

Bad: stages that differ by 20 % from their layers' shapes are learnt 8 % too fast.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from mcore_batching.planning.costs.cost import CostModel, ordered_sum

DECAY = 0.5
"""Weight of the steps before over that of the newest one. Nearer 1, costs that have grown are
learnt later (rows that took a third as long weigh nine times as much); nearer 0, noise moves plans
more."""
ANCHOR = 0.01
"""Weight of the costs before over that of the rows. Halved, noise moves plans more; doubled, wrong
costs are found out a step or two later."""
LEAST_TOKEN_SHARE = 1e-3
"""Least share of a row's time that its tokens are taken to need: a token is the unit of cost, and
must not come out as 0."""


class TimedRow(NamedTuple):
    """A row that ran on this rank alone, or that all its ranks began together."""

    lengths: tuple[int, ...]
    """Tokens of each sequence of the row."""
    seconds: float
    """Its forward and backward pass."""


@dataclass(frozen=True, kw_only=True)
class LearntCosts:
    """Costs fitted to the rows so far; the same on every rank."""

    shape: CostModel
    """By the model's shape: what differs between stages."""
    cost_model: CostModel
    """In units of one token's forward work outside attention."""
    seconds_per_unit: float | None = None
    """Seconds of one unit on a mean stage; None before the first fit."""
    sums: tuple[float, ...] = (0.0,) * (3 * 3 + 3)
    """Matrix and right side of the normal equations, of the rows so far. The unknowns are, in this
    order, seconds of a micro-batch, of a token and of a pair of tokens."""

    def evidence(self, rows: Iterable[TimedRow], stage: CostModel) -> list[float]:
        """This rank's part in the next costs, a dozen numbers: parts of ranks are added up.

        Args:
            rows: of the steps that were timed since.
            stage: the costs of this rank's pipeline stage by the model's shape.
        """
        sums = [0.0] * len(self.sums)
        # Cost on this stage for a unit of cost on the mean stage.
        ratios = [
            own / mean if mean else 1.0
            for own, mean in (
                (stage.per_micro_batch, self.shape.per_micro_batch),
                (stage.linear, self.shape.linear),
                (stage.quadratic, self.shape.quadratic),
            )
        ]
        pairs = replace(stage, linear=0.0, quadratic=1.0, per_micro_batch=0.0)
        for lengths, seconds in rows:
            # Below any clock's step, or over eleven days.
            if not (1e-12 <= seconds <= 1e6 and any(lengths)):
                continue
            features = 1.0, float(sum(lengths)), pairs.micro_batch(lengths)
            # The row's time is the sum of feature * cost; over the measured time it should be 1.
            x = [ratio * each / seconds for ratio, each in zip(ratios, features, strict=True)]
            terms = [a * b for a in x for b in x] + x
            sums = [total + term for total, term in zip(sums, terms, strict=True)]
        return sums

    def after(self, evidence: Sequence[float]) -> LearntCosts:
        """The costs after another step, from the `evidence` of all ranks, added up."""
        if not any(evidence):
            return self  # no rank timed a row: samples that are planned twice have one plan
        sums = [DECAY * old + new for old, new in zip(self.sums, evidence, strict=True)]
        matrix, right = [sums[0:3], sums[3:6], sums[6:9]], sums[9:]
        model = self.cost_model
        before = [model.per_micro_batch, model.linear, model.quadratic]
        # Only the proportions of the costs before are held on to: speed is known well at once.
        square = ordered_sum(x * dot(row, before) for x, row in zip(before, matrix, strict=True))
        scale = dot(right, before) / square if square > 0 else 1.0
        floor = [0.0, LEAST_TOKEN_SHARE * right[1] / matrix[1][1], 0.0]
        fixed, token, pair = ridge(matrix, right, [scale * each for each in before], floor, ANCHOR)
        return replace(
            self,
            cost_model=replace(
                model, linear=1.0, quadratic=pair / token, per_micro_batch=fixed / token
            ),
            seconds_per_unit=token / (1.0 + model.backward_ratio),
            sums=tuple(sums),
        )


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
    # In proportion to what the equations say of each unknown; one of which they say nothing has a
    # zero there, and with a weight of 1 becomes its guess.
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
        worst = max(below, key=lambda i: (floor[i] - x[i]) * (matrix[i][i] + held[i]) ** 0.5)
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
