"""Costs of passes, learnt from the times of a job's own; the same on every rank.

Each rank sums up the passes that it timed over its last steps (`evidence`); the sums of all ranks,
added up, give the next model (`relearnt`):

    step t      rank 0: passes timed -> evidence ┐
                rank 1: passes timed -> evidence ┴ added up -> relearnt, on both: plan of step t + 1

The fit is one ridge regression without negative coefficients, of a mean pipeline stage's forward
and backward pass together: cost of a micro-batch, of a token, of a pair of tokens, and, where ranks
share rows, the two costs of communication. It is held to the model before, so what the rows cannot
tell apart, such as a row's fixed cost from its tokens' where all rows are full, stays as it was.

What a stage has of a mean one's layers is known beforehand (`layer_costs`), and not learnt.

Bad: where stages differ by 20 % from what is known of them, times are learnt 8 % low.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from mcore_batching.planning.costs.cost import CostModel, ordered_sum
from mcore_batching.planning.costs.layer_costs import costs_of_chunks
from mcore_batching.planning.errors import ConfigError
from mcore_batching.planning.learning.ridge import dot, ridge
from mcore_batching.planning.parallel_dims import ParallelDims
from mcore_batching.planning.pipeline import pipeline_time
from mcore_batching.planning.plans.plan import StepPlan
from mcore_batching.planning.plans.statistics import predicted_step_time

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
LEAST_SECONDS, MOST_SECONDS = 1e-12, 1e6
"""Limits of a pass's time: below any clock's step, and eleven days. Squares of times between them
add up without overflow."""
_MOST_LEARNT = 1e18
"""Limit of a learnt cost or time, and of 1 over one: its square is still a number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """The measured times of one row."""

    lengths: tuple[int, ...]
    """Tokens of each sequence of the row."""
    forward_seconds: float
    """One forward pass."""
    backward_seconds: float
    """The backward pass after it."""
    weight_seconds: float = 0.0
    """Of it the weight gradients, where they ran apart; else 0."""
    context_parallel: int = 1
    """Ranks that the row is cut over."""

    @property
    def seconds(self) -> float:
        """Both passes."""
        return self.forward_seconds + self.backward_seconds

    @property
    def is_usable(self) -> bool:
        """True if both times may have been measured."""
        both = self.forward_seconds, self.backward_seconds
        return all(LEAST_SECONDS <= seconds <= MOST_SECONDS for seconds in both)


@dataclass(frozen=True, kw_only=True)
class LearntCosts:
    """Knowledge of what passes cost; the same on every rank."""

    cost_model: CostModel
    """In units of one token's forward work outside attention."""
    seconds_per_unit: float | None = None
    """Of a mean stage; None before anything was learnt."""

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> LearntCosts:
        """Learnt costs from the dict of `to_data`; other keys, of older releases, are ignored.

        Raises:
            ConfigError: not such a dict, or numbers beyond what can be learnt.
        """
        try:
            made = cls(
                cost_model=CostModel(**data["cost_model"]),
                seconds_per_unit=data["seconds_per_unit"],
            )
            known = ("window", "layers", "layer_costs")
            costs = [v for k, v in asdict(made.cost_model).items() if k not in known]
            speed = made.seconds_per_unit
            numbers = [each for each in (*costs, 1.0 if speed is None else speed) if each != 0]
            if not all(1 / _MOST_LEARNT <= each <= _MOST_LEARNT for each in numbers):
                least = 1 / _MOST_LEARNT
                raise ValueError(f"numbers must be 0 or from {least:g} to {_MOST_LEARNT:g}")
            if made.cost_model.linear == 0 or speed == 0:
                raise ValueError("linear and seconds_per_unit must be above 0")
        except (TypeError, KeyError, ValueError, OverflowError) as error:
            raise ConfigError(
                f"expected learnt costs as state_dict gave them, got {data!r:.80} ({error})"
            ) from None
        return made

    def to_data(self) -> dict[str, Any]:
        """Itself as a dict of numbers, for JSON or a checkpoint."""
        return asdict(self)

    def units(self, lengths: Iterable[int], context_parallel: int = 1) -> float:
        """Cost of both passes of a row of these lengths, on each of its ranks."""
        model = self.cost_model
        if context_parallel > 1:
            model = model.on_ranks(context_parallel)
        return model.micro_batch(lengths) * (1.0 + model.backward_ratio)

    def predicted_seconds(self, rows: Sequence[Sequence[int]], dims: ParallelDims) -> float | None:
        """Predicted time of one data-parallel rank's step; None before anything was learnt.

        Args:
            rows: lengths of the samples of each micro-batch, slot after slot.
            dims: gives stages and chunks.
        """
        if self.seconds_per_unit is None:
            return None
        # Transfers between stages count as nothing: about 1 % of a pass on real links.
        kinds, which = costs_of_chunks(self.cost_model, dims)
        costs = [kind.micro_batch(lengths) for lengths in rows for kind in kinds]
        ratio = self.cost_model.backward_ratio
        end = pipeline_time(costs, dims, backward_ratio=ratio, which_cost=which)
        return self.seconds_per_unit * end

    def predicted_seconds_of_plan(self, plan: StepPlan, lengths: Sequence[int]) -> float | None:
        """Predicted time of the slowest rank's step, from all lengths of the plan's batch."""
        if self.seconds_per_unit is None:
            return None
        return self.seconds_per_unit * predicted_step_time(plan, lengths, self.cost_model)


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
        matrix and right side of the normal equations, sums of forward's and of backward's share of
        each row's time, and of weights; of rows whose weight gradients ran apart, sums of their
        share of the time, and of the features that these take time for.
    """
    costs = range(_NUM_COSTS)
    sums = [0.0] * (_NUM_COSTS * (_NUM_COSTS + 1) + 6)
    mean, stage = learnt.cost_model, stage or learnt.cost_model
    learnt = replace(learnt, cost_model=stage)
    pairs = (
        (stage.per_micro_batch, mean.per_micro_batch),
        (stage.linear, mean.linear),
        (stage.quadratic, mean.quadratic),
    )
    # Of the stage's cost what a unit of the mean stage's makes.
    ratios = [own / of_mean if of_mean else 1.0 for own, of_mean in pairs] + [1.0, 1.0]
    of_weights = stage.weight_share / mean.weight_share if mean.weight_share else 1.0
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
        if row.weight_seconds:
            terms += [row.weight_seconds / row.seconds, x[0] * of_weights, x[1] * of_weights]
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
    """The model after another step; `learnt` itself if no pass was timed.

    Args:
        learnt: the model before, by which the evidence was summed up.
        sums: `evidence` of all ranks, added up.
        shared: rows of the last steps that several ranks share, the newest step last, as timed on
            a mean stage without waiting; the same on every rank.
    """
    # The few rows that ranks share are compared with what other rows have told of speed, if any do.
    if learnt.seconds_per_unit is not None or not any(sums):
        both = zip(sums, evidence(shared, learnt, usual=1.0), strict=True)
        sums = [own + together for own, together in both]
    *sums, forward, backward, count, apart, fixed_apart, token_apart = sums
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
    # Weight gradients over the same rows' forward pass outside attention, where any ran apart.
    whole = (fixed_apart * fixed + token_apart * token) / (1.0 + ratio)
    weight_share = min(apart / whole, ratio) if apart > 0.0 < whole else model.weight_share
    # Seconds over a token's seconds: costs in its unit.
    return LearntCosts(
        cost_model=replace(
            model,
            linear=1.0,
            quadratic=pair / token,
            per_micro_batch=fixed / token,
            backward_ratio=ratio,
            weight_share=weight_share,
            context_parallel_overhead=min(model.context_parallel_overhead + change, _MOST_OVERHEAD),
            # Without a shared row the fit tells nothing of it, and a guess in seconds would scale.
            context_parallel_fixed=doubling / token if matrix[4][4] else before[4],
        ),
        seconds_per_unit=token / (1.0 + ratio),
    )
