"""A cost model learnt from the times of a job's own passes, the same on every rank.

Each rank sums up the passes that it timed over its last steps (`evidence`); the sums of all ranks,
added up, give the next model (`relearnt`):

    step t      rank 0: passes timed -> evidence ┐
                rank 1: passes timed -> evidence ┴ added up -> relearnt, on both: plan of step t + 1

The model is that of a mean pipeline stage, forward and backward pass together; by how much each
stage is slower than the mean is learnt beside it.

- Robust: a pass counts the less the further it is off, beyond `TOLERANCE`; but where the last two
  steps are off both, costs have changed, and their passes count.
- Follows drift: a step counts `DECAY` times as much as the one after it.
- What the rows of the window cannot tell apart, such as a row's fixed cost from its tokens' where
  all rows are full, stays what it was before.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from mcore_batching.planning.cost import CostModel, ordered_sum
from mcore_batching.planning.cost_fit import Timing, nonnegative_solution
from mcore_batching.planning.errors import ConfigError
from mcore_batching.planning.parallel_dims import ParallelDims
from mcore_batching.planning.pipeline import pipeline_time

WINDOW_STEPS = 8
"""Steps whose passes count."""
DECAY = 0.6
"""Weight of a step over that of the next one: the last two steps have 64 % of all."""
ANCHOR = 0.002
"""Weight of the model before over that of the window's passes."""
TOLERANCE = 0.2
"""Relative error up to which a pass counts in full."""
TOLD_FROM = 0.1
"""Share by which a step's measured time differs from its prediction where a log is to say so."""
_LEAST_SHARE = 1e-3
"""Of a row's time, the least that its tokens are taken to need: the unit must not vanish."""
_NUM_SHARED = 11


@dataclass(frozen=True, kw_only=True)
class LearntCosts:
    """Knowledge of what passes cost; the same on every rank.

    Raises:
        ConfigError: a time or a factor is not finite and positive.
    """

    cost_model: CostModel
    """Of a whole stage, in units of one token's forward work outside attention."""
    seconds_per_unit: float | None = None
    """Of a mean stage; None before anything was learnt."""
    stage_factors: tuple[float, ...] = ()
    """Time of each pipeline stage over that of the mean one [stages]; empty: all equal."""
    num_steps: int = field(default=0)
    """Times that the model was learnt anew."""

    def __post_init__(self) -> None:
        """Check that times and factors are positive."""
        seconds = () if self.seconds_per_unit is None else (self.seconds_per_unit,)
        for value in (*seconds, *self.stage_factors):
            if type(value) not in (int, float) or not 0 < value < math.inf:
                raise ConfigError(
                    f"learnt times and factors must be finite and positive, got {value!r}; start "
                    "without what was learnt"
                )

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> LearntCosts:
        """Learnt costs from the dict of `to_data`.

        Raises:
            ConfigError: something else.
        """
        try:
            return cls(
                cost_model=CostModel(**data["cost_model"]),
                seconds_per_unit=data["seconds_per_unit"],
                stage_factors=tuple(data["stage_factors"]),
                num_steps=int(data["num_steps"]),
            )
        except (TypeError, KeyError, ValueError) as error:
            raise ConfigError(
                f"expected learnt costs as state_dict gave them, got {data!r:.80} ({error})"
            ) from None

    def to_data(self) -> dict[str, Any]:
        """Itself as a dict of numbers, for JSON or a checkpoint."""
        return asdict(self) | {"stage_factors": list(self.stage_factors)}

    def factor(self, stage: int) -> float:
        """Time of a stage over that of the mean one."""
        return self.stage_factors[stage] if self.stage_factors else 1.0

    def units(self, lengths: Iterable[int]) -> float:
        """Cost of both passes of a row that holds samples of these lengths."""
        model = self.cost_model
        return model.micro_batch(lengths) * (1.0 + model.backward_ratio)

    def predicted_seconds(self, rows: Sequence[Sequence[int]], dims: ParallelDims) -> float | None:
        """Predicted time of one data-parallel rank's step; None before anything was learnt.

        The simulated stages are equal. A slow one holds up all rows but the first to arrive.

        Args:
            rows: lengths of the samples of each micro-batch, slot after slot.
            dims: gives stages and chunks.
        """
        if self.seconds_per_unit is None:
            return None
        model = self.cost_model
        costs = [model.micro_batch(lengths) for lengths in rows]
        units = pipeline_time(costs, dims, backward_ratio=model.backward_ratio)
        slower = max(self.stage_factors, default=1.0) - 1.0
        held_up = ordered_sum(costs) * (1.0 - 1.0 / len(costs)) * (1.0 + model.backward_ratio)
        return self.seconds_per_unit * (units + slower * held_up)

    def on_stages(self, num_stages: int) -> LearntCosts:
        """Itself for a pipeline of so many stages, equal ones if it was learnt on another."""
        same = len(self.stage_factors) == num_stages
        return self if same else replace(self, stage_factors=())


@dataclass(frozen=True, kw_only=True)
class StepReview:
    """A step as it was predicted and as it went, over all ranks."""

    predicted_seconds: float
    """Of all forward and backward passes, from the first to the end of the last."""
    measured_seconds: float
    """Likewise, on the slowest rank."""
    passes_over_predicted: float
    """Time of all ranks' passes over its prediction."""
    slowest_rank: int
    """The rank whose passes took the longest, against their prediction."""
    slowest_over_predicted: float
    """Time of its passes over their prediction."""

    @property
    def measured_over_predicted(self) -> float:
        """Time of the step over its prediction."""
        return self.measured_seconds / self.predicted_seconds

    @property
    def reason(self) -> str:
        """Why the step was off by more than `TOLD_FROM`; empty if it was not."""
        if abs(self.measured_over_predicted - 1) <= TOLD_FROM:
            return ""
        if self.slowest_over_predicted > (1 + TOLD_FROM) * max(self.passes_over_predicted, 1.0):
            return "a rank is slower than the others"
        if abs(self.passes_over_predicted - 1) > TOLD_FROM / 2:
            return "costs have changed, or are not learnt yet"
        return "time between passes: transfers between stages, or the host"

    def __str__(self) -> str:
        """One line for a log."""
        text = (
            f"a step took {self.measured_seconds:.3g} s, {self.measured_over_predicted:.2f} times "
            f"the predicted {self.predicted_seconds:.3g} s; its passes took "
            f"{self.passes_over_predicted:.2f} times what was predicted, on rank "
            f"{self.slowest_rank}, the slowest, {self.slowest_over_predicted:.2f} times"
        )
        return f"{text}: {self.reason}" if self.reason else text


def is_usable(timing: Timing) -> bool:
    """True if both times of a row are finite and positive."""
    return 0 < timing.forward_seconds < math.inf and 0 < timing.backward_seconds < math.inf


def evidence(
    steps: Sequence[Sequence[Timing]], learnt: LearntCosts, *, stage: int, num_stages: int
) -> list[float]:
    """One rank's part in the next model; parts of ranks are added up.

    Args:
        steps: timed rows of the rank's last steps, the newest step last.
        learnt: the same on every rank.
        stage: pipeline rank.
        num_stages: of the pipeline.
    """
    sums = [0.0] * (_NUM_SHARED + 2 * num_stages)
    newest_first = [
        (DECAY**age, compared)
        for age, rows in enumerate(reversed(steps))
        if (compared := _compared(rows, learnt, stage))
    ]
    tolerance = TOLERANCE
    usual = [statistics.median_low(abs(r - 1) for *_, r in each) for _, each in newest_first[:2]]
    if usual and min(usual) > TOLERANCE:
        # One step that is off has stalled. Two in a row are a change: those before tell of others.
        newest_first, tolerance = newest_first[:2], math.inf
    for decay, (timing, seconds, ratio) in (
        (decay, row) for decay, rows_of_step in newest_first for row in rows_of_step
    ):
        off = abs(ratio - 1)
        weight = decay if off <= tolerance else decay * (tolerance / off) ** 2
        # Of a mean stage: the target, measured / factor, over the prediction of it is the ratio.
        of_mean = seconds / learnt.factor(stage)
        x = [value / of_mean for value in _features(timing.lengths, learnt.cost_model)]
        entries = (
            *(x[i] * x[j] for i in range(3) for j in range(i, 3)),
            *(value * ratio for value in x),
            timing.forward_seconds / seconds,
            timing.backward_seconds / seconds,
        )
        for number, entry in enumerate(entries):
            sums[number] += weight * entry
        if learnt.seconds_per_unit is not None:
            sums[_NUM_SHARED + stage] += weight * ratio
            sums[_NUM_SHARED + num_stages + stage] += weight
    return sums


def _compared(
    rows: Sequence[Timing], learnt: LearntCosts, stage: int
) -> list[tuple[Timing, float, float]]:
    """The usable rows of a step, each with its predicted seconds and the ratio of measured to it.

    Before anything was learnt nobody knows what is slow: the measured time stands for the
    prediction, relative to which a stalled pass weighs least.
    """
    compared = []
    for row in rows:
        units = learnt.units(row.lengths)
        if is_usable(row) and units > 0:
            measured, speed = row.forward_seconds + row.backward_seconds, learnt.seconds_per_unit
            predicted = measured if speed is None else speed * learnt.factor(stage) * units
            compared.append((row, predicted, measured / predicted))
    return compared


def relearnt(learnt: LearntCosts, sums: Sequence[float]) -> LearntCosts:
    """The model after another step.

    Args:
        learnt: the model before, by which the evidence was summed up.
        sums: `evidence` of all ranks, added up.

    Returns:
        a new one; the same if nothing was timed.
    """
    shared, stages = sums[:_NUM_SHARED], sums[_NUM_SHARED:]
    a, b, c, d, e, f, *right, forward, backward = shared
    if not (forward > 0 and backward > 0):
        return learnt
    matrix = [[a, b, c], [b, d, e], [c, e, f]]
    model = learnt.cost_model
    before = [model.per_micro_batch, model.linear, model.quadratic]
    # Only the proportions of the model before are held on to: speed is known well at once.
    products = [ordered_sum(m * x for m, x in zip(row, before, strict=True)) for row in matrix]
    scale = ordered_sum(r * x for r, x in zip(right, before, strict=True)) / ordered_sum(
        p * x for p, x in zip(products, before, strict=True)
    )
    for i in range(3):
        anchor = ANCHOR * matrix[i][i] or 1.0  # a feature that no row has stays what it was
        matrix[i][i] += anchor
        right[i] += anchor * scale * before[i]
    fixed, per_token, per_pair = nonnegative_solution(matrix, right)
    mean_seconds, mean_tokens = right[0] / matrix[0][0], matrix[0][1] / matrix[0][0]
    if mean_tokens > 0:
        per_token = max(per_token, _LEAST_SHARE * mean_seconds / mean_tokens)
    if not 0 < per_token < math.inf:
        return learnt
    ratio = backward / forward
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
        stage_factors=_stage_factors(learnt, stages),
        num_steps=learnt.num_steps + 1,
    )


def _stage_factors(learnt: LearntCosts, sums: Sequence[float]) -> tuple[float, ...]:
    """Of each stage, given the sums of its passes' ratios to the prediction, and of weights."""
    half = len(sums) // 2
    factors = [
        learnt.factor(stage) * (ratios / weights if weights > 0 else 1.0)
        for stage, (ratios, weights) in enumerate(zip(sums[:half], sums[half:], strict=True))
    ]
    mean = ordered_sum(factors) / half
    return tuple(factor / mean for factor in factors)


def _features(lengths: Sequence[int], model: CostModel) -> tuple[float, float, float]:
    """A row's 1, tokens and pairs of tokens, by which its cost grows."""
    pairs = replace(model, linear=0.0, quadratic=1.0)
    return 1.0, float(sum(lengths)), ordered_sum(pairs.sample(length) for length in lengths)
