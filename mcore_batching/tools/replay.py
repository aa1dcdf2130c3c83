"""A recorded job again: predicted against measured time, and what other plans would have taken.

Units of cost become seconds by one factor, the median over steps of measured over predicted time: a
few slow steps (the first ones, a checkpoint) do not move it.

Guarantees: alternatives are planned for the very samples of each step, and weighed by the cost
model that predicts the recorded plan.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any

from mcore_batching.planning import CostModel, ParallelDims, PlannerConfig, PlanningError, plan_step
from mcore_batching.planning.bounds import step_time_floor
from mcore_batching.planning.records import StepRecord
from mcore_batching.planning.statistics import predicted_step_time
from mcore_batching.tools.advice import alternatives
from mcore_batching.tools.report import SHOWN_STEPS_AT_EACH_END, Table

TODAYS_PLAN = "planned by this release, for all ranks"
Setting = tuple[ParallelDims, PlannerConfig, CostModel]


@dataclass(frozen=True, kw_only=True)
class ReplayedStep:
    """A recorded step, predicted anew."""

    record: StepRecord
    """What was recorded."""
    predicted: float
    """Predicted time of the recorded plan, in units of cost."""
    floor: float
    """Before which no plan's step ends, in units of cost."""


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """Another plan or layout for the same steps."""

    change: str
    """What is different."""
    time: float
    """Predicted time of all its steps together, in units of cost."""
    recorded_time: float
    """That of the recorded plans of the same steps."""
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
    """
    replayed = []
    for record in records:
        plan = record.plan
        if cost_model is not None:
            plan = replace(plan, cost_model=cost_model)
        replayed.append(
            ReplayedStep(
                record=replace(record, plan=plan),
                predicted=predicted_step_time(plan, record.lengths),
                floor=step_time_floor(record.lengths, plan.dims, plan.config, plan.cost_model),
            )
        )
    return replayed


def by_setting(steps: Sequence[ReplayedStep]) -> list[list[ReplayedStep]]:
    """Consecutive steps of one layout, one planner's options and one cost model together."""
    return [list(alike) for _, alike in groupby(steps, _setting)]


def changed_options(before: ReplayedStep, after: ReplayedStep) -> list[str]:
    """What the second step's plan was made with that the first one's was not: name=value."""
    old, new = _named(_setting(before)), _named(_setting(after))
    return [f"{name}={value}" for name, value in new.items() if value != old[name]]


def seconds_per_unit(steps: Sequence[ReplayedStep]) -> float | None:
    """What a unit of cost took: the median over measured steps; None if none took any time."""
    ratios = [
        step.record.measured_seconds / step.predicted
        for step in steps
        if step.record.measured_seconds and step.predicted > 0
    ]
    return statistics.median(ratios) if ratios else None


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
    return [steps[(2 * i + 1) * len(steps) // (2 * count)] for i in range(count)]


def better_layouts(
    steps: Sequence[ReplayedStep], plan_effort: int | None = None
) -> list[Alternative]:
    """Today's plan of the same steps, and plans for other caps and layouts on the same GPUs.

    Args:
        steps: which to plan.
        plan_effort: of every plan; None: that of the recorded options.

    Returns:
        today's plan first, the others by their gain. One that any of the steps cannot be planned
        with is left out.
    """
    times: dict[str, list[float]] = {}
    for step in steps:
        for change, setting in _settings(step):
            time = _planned_time(step, setting, plan_effort)
            if time is not None:
                times.setdefault(change, []).append(time)
    recorded = sum(step.predicted for step in steps)
    found = [
        Alternative(change=change, time=sum(taken), recorded_time=recorded, steps=len(taken))
        for change, taken in times.items()
        if len(taken) == len(steps)
    ]
    return sorted(found, key=lambda other: (other.change != TODAYS_PLAN, -other.gain))


def _named(setting: Setting) -> dict[str, Any]:
    dims, config, cost_model = setting
    return asdict(dims) | asdict(config) | asdict(cost_model)


def _setting(step: ReplayedStep) -> Setting:
    plan = step.record.plan
    return plan.dims, plan.config, plan.cost_model


def _settings(step: ReplayedStep) -> Iterator[tuple[str, Setting]]:
    yield TODAYS_PLAN, _setting(step)
    for change, dims, config, cost_model in alternatives(step.record.plan):
        yield change, (dims, config, cost_model)


def _planned_time(step: ReplayedStep, setting: Setting, plan_effort: int | None) -> float | None:
    dims, config, cost_model = setting
    config = replace(config, packing="auto", balance="auto", fill="split")
    if plan_effort is not None:
        config = replace(config, plan_effort=plan_effort)
    lengths = step.record.lengths
    try:
        plan = plan_step(lengths, dims, config, cost_model)
    except PlanningError:
        return None  # a sample does not fit
    return predicted_step_time(plan, lengths)


def step_table(steps: Sequence[ReplayedStep], factor: float | None) -> Table:
    """One row a step; of many steps only the first and the last few.

    Args:
        steps: steps of a job.
        factor: seconds per unit of cost; None: times are in units.
    """
    columns = (
        "step",
        "samples",
        "micro-batches/rank",
        "predicted",
        "measured",
        "error",
        "time/floor",
    )
    rows = [_row(step, factor) for step in steps]
    shown = SHOWN_STEPS_AT_EACH_END
    if len(rows) > 2 * shown:
        left_out = ("…", f"({len(rows) - 2 * shown} steps)", *[""] * (len(columns) - 2))
        rows = [*rows[:shown], left_out, *rows[-shown:]]
    return Table(columns=columns, rows=tuple(rows))


def _row(step: ReplayedStep, factor: float | None) -> tuple[str, ...]:
    measured = step.record.measured_seconds
    error = "-"
    if measured and factor is not None:
        error = f"{factor * step.predicted / measured - 1.0:+.1%}"
    return (
        str(step.record.step),
        str(len(step.record.lengths)),
        str(step.record.plan.num_microbatches),
        f"{step.predicted:.0f}" if factor is None else f"{factor * step.predicted:.3f} s",
        "-" if measured is None else f"{measured:.3f} s",
        error,
        f"{step.predicted / step.floor:.3f}" if step.floor else "-",
    )


def alternative_table(found: Sequence[Alternative], factor: float | None) -> Table:
    """One row for each other plan: its predicted time a step and its gain.

    Args:
        found: at least one.
        factor: seconds per unit of cost; None: times are in units.
    """
    shown: Callable[[float], str] = (
        (lambda units: f"{units:.0f}")
        if factor is None
        else (lambda units: f"{factor * units:.3f} s")
    )
    first = found[0]
    rows = [("as it was recorded", shown(first.recorded_time / first.steps), "1.000 x")]
    rows += [
        (other.change, shown(other.time / other.steps), f"{other.gain:.3f} x") for other in found
    ]
    return Table(columns=("plan", "predicted a step", "faster by"), rows=tuple(rows))
