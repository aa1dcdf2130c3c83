"""A recorded job again: predicted against measured time, and what other plans would have taken.

Alternatives are planned for the very samples of each step, and weighed by the cost model that
predicts the recorded plan.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any

from mcore_batching.planning import (
    CostModel,
    ParallelDims,
    PlannerConfig,
    PlanningError,
    StepStatistics,
    plan_step,
    step_statistics,
)
from mcore_batching.planning.costs.cost import in_units_of
from mcore_batching.planning.plans.records import StepRecord
from mcore_batching.tools.report import Table, both_ends
from mcore_batching.tools.suggestions import Changes, alternatives

STEP_COLUMNS = (
    "step",
    "samples",
    "micro-batches/rank",
    "predicted",
    "measured",
    "error",
    "time/floor",
)

Setting = tuple[ParallelDims, PlannerConfig, CostModel]


@dataclass(frozen=True, kw_only=True)
class ReplayedStep:
    """A recorded step, predicted anew."""

    record: StepRecord
    """The recorded step."""
    statistics: StepStatistics
    """Of the recorded plan; its time and floor are in units of cost."""

    @property
    def predicted(self) -> float:
        """Predicted time of the recorded plan, in units of cost."""
        return self.statistics.step_time

    @property
    def floor(self) -> float:
        """Lower bound on the time of any plan, in units of cost."""
        return self.statistics.floor_time


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """Another plan for the same steps."""

    changes: Changes
    """Options that differ; empty for today's plan with the recorded dims and cap."""
    time: float
    """Predicted time of all its steps together, in units of cost."""
    recorded_time: float
    """The same for the recorded plans of these steps."""
    steps: int
    """Steps that were planned so."""

    @property
    def gain(self) -> float:
        """Predicted time of the recorded plans over that of these."""
        return self.recorded_time / self.time if self.time else 1.0


def replay(
    records: Sequence[StepRecord], cost_model: CostModel | None = None
) -> list[ReplayedStep]:
    """Predict the recorded plans.

    Args:
        records: steps of a job.
        cost_model: to predict with; None: the one that each step was planned with.

    Raises:
        ConfigError: learnt costs whose units are too far apart.
    """
    replayed = []
    # Learnt costs changed from step to step, and so did the seconds of their unit: all steps are
    # put into the last one's, so that one factor makes seconds of them.
    unit = next((r.seconds_per_unit for r in reversed(records) if r.seconds_per_unit), None)
    for record in records:
        plan, seconds = record.plan, record.seconds_per_unit
        if cost_model is not None:
            plan, seconds = replace(plan, cost_model=cost_model), None
        elif unit is not None and seconds is not None:
            model = in_units_of(plan.cost_model, unit / seconds)
            plan, seconds = replace(plan, cost_model=model), unit
        replayed.append(
            ReplayedStep(
                record=replace(record, plan=plan, seconds_per_unit=seconds),
                statistics=step_statistics(plan, record.lengths),
            )
        )
    return replayed


def total_statistics(steps: Sequence[ReplayedStep]) -> StepStatistics:
    """Of all steps together.

    Args:
        steps: one or more.
    """
    first, *others = (step.statistics for step in steps)
    return sum(others, first)


def by_setting(steps: Sequence[ReplayedStep]) -> list[list[ReplayedStep]]:
    """Consecutive steps of the same parallel dims, planner's options and cost model together.

    A learnt cost model changes from step to step: its steps are alike, too.
    """

    def setting(step: ReplayedStep) -> tuple[Any, ...]:
        dims, config, cost_model = _setting(step)
        is_learnt = step.record.seconds_per_unit is not None
        return dims, config, None if is_learnt else cost_model

    return [list(alike) for _, alike in groupby(steps, setting)]


def changed_options(before: ReplayedStep, after: ReplayedStep) -> dict[str, Any]:
    """Options of the second step's plan that differ from the first one's, with their values."""
    old, new = _options(before), _options(after)
    return {name: value for name, value in new.items() if value != old[name]}


def seconds_per_unit(steps: Sequence[ReplayedStep]) -> float | None:
    """Seconds per unit of cost over steps of one setting: median of measured over predicted time.

    Where nothing was measured, as it was learnt; None if it was not.
    """
    # The median: a few slow steps (the first ones, a checkpoint) do not move it.
    ratios = [
        step.record.measured_seconds / step.predicted
        for step in steps
        if step.record.measured_seconds and step.predicted > 0
    ]
    return statistics.median(ratios) if ratios else steps[0].record.seconds_per_unit


def relative_errors(steps: Sequence[ReplayedStep], factor: float) -> list[float]:
    """Predicted over measured seconds, less 1, of the steps that were measured.

    Args:
        steps: steps of a job.
        factor: seconds per unit of cost.
    """
    return [
        factor * step.predicted / step.record.measured_seconds - 1.0
        for step in steps
        if step.record.measured_seconds
    ]


def spread_out(steps: Sequence[ReplayedStep], count: int) -> list[ReplayedStep]:
    """At most `count` of the steps, evenly spread from the first to the last."""
    if len(steps) <= count:
        return list(steps)
    # The middle of each of `count` equal parts: neither end, where jobs warm up and shut down.
    return [steps[(2 * i + 1) * len(steps) // (2 * count)] for i in range(count)]


def better_plans(
    steps: Sequence[ReplayedStep], plan_effort: int | None = None
) -> list[Alternative]:
    """Today's plan of the same steps, and plans for other caps and dims on the same GPUs.

    Args:
        steps: which to plan.
        plan_effort: of every plan; None: that of the recorded options.

    Returns:
        today's plan first, the others by their gain. One that any of the steps cannot be planned
        with is left out.
    """
    times: dict[Changes, list[float]] = {}
    for step in steps:
        for changes, setting in _settings(step):
            time = _planned_time(step, setting, plan_effort)
            if time is not None:
                times.setdefault(changes, []).append(time)
    recorded = sum(step.predicted for step in steps)
    found = [
        Alternative(changes=changes, time=sum(taken), recorded_time=recorded, steps=len(taken))
        for changes, taken in times.items()
        if len(taken) == len(steps)  # else its times are not of the same samples
    ]
    return sorted(found, key=lambda other: (other.changes != (), -other.gain))


def _options(step: ReplayedStep) -> dict[str, Any]:
    dims, config, cost_model = _setting(step)
    return asdict(dims) | asdict(config) | asdict(cost_model)


def _setting(step: ReplayedStep) -> Setting:
    plan = step.record.plan
    return plan.dims, plan.config, plan.cost_model


def _settings(step: ReplayedStep) -> Iterator[tuple[Changes, Setting]]:
    yield (), _setting(step)
    for changes, dims, config, cost_model in alternatives(step.record.plan):
        yield changes, (dims, config, cost_model)


def _planned_time(step: ReplayedStep, setting: Setting, plan_effort: int | None) -> float | None:
    """Predicted time of this release's plan for the step's samples; None if one does not fit."""
    dims, config, cost_model = setting
    # Whatever the job planned by, alternatives are searched: the table says what is possible.
    config = replace(config, packing="auto", balance="auto", fill="split")
    if plan_effort is not None:
        config = replace(config, plan_effort=plan_effort)
    lengths = step.record.lengths
    try:
        plan = plan_step(lengths, dims, config, cost_model)
    except PlanningError:
        return None
    return step_statistics(plan, lengths).step_time


def step_table(steps: Sequence[ReplayedStep], factor: float | None) -> Table:
    """One row per step; of many steps only the first and the last few.

    Args:
        steps: steps of a job.
        factor: seconds per unit of cost; None: times are in units.
    """
    return Table(columns=STEP_COLUMNS, rows=both_ends([_row(step, factor) for step in steps]))


def _row(step: ReplayedStep, factor: float | None) -> tuple[str, ...]:
    measured = step.record.measured_seconds
    error = "-"
    if measured and factor is not None:
        error = f"{factor * step.predicted / measured - 1.0:+.1%}"
    return (
        str(step.record.step),
        str(len(step.record.lengths)),
        str(step.record.plan.num_microbatches),
        time_text(step.predicted, factor),
        "-" if measured is None else f"{measured:.3f} s",
        error,
        f"{step.predicted / step.floor:.3f}" if step.floor else "-",
    )


def time_text(units: float, factor: float | None) -> str:
    """A time in seconds, or in units of cost where `factor`, seconds per unit, is None."""
    return f"{units:.0f}" if factor is None else f"{factor * units:.3f} s"
