"""A recorded job again: the predicted time of its steps against the measured one.

All times are in units of cost, which `seconds_per_unit` makes seconds.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from mcore_batching.flags import LEARNT
from mcore_batching.planning import StepStatistics, step_statistics
from mcore_batching.planning.errors import named
from mcore_batching.planning.plans.plan import counted
from mcore_batching.planning.plans.records import StepRecord, read_records
from mcore_batching.planning.plans.statistics import total_statistics
from mcore_batching.tools import report
from mcore_batching.tools.options import CommandParser, progress


class ReplayedStep(NamedTuple):
    """A recorded step, predicted anew."""

    record: StepRecord
    statistics: StepStatistics
    predicted: float  # time of its plan, in the unit of cost of all steps

    def error(self, factor: float | None) -> float | None:
        """Predicted over measured seconds, less 1; None where nothing was measured."""
        measured = self.record.measured_seconds
        return factor * self.predicted / measured - 1.0 if factor and measured else None


def replay(
    records: Sequence[StepRecord], on_step: Callable[[int, int], None] | None = None
) -> list[ReplayedStep]:
    """Predict the recorded plans by the costs that they were made by. After each step `on_step` is
    called with the number of those that are done, and of all."""
    # Learnt costs changed from step to step, and so did the seconds of their unit: all steps are
    # put into the last one's, so that one factor makes seconds of them.
    unit = next((r.seconds_per_unit for r in reversed(records) if r.seconds_per_unit), 1.0)
    replayed = []
    for record in records:
        of_step = step_statistics(record.plan, record.lengths)
        in_unit = (record.seconds_per_unit or unit) / unit
        replayed.append(ReplayedStep(record, of_step, in_unit * of_step.step_time))
        if on_step is not None:
            on_step(len(replayed), len(records))
    return replayed


def by_setting(steps: Sequence[ReplayedStep]) -> list[tuple[dict[str, Any], list[ReplayedStep]]]:
    """Consecutive steps of the same parallel dims, planner's options and cost model together, each
    after the options that the steps before them had otherwise."""
    found: list[tuple[dict[str, Any], list[ReplayedStep]]] = []
    before: dict[str, Any] = {}
    for options, alike in itertools.groupby(steps, _options):
        changed = {name: each for name, each in options.items() if before.get(name) != each}
        found.append((changed, list(alike)))
        before = options
    return found


def _options(step: ReplayedStep) -> dict[str, Any]:
    plan = step.record.plan
    # A learnt cost model changes from step to step: its steps are alike, too.
    is_learnt = step.record.seconds_per_unit is not None
    costs = {"cost_model": LEARNT} if is_learnt else asdict(plan.cost_model)
    return asdict(plan.dims) | asdict(plan.config) | costs


def seconds_per_unit(steps: Sequence[ReplayedStep]) -> float | None:
    """Seconds of a unit of cost in steps of one setting, as measured or else as learnt, or None."""
    # The median: a few slow steps (the first ones, a checkpoint) do not move it.
    ratios = [
        step.record.measured_seconds / step.predicted
        for step in steps
        if step.record.measured_seconds and step.predicted > 0
    ]
    return statistics.median(ratios) if ratios else steps[0].record.seconds_per_unit


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


def add_arguments(parser: CommandParser) -> None:
    """The command's arguments."""
    parser.description = "Show a recorded job's steps, predicted against measured."
    parser.add_argument(
        "records", metavar="DIR", help="folder that a job recorded into by --dynamic-batch-record"
    )


def run(options: argparse.Namespace) -> int:
    """Read, predict, print."""
    records = read_records(options.records)
    with progress("predicting the recorded steps") as on_step:
        steps = replay(records, on_step)
    # Where options changed half-way there is no one factor: each setting gets a table of its own.
    for number, (changed, alike) in enumerate(by_setting(steps)):
        if number:
            print(f"\nthen with {', '.join(named(*change) for change in changed.items())}")
        _print_steps(alike)
    print(LEGEND)
    return 0


def _print_steps(steps: Sequence[ReplayedStep]) -> None:
    """Steps of one setting, of many the first and the last few: their times, and how far
    predictions are off."""
    plan, factor = steps[0].record.plan, seconds_per_unit(steps)
    print(f"{counted(len(steps), 'recorded step')}, {report.dims_line(plan.dims, plan.config)}")
    rows = report.both_ends([_row(step, factor) for step in steps])
    print(report.Table(columns=STEP_COLUMNS, rows=rows))
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


def _row(step: ReplayedStep, factor: float | None) -> tuple[str, ...]:
    record, error, units = step.record, step.error(factor), step.predicted
    return (
        str(record.step),
        str(len(record.lengths)),
        str(record.plan.num_microbatches),
        f"{units:.0f}" if factor is None else f"{factor * units:.3f} s",
        "-" if record.measured_seconds is None else f"{record.measured_seconds:.3f} s",
        "-" if error is None else f"{error:+.1%}",
        f"{step.statistics.time_over_floor:.3f}",
    )
