"""`mcore-batching replay`: a recorded job's predicted and measured times, and better plans."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from mcore_batching.planning import Argument
from mcore_batching.planning.plans.records import read_records
from mcore_batching.tools import replay, report
from mcore_batching.tools.cli.options import (
    FLAG_OF_SIZE,
    CommandParser,
    add_cost_model,
    add_plan_effort,
    check_at_least,
    cost_model_of,
)

MOST_PLANNED_STEPS = 16
"""Default of --steps. Each is planned up to eight times: time grows with it, and gains of single
steps even out."""


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
        help="plan at most this many steps again for each alternative, spread over the job "
        "(default: %(default)s)",
    )
    add_plan_effort(parser)
    add_cost_model(parser)
    # Alternatives are named by the flags with which `mcore-batching plan` would plan them.
    parser.flags |= FLAG_OF_SIZE | {
        "max_tokens_per_gpu": "--max-tokens-per-gpu",
        "microbatch_group_size": "--microbatch-group-size",
        "max_samples_per_row": "--max-samples-per-row",
        "max_inflight_tokens": "--max-inflight-tokens",
    }


def run(options: argparse.Namespace) -> int:
    """Read, predict, plan again, print."""
    check_at_least(options, "steps", 1)
    steps = replay.replay(read_records(options.records), cost_model_of(options))
    # A job whose options changed half-way has no one factor: each setting gets a table of its own.
    before = None
    for alike in replay.by_setting(steps):
        if before is not None:
            changes = [
                f"{options.spell(Argument(name))}={value}"
                for name, value in replay.changed_options(before, alike[0]).items()
            ]
            print(f"\nthen with {', '.join(changes)}")
        _print(alike, options)
        before = alike[-1]
    return 0


def _print(steps: Sequence[replay.ReplayedStep], options: argparse.Namespace) -> None:
    """Steps of one setting: their times, and what other plans would have taken."""
    factor = replay.seconds_per_unit(steps)
    plan = steps[0].record.plan
    print(
        f"{report.counted(len(steps), 'recorded step')}, {report.dims_line(plan.dims, plan.config)}"
    )
    report.print_table(replay.step_table(steps, factor), sys.stdout)
    shared = report.sharing(replay.total_statistics(steps))
    if shared:
        print(shared)
    if factor is None:  # a job that was stopped in its first step, say
        print("no time was measured: times are in units of cost")
    else:
        errors = [abs(error) for error in replay.relative_errors(steps, factor)]
        how, off = "as learnt", ""
        if errors:
            how = "median"
            off = f"; predictions are off by {sum(errors) / len(errors):.1%} on average, "
            off += f"{max(errors):.1%} at worst"
        print(f"a unit of cost took {factor:.3e} s ({how}){off}")
    # All alternatives for the same few steps, so that gains can be compared.
    planned = replay.spread_out(steps, options.steps)
    found = replay.better_plans(planned, options.plan_effort)
    if found:
        print(f"\n{len(planned)} of these steps with the same samples on the same GPUs:")
        report.print_table(_alternative_table(found, factor, options.spell), sys.stdout)


def _alternative_table(
    found: Sequence[replay.Alternative],
    factor: float | None,
    spell: Callable[[Argument], str],
) -> report.Table:
    """One row for the recorded plans and one for each alternative: mean predicted time and gain."""
    recorded = replay.time_text(found[0].recorded_time / found[0].steps, factor)
    rows = [("as it was recorded", recorded, "1.000 x")]
    rows += [
        (
            " and ".join(map(spell, other.changes)) or "planned by this release, for all ranks",
            replay.time_text(other.time / other.steps, factor),
            f"{other.gain:.3f} x",
        )
        for other in found
    ]
    return report.Table(columns=("plan", "predicted per step", "faster by"), rows=tuple(rows))
