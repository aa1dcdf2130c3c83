"""A recorded job again: predicted against measured time, and what other plans would have taken.

All times are in units of cost, which `seconds_per_unit` makes seconds.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import groupby
from typing import Any, NamedTuple

from mcore_batching.planning import (
    ConfigError,
    CostModel,
    ParallelDims,
    PlannerConfig,
    PlanningError,
    StepStatistics,
    at_least,
    plan_step,
    predicted_step_time,
    step_statistics,
)
from mcore_batching.planning.costs.cost import in_units_of
from mcore_batching.planning.errors import named
from mcore_batching.planning.plans.plan import counted
from mcore_batching.planning.plans.records import StepRecord, read_records
from mcore_batching.planning.plans.statistics import total_statistics
from mcore_batching.tools import report
from mcore_batching.tools.explain import Changes, alternatives, changes_text
from mcore_batching.tools.options import CommandParser, add_options, progress


class ReplayedStep(NamedTuple):
    """A recorded step, predicted anew."""

    record: StepRecord
    statistics: StepStatistics

    @property
    def predicted(self) -> float:
        """Time of the recorded plan."""
        return self.statistics.step_time

    @property
    def setting(self) -> tuple[ParallelDims, PlannerConfig, CostModel]:
        """The dims, options and costs that the recorded plan was made with."""
        plan = self.record.plan
        return plan.dims, plan.config, plan.cost_model

    def error(self, factor: float | None) -> float | None:
        """Predicted over measured seconds, less 1; None where nothing was measured."""
        measured = self.record.measured_seconds
        return factor * self.predicted / measured - 1.0 if factor and measured else None


def replay(records: Sequence[StepRecord]) -> list[ReplayedStep]:
    """Predict the recorded plans by the costs that they were made by."""
    # Learnt costs changed from step to step, and so did the seconds of their unit: all steps are
    # put into the last one's, so that one factor makes seconds of them.
    unit = next((r.seconds_per_unit for r in reversed(records) if r.seconds_per_unit), None)
    replayed = []
    for record in records:
        if unit is not None and record.seconds_per_unit is not None:
            model = in_units_of(record.plan.cost_model, unit / record.seconds_per_unit)
            plan = replace(record.plan, cost_model=model)
            record = replace(record, plan=plan, seconds_per_unit=unit)
        replayed.append(ReplayedStep(record, step_statistics(record.plan, record.lengths)))
    return replayed


def by_setting(steps: Sequence[ReplayedStep]) -> list[list[ReplayedStep]]:
    """Consecutive steps of the same parallel dims, planner's options and cost model together."""
    return [list(alike) for _, alike in groupby(steps, _kind)]


def _kind(step: ReplayedStep) -> tuple[Any, ...]:
    # A learnt cost model changes from step to step: its steps are alike, too.
    dims, config, cost_model = step.setting
    return dims, config, None if step.record.seconds_per_unit is not None else cost_model


def changed_options(before: ReplayedStep, after: ReplayedStep) -> dict[str, Any]:
    """The options that the second step's plan has otherwise than the first one's."""
    old, new = (
        {name: value for part in step.setting for name, value in asdict(part).items()}
        for step in (before, after)
    )
    return {name: value for name, value in new.items() if value != old[name]}


def seconds_per_unit(steps: Sequence[ReplayedStep]) -> float | None:
    """Seconds of a unit of cost in steps of one setting, as measured or else as learnt, or None."""
    # The median: a few slow steps (the first ones, a checkpoint) do not move it.
    ratios = [
        step.record.measured_seconds / step.predicted
        for step in steps
        if step.record.measured_seconds and step.predicted > 0
    ]
    return statistics.median(ratios) if ratios else steps[0].record.seconds_per_unit


def spread_out(steps: Sequence[ReplayedStep], count: int) -> list[ReplayedStep]:
    """At most `count` of the steps, evenly spread."""
    if len(steps) <= count:
        return list(steps)
    # The middle of each of `count` equal parts: neither end, where jobs warm up and shut down.
    return [steps[(2 * i + 1) * len(steps) // (2 * count)] for i in range(count)]


def better_plans(
    steps: Sequence[ReplayedStep],
    plan_effort: int,
    on_step: Callable[[int, int], None] | None = None,
) -> list[tuple[Changes, float]]:
    """Predicted time of the same steps by today's plans, with no changes, then by those for other
    caps and dims on the same GPUs, the least first.

    What any of the steps cannot be planned with is left out. After each step `on_step` is called
    with the number of those that are done, and of all.
    """
    times: dict[Changes, list[float]] = {}
    for number, step in enumerate(steps, 1):
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
        if on_step is not None:
            on_step(number, len(steps))
    found = [
        (changes, sum(taken))
        for changes, taken in times.items()
        if len(taken) == len(steps)  # else its times are not of the same samples
    ]
    return sorted(found, key=lambda each: (each[0] != (), each[1]))


STEP_COLUMNS = (
    "step",
    "samples",
    "micro-batches/rank",
    "predicted",
    "measured",
    "error",
    "time/floor",
)

LEGEND = f"""\
error         predicted / measured, less 1
{report.FLOOR_LEGEND}"""
OTHERS_LEGEND = """
faster by     predicted time of the recorded plans / that of the row's plans"""


def add_arguments(parser: CommandParser) -> None:
    """The command's arguments."""
    parser.description = (
        "Show a recorded job's steps, predicted against measured, and what other plans and "
        "parallel dims would have taken."
    )
    parser.add_argument(
        "records", metavar="DIR", help="folder that a job recorded into by --dynamic-batch-record"
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=16,  # each is planned up to eight times, and gains of single steps even out
        metavar="N",
        help="plan at most this many steps again for each alternative, spread over the job",
    )
    add_options(parser, "plan_effort")


def run(options: argparse.Namespace) -> int:
    """Read, predict, plan again, print."""
    most = at_least("--steps", options.steps, 1, ConfigError)
    steps = replay(read_records(options.records))
    # Where options changed half-way there is no one factor: each setting gets a table of its own.
    before, has_others = None, False
    for alike in by_setting(steps):
        if before is not None:
            changes = [
                named(name, value) for name, value in changed_options(before, alike[0]).items()
            ]
            print(f"\nthen with {', '.join(changes)}")
        factor = seconds_per_unit(alike)
        _print_steps(alike, factor)
        # All alternatives for the same few steps, so that gains can be compared.
        planned = spread_out(alike, most)
        with progress("planning the steps again") as on_step:
            found = better_plans(planned, options.plan_effort, on_step)
        if found:
            print(f"\n{len(planned)} of these steps with the same samples on the same GPUs:")
            print(_alternative_table(planned, found, factor))
            has_others = True
        before = alike[-1]
    print(LEGEND + OTHERS_LEGEND if has_others else LEGEND)
    return 0


def _print_steps(steps: Sequence[ReplayedStep], factor: float | None) -> None:
    """Steps of one setting: their times, and how far predictions are off."""
    plan = steps[0].record.plan
    print(f"{counted(len(steps), 'recorded step')}, {report.dims_line(plan.dims, plan.config)}")
    print(step_table(steps, factor))
    shared = total_statistics([step.statistics for step in steps]).sharing
    if shared:
        print(shared)
    if factor is None:  # a job that was stopped in its first step, say
        print("no time was measured: times are in units of cost")
        return
    errors = [abs(error) for step in steps if (error := step.error(factor)) is not None]
    how, off = "as learnt", ""
    if errors:
        how = "median"
        off = f"; predictions are off by {sum(errors) / len(errors):.1%} on average, "
        off += f"{max(errors):.1%} at worst"
    print(f"a unit of cost took {factor:.3e} s ({how}){off}")


def _alternative_table(
    steps: Sequence[ReplayedStep], found: Sequence[tuple[Changes, float]], factor: float | None
) -> report.Table:
    """One row for the recorded plans and one for each alternative: mean predicted time and gain."""
    recorded = sum(step.predicted for step in steps)
    rows = [("as it was recorded", time_text(recorded / len(steps), factor), "1.000 x")]
    for changes, time in found:
        name = changes_text(changes) or "planned by this release, for all ranks"
        gain = recorded / time if time else 1.0
        rows.append((name, time_text(time / len(steps), factor), f"{gain:.3f} x"))
    return report.Table(columns=("plan", "predicted per step", "faster by"), rows=tuple(rows))


def step_table(steps: Sequence[ReplayedStep], factor: float | None) -> report.Table:
    """One row per step; of many steps only the first and the last few."""
    return report.Table(
        columns=STEP_COLUMNS, rows=report.both_ends([_row(step, factor) for step in steps])
    )


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
