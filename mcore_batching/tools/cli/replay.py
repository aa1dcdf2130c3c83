"""`mcore-batching replay`: a recorded job's predicted and measured times, and better plans."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from mcore_batching.planning import ConfigError, at_least
from mcore_batching.planning.errors import named
from mcore_batching.planning.plans.plan import counted
from mcore_batching.planning.plans.records import read_records
from mcore_batching.planning.plans.statistics import total_statistics
from mcore_batching.tools import replay, report
from mcore_batching.tools.cli.options import (
    CommandParser,
    add_options,
)
from mcore_batching.tools.cli.progress import progress
from mcore_batching.tools.explain import changes_text

# Default of --steps. Each is planned up to eight times: time grows with it, and gains of single
# steps even out.
MOST_PLANNED_STEPS = 16
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
        default=MOST_PLANNED_STEPS,
        metavar="N",
        help="plan at most this many steps again for each alternative, spread over the job",
    )
    add_options(parser, "plan_effort")


def run(options: argparse.Namespace) -> int:
    """Read, predict, plan again, print."""
    most = at_least("--steps", options.steps, 1, ConfigError)
    steps = replay.replay(read_records(options.records))
    # A job whose options changed half-way has no one factor: each setting gets a table of its own.
    before, has_others = None, False
    for alike in replay.by_setting(steps):
        if before is not None:
            changes = [
                named(name, value)
                for name, value in replay.changed_options(before, alike[0]).items()
            ]
            print(f"\nthen with {', '.join(changes)}")
        factor = replay.seconds_per_unit(alike)
        _print_steps(alike, factor)
        # All alternatives for the same few steps, so that gains can be compared.
        planned = replay.spread_out(alike, most)
        with progress("planning the steps again") as on_step:
            found = replay.better_plans(planned, options.plan_effort, on_step)
        if found:
            print(f"\n{len(planned)} of these steps with the same samples on the same GPUs:")
            print(_alternative_table(found, len(planned), factor))
            has_others = True
        before = alike[-1]
    print(LEGEND + OTHERS_LEGEND if has_others else LEGEND)
    return 0


def _print_steps(steps: Sequence[replay.ReplayedStep], factor: float | None) -> None:
    """Steps of one setting: their times, and how far predictions are off."""
    plan = steps[0].record.plan
    print(f"{counted(len(steps), 'recorded step')}, {report.dims_line(plan.dims, plan.config)}")
    print(step_table(steps, factor))
    shared = report.sharing(total_statistics([step.statistics for step in steps]))
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
    found: Sequence[replay.Alternative], steps: int, factor: float | None
) -> report.Table:
    """One row for the recorded plans and one for each alternative: mean predicted time and gain."""
    recorded = time_text(found[0].recorded_time / steps, factor)
    rows = [("as it was recorded", recorded, "1.000 x")]
    rows += [
        (
            changes_text(other.changes) or "planned by this release, for all ranks",
            time_text(other.time / steps, factor),
            f"{other.gain:.3f} x",
        )
        for other in found
    ]
    return report.Table(columns=("plan", "predicted per step", "faster by"), rows=tuple(rows))


def step_table(steps: Sequence[replay.ReplayedStep], factor: float | None) -> report.Table:
    """One row per step; of many steps only the first and the last few."""
    return report.Table(
        columns=STEP_COLUMNS, rows=report.both_ends([_row(step, factor) for step in steps])
    )


def _row(step: replay.ReplayedStep, factor: float | None) -> tuple[str, ...]:
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
