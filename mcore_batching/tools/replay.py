"""A recorded job again: predicted against measured time, and what other plans would have taken.

Alternatives are planned for the very samples of each step, and weighed by the cost model that
predicts the recorded plan. All times are in units of cost, which `seconds_per_unit` makes seconds.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
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
    predicted_step_time,
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


@dataclass(frozen=True, kw_only=True)
class ReplayedStep:
    """A recorded step, predicted anew."""

    record: StepRecord
    """The recorded step."""
    statistics: StepStatistics
    """Of the recorded plan."""

    @property
    def predicted(self) -> float:
        """Predicted time of the recorded plan."""
        return self.statistics.step_time

    @property
    def setting(self) -> tuple[ParallelDims, PlannerConfig, CostModel]:
        """What the recorded plan was made with."""
        plan = self.record.plan
        return plan.dims, plan.config, plan.cost_model

    def error(self, factor: float | None) -> float | None:
        """Predicted over measured seconds, less 1; None where nothing was measured.

        Args:
            factor: seconds per unit of cost.
        """
        measured = self.record.measured_seconds
        return factor * self.predicted / measured - 1.0 if factor and measured else None


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """Another plan for the same steps."""

    changes: Changes
    """Options that differ; empty for today's plan with the recorded dims and cap."""
    time: float
    """Predicted time of all its steps together."""
    recorded_time: float
    """The same for the recorded plans of these steps."""

    @property
    def gain(self) -> float:
        """Predicted time of the recorded plans over that of these."""
        return self.recorded_time / self.time if self.time else 1.0


def replay(records: Sequence[StepRecord]) -> list[ReplayedStep]:
    """Predict the recorded plans by the costs that they were made by.

    Raises:
        ConfigError: learnt costs whose units are too far apart.
    """
    # Learnt costs changed from step to step, and so did the seconds of their unit: all steps are
    # put into the last one's, so that one factor makes seconds of them.
    unit = next((r.seconds_per_unit for r in reversed(records) if r.seconds_per_unit), None)
    replayed = []
    for record in records:
        if unit is not None and record.seconds_per_unit is not None:
            model = in_units_of(record.plan.cost_model, unit / record.seconds_per_unit)
            plan = replace(record.plan, cost_model=model)
            record = replace(record, plan=plan, seconds_per_unit=unit)
        found = step_statistics(record.plan, record.lengths)
        replayed.append(ReplayedStep(record=record, statistics=found))
    return replayed


def by_setting(steps: Sequence[ReplayedStep]) -> list[list[ReplayedStep]]:
    """Consecutive steps of the same parallel dims, planner's options and cost model together.

    A learnt cost model changes from step to step: its steps are alike, too.
    """

    def setting(step: ReplayedStep) -> tuple[Any, ...]:
        dims, config, cost_model = step.setting
        is_learnt = step.record.seconds_per_unit is not None
        return dims, config, None if is_learnt else cost_model

    return [list(alike) for _, alike in groupby(steps, setting)]


def changed_options(before: ReplayedStep, after: ReplayedStep) -> dict[str, Any]:
    """Options of the second step's plan that differ from the first one's, with their values."""
    old, new = (
        {name: value for part in step.setting for name, value in asdict(part).items()}
        for step in (before, after)
    )
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


def spread_out(steps: Sequence[ReplayedStep], count: int) -> list[ReplayedStep]:
    """At most `count` of the steps, evenly spread from the first to the last."""
    if len(steps) <= count:
        return list(steps)
    # The middle of each of `count` equal parts: neither end, where jobs warm up and shut down.
    return [steps[(2 * i + 1) * len(steps) // (2 * count)] for i in range(count)]


def better_plans(steps: Sequence[ReplayedStep], plan_effort: int) -> list[Alternative]:
    """Today's plan of the same steps, and plans for other caps and dims on the same GPUs.

    Args:
        steps: which to plan.
        plan_effort: of every plan.

    Returns:
        today's plan first, the others by their gain. One that any of the steps cannot be planned
        with is left out.
    """
    times: dict[Changes, list[float]] = {}
    for step in steps:
        lengths = step.record.lengths
        for changes, dims, config, model in [((), *step.setting), *alternatives(step.record.plan)]:
            # Whatever the job planned by, alternatives are searched.
            searched = replace(config, packing="auto", balance="auto", fill="split")
            searched = replace(searched, plan_effort=plan_effort)
            try:
                plan = plan_step(lengths, dims, searched, model)
            except PlanningError:
                continue  # a sample does not fit
            times.setdefault(changes, []).append(predicted_step_time(plan, lengths))
    recorded = sum(step.predicted for step in steps)
    found = [
        Alternative(changes=changes, time=sum(taken), recorded_time=recorded)
        for changes, taken in times.items()
        if len(taken) == len(steps)  # else its times are not of the same samples
    ]
    return sorted(found, key=lambda other: (other.changes != (), -other.gain))


def step_table(steps: Sequence[ReplayedStep], factor: float | None) -> Table:
    """One row per step; of many steps only the first and the last few.

    Args:
        steps: steps of a job.
        factor: seconds per unit of cost; None: times are in units.
    """
    return Table(columns=STEP_COLUMNS, rows=both_ends([_row(step, factor) for step in steps]))


def _row(step: ReplayedStep, factor: float | None) -> tuple[str, ...]:
    record, error = step.record, step.error(factor)
    return (
        str(record.step),
        str(len(record.lengths)),
        str(record.plan.num_microbatches),
        time_text(step.predicted, factor),
        "-" if record.measured_seconds is None else f"{record.measured_seconds:.3f} s",
        "-" if error is None else f"{error:+.1%}",
        f"{step.statistics.time_over_floor:.3f}",
    )


def time_text(units: float, factor: float | None) -> str:
    """A time in seconds, or in units of cost where `factor`, seconds per unit, is None."""
    return f"{units:.0f}" if factor is None else f"{factor * units:.3f} s"
