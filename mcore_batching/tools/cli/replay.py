"""`mcore-batching replay`: a recorded job's predicted and measured times, and better layouts."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from mcore_batching.planning import ConfigError
from mcore_batching.planning.checks import at_least
from mcore_batching.planning.records import read_records
from mcore_batching.tools import replay, report
from mcore_batching.tools.cli.options import (
    add_cost_model,
    add_plan_effort,
    cost_model_of,
    with_flags,
)
from mcore_batching.tools.plot import check_picture
from mcore_batching.tools.replay_plot import draw_replay

MOST_PLANNED_STEPS = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.description = (
        "Show a recorded job's steps, predicted against measured, and what other plans and layouts "
        "would have taken."
    )
    parser.add_argument(
        "records", metavar="DIR", help="folder that a job recorded into by --dynamic-batch-record"
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=MOST_PLANNED_STEPS,
        metavar="N",
        help="plan at most this many steps of each layout again, spread over the job (default: "
        "%(default)s)",
    )
    add_plan_effort(parser)
    add_cost_model(parser)
    parser.add_argument(
        "--plot", metavar="FILE", help="draw both times of every step, to a .png, .svg or .html"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Read, predict, plan again, print."""
    count = at_least("--steps", options.steps, 1, ConfigError)
    if options.plot:
        check_picture(options.plot)
    steps = replay.replay(read_records(options.records), cost_model_of(options))
    before = None
    for alike in replay.by_setting(steps):
        if before is not None:
            changes = ", ".join(map(with_flags, replay.changed_options(before, alike[0])))
            print(f"\nthen with {changes}")
        _print(alike, count, options.plan_effort)
        before = alike[-1]
    if options.plot:
        draw_replay(steps, options.plot)
        print(f"wrote {options.plot}")
    return 0


def _print(steps: Sequence[replay.ReplayedStep], count: int, plan_effort: int) -> None:
    """Steps of one setting: their times, and what other plans would have taken."""
    factor = replay.seconds_per_unit(steps)
    plan = steps[0].record.plan
    print(
        f"{len(steps)} recorded step{'s' if len(steps) != 1 else ''}, "
        f"{report.layout_line(plan.dims, plan.config)}"
    )
    report.print_table(replay.step_table(steps, factor), sys.stdout)
    if factor is None:
        print("no time was measured: times are in units of cost")
    else:
        errors = [abs(error) for error in replay.relative_errors(steps, factor)]
        print(
            f"a unit of cost took {factor:.3e} s (median); predictions are off by "
            f"{sum(errors) / len(errors):.1%} on average, {max(errors):.1%} at worst"
        )
    planned = replay.spread_out(steps, count)
    found = replay.better_layouts(planned, plan_effort)
    if found:
        print(f"\n{len(planned)} of these steps with the same samples on the same GPUs:")
        table = replay.alternative_table(found, factor)
        named = tuple((with_flags(row[0]), *row[1:]) for row in table.rows)
        report.print_table(report.Table(columns=table.columns, rows=named), sys.stdout)
