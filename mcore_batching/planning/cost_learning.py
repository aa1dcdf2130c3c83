"""A cost model learnt from the times of a job's own passes, the same on every rank.

Each rank sums up the passes that it timed over its last steps (`evidence`); the sums of all ranks,
added up, give the next model (`relearnt`):

    step t      rank 0: passes timed -> evidence ┐
                rank 1: passes timed -> evidence ┴ added up -> relearnt, on both: plan of step t + 1

The model is that of a mean pipeline stage, forward and backward pass together; by how much each
stage is slower than the mean is learnt beside it. Rows that several ranks share, which wait for
each other there, tell what communication costs: of those all ranks know the same times, each that
of the rank that waited least, so no sums of them travel.

- Robust, and follows drift: `mcore_batching.planning.damping`.
- What the rows of the window cannot tell apart, such as a row's fixed cost from its tokens' where
  all rows are full, stays what it was before; all the more, the noisier and the fewer they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from mcore_batching.planning.cost import CostModel, ordered_sum
from mcore_batching.planning.cost_fit import (
    SharedRow,
    Timing,
    anchored_solution,
    best_scale,
    communication_fitted,
    dot,
    is_usable,
)
from mcore_batching.planning.damping import damped, has_changed, last_two
from mcore_batching.planning.learnt_costs import LearntCosts
from mcore_batching.planning.transfers import TimedTransfer, learnt_transfers

ANCHOR = 0.002
"""Least weight of the model before over that of the window's passes."""
OFF_BEFORE = 0.2
"""Share of a row's time by which a cost of the model before is taken to be off, once it was learnt
anew some times; at first all of it. It weighs as a guess with this error does against the window's
passes with theirs."""
ANCHOR_OF_SHARED = 0.02
"""Weight of communication's cost before over that of the window's rows on several ranks: these are
fewer."""
_LEAST_SHARE = 1e-3
"""Of a row's time, the least that its tokens are taken to need: the unit must not vanish."""
_ROUNDS = 3
"""Fits of communication in turn with all else, in each step."""
_NUM_SHARED = 13


def evidence(
    steps: Sequence[Sequence[Timing]], learnt: LearntCosts, *, stage: int, num_stages: int
) -> list[float]:
    """One rank's part in the next model; parts of ranks are added up.

    Args:
        steps: timed rows of the rank's last steps that no other rank shares, the newest step last.
        learnt: the same on every rank.
        stage: pipeline rank.
        num_stages: of the pipeline.
    """
    rows = _weighted(steps, learnt, learnt.factor(stage))
    stages = [0.0] * (2 * num_stages)
    for weight, _, _, ratio in rows if learnt.seconds_per_unit is not None else ():
        stages[stage] += weight * ratio
        stages[num_stages + stage] += weight
    return _summed(rows, learnt.cost_model) + stages


_Weighted = list[tuple[float, Timing, float, float]]
"""Of each row its weight, itself, its predicted seconds on a mean stage, and the ratio of its
measured time to its prediction."""


def _weighted(steps: Sequence[Sequence[Timing]], learnt: LearntCosts, factor: float) -> _Weighted:
    """The usable rows of some steps, measured on a stage of this factor."""
    compared = [_compared(rows, learnt, factor) for rows in steps]
    return (
        damped(last_two(compared), tolerance=math.inf)
        if has_changed(compared)
        else damped(compared)
    )


def _compared(
    rows: Sequence[Timing], learnt: LearntCosts, factor: float
) -> list[tuple[Timing, float, float]]:
    """The usable rows of a step, each with its predicted seconds on a mean stage, and the ratio of
    the measured time to its prediction.

    Before anything was learnt nobody knows what is slow: the measured time stands for the
    prediction, relative to which a stalled pass weighs least.
    """
    compared = []
    for row in rows:
        units = learnt.units(row.lengths, row.context_parallel)
        if is_usable(row) and units > 0:
            measured, speed = row.forward_seconds + row.backward_seconds, learnt.seconds_per_unit
            predicted = measured if speed is None else speed * factor * units
            compared.append((row, predicted / factor, measured / predicted))
    return compared


def _summed(rows: _Weighted, model: CostModel) -> list[float]:
    """Sums over rows that tell of all but stages, communication being held at the model's."""
    sums = [0.0] * _NUM_SHARED
    features = _Features(model)
    for weight, timing, of_mean, ratio in rows:
        # Of a mean stage: the target, measured / factor, over the prediction of it is the ratio.
        x = [value / of_mean for value in features.of(timing)]
        both = timing.forward_seconds + timing.backward_seconds
        entries = (
            *(x[i] * x[j] for i in range(3) for j in range(i, 3)),
            *(value * ratio for value in x),
            timing.forward_seconds / both * ratio,
            timing.backward_seconds / both * ratio,
            1.0,
            ratio * ratio,
        )
        for number, entry in enumerate(entries):
            sums[number] += weight * entry
    return sums


def relearnt(
    learnt: LearntCosts,
    sums: Sequence[float],
    shared: Sequence[Sequence[Timing]] = (),
    transfers: Sequence[Sequence[TimedTransfer]] = (),
) -> LearntCosts:
    """The model after another step.

    Args:
        learnt: the model before, by which the evidence was summed up.
        sums: `evidence` of all ranks, added up.
        shared: rows of the last steps that several ranks share, the newest step last, as timed on
            a mean stage without waiting; the same on every rank.
        transfers: of the last steps between stages, likewise.

    Returns:
        a new one; the same if no pass was timed.
    """
    found = _passes_relearnt(learnt, sums, shared)
    if found is learnt or found.seconds_per_unit is None:
        return learnt
    links = (len(sums) - _NUM_SHARED) // 2 - 1
    known = learnt_transfers(
        found.transfers, transfers, links, found.cost_model, found.seconds_per_unit
    )
    return replace(found, transfers=known)


def _passes_relearnt(
    learnt: LearntCosts, sums: Sequence[float], shared: Sequence[Sequence[Timing]]
) -> LearntCosts:
    """With all but transfers learnt anew; the same if nothing was timed."""
    alone, stages = list(sums[:_NUM_SHARED]), sums[_NUM_SHARED:]
    rows = _weighted(shared, learnt, 1.0)
    if not any(alone):  # of rows that are shared nobody knows what they cost one rank
        return _faster(learnt, _summed(rows, learnt.cost_model))
    found = _fitted(learnt, alone)
    for _ in range(_ROUNDS if rows and found is not learnt else 0):
        model = communication_fitted(learnt.cost_model, _points(found, rows), ANCHOR_OF_SHARED)
        of_shared = _summed(rows, model)
        both = [a + b for a, b in zip(alone, of_shared, strict=True)]
        found = _fitted(replace(learnt, cost_model=model), both)
    if found is learnt:
        return learnt
    return replace(
        found, stage_factors=_stage_factors(learnt, stages), num_steps=learnt.num_steps + 1
    )


def _points(learnt: LearntCosts, rows: _Weighted) -> list[SharedRow]:
    """Rows on several ranks, for fitting what communication costs, all else being known."""
    model = learnt.cost_model
    assert learnt.seconds_per_unit is not None
    per_unit = learnt.seconds_per_unit * (1.0 + model.backward_ratio)
    points = []
    for weight, timing, of_mean, ratio in rows:
        size, expected = timing.context_parallel, of_mean / per_unit
        points.append(
            SharedRow(
                doublings=(size - 1).bit_length(),
                part=(model.micro_batch(timing.lengths) - model.per_micro_batch) / size,
                rest=ratio * expected - model.per_micro_batch,
                weight=weight / (expected * expected),
            )
        )
    return points


def _fitted(learnt: LearntCosts, sums: Sequence[float]) -> LearntCosts:
    """With what the sums of timed rows tell of all but stages and communication."""
    matrix, right, ratio = _equations(sums)
    if ratio is None:
        return learnt
    model = learnt.cost_model
    # Only the proportions of the model before are held on to: speed is known well at once.
    scale = best_scale(matrix, right, _costs(model))
    guess = [scale * cost for cost in _costs(model)]
    costs = anchored_solution(matrix, right, guess, ANCHOR)
    count, squares = sums[-2:]
    products = [dot(row, costs) for row in matrix]
    squared_error = (squares - 2.0 * dot(right, costs) + dot(products, costs)) / count
    off_before = max(OFF_BEFORE, 1.0 / (1 + learnt.num_steps))
    anchor = squared_error / (count * off_before * off_before)
    if anchor > ANCHOR:
        costs = anchored_solution(matrix, right, guess, min(anchor, 1.0))
    fixed, per_token, per_pair = costs
    mean_seconds, mean_tokens = right[0] / matrix[0][0], matrix[0][1] / matrix[0][0]
    if mean_tokens > 0:
        per_token = max(per_token, _LEAST_SHARE * mean_seconds / mean_tokens)
    if not 0 < per_token < math.inf:
        return learnt
    return replace(
        learnt,
        cost_model=replace(
            model,
            linear=1.0,
            quadratic=per_pair / per_token,
            per_micro_batch=fixed / per_token,
            backward_ratio=ratio,
        ),
        seconds_per_unit=per_token / (1.0 + ratio),
    )


def _faster(learnt: LearntCosts, sums: Sequence[float]) -> LearntCosts:
    """With what the sums tell of speed, all costs being to each other what they were."""
    matrix, right, ratio = _equations(sums)
    if ratio is None:
        return learnt
    scale = best_scale(matrix, right, _costs(learnt.cost_model))
    return replace(
        learnt,
        cost_model=replace(learnt.cost_model, backward_ratio=ratio),
        seconds_per_unit=scale / (1.0 + ratio),
        num_steps=learnt.num_steps + 1,
    )


def _equations(sums: Sequence[float]) -> tuple[list[list[float]], list[float], float | None]:
    """Of the costs of a micro-batch, a token and a pair; and backward over forward, if any."""
    a, b, c, d, e, f, *right, forward, backward, _, _ = sums
    usable = forward > 0 and backward > 0
    return [[a, b, c], [b, d, e], [c, e, f]], right, backward / forward if usable else None


def _costs(model: CostModel) -> list[float]:
    """Of a micro-batch, a token and a pair, the unknowns of the equations."""
    return [model.per_micro_batch, model.linear, model.quadratic]


def _stage_factors(learnt: LearntCosts, sums: Sequence[float]) -> tuple[float, ...]:
    """Of each stage, given the sums of its passes' ratios to the prediction, and of weights."""
    half = len(sums) // 2
    factors = [
        learnt.factor(stage) * (ratios / weights if weights > 0 else 1.0)
        for stage, (ratios, weights) in enumerate(zip(sums[:half], sums[half:], strict=True))
    ]
    mean = ordered_sum(factors) / half
    return tuple(factor / mean for factor in factors)


class _Features:
    """Numbers by which the cost of a row grows, communication being held at a model's."""

    def __init__(self, model: CostModel) -> None:
        self._tokens = replace(model, linear=1.0, quadratic=0.0, per_micro_batch=0.0)
        self._pairs = replace(model, linear=0.0, quadratic=1.0)

    def of(self, timing: Timing) -> tuple[float, float, float]:
        """A row's 1, tokens and pairs of tokens, on each of its ranks.

        What is fixed of communication is a number of tokens.
        """
        tokens, pairs = self._tokens, self._pairs
        if timing.context_parallel > 1:
            tokens, pairs = (each.on_ranks(timing.context_parallel) for each in (tokens, pairs))
        of_pairs = ordered_sum(pairs.sample(length) for length in timing.lengths)
        return 1.0, tokens.micro_batch(timing.lengths), of_pairs
