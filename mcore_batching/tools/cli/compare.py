"""`mcore-batching compare`: this planner, its plainer modes and other frameworks' rules."""

from __future__ import annotations

import argparse

from mcore_batching.planning import ParallelDims, PlannerConfig
from mcore_batching.planning.errors import printable
from mcore_batching.planning.plans.plan import counted
from mcore_batching.tools import compare, compare_report, report
from mcore_batching.tools.cli.options import (
    CommandParser,
    add_dims,
    add_lengths,
    add_search,
    cost_model_of,
    made_of,
    write,
)
from mcore_batching.tools.lengths_file import read_lengths


def add_arguments(parser: CommandParser) -> None:
    """The command's arguments."""
    parser.description = (
        "Plan the same steps with this planner, its plainer modes and the rules of other "
        "frameworks, and predict how long each step takes, under the cap and under the best "
        "cap below it for each."
    )
    add_lengths(parser)
    add_dims(parser)
    parser.add_argument(
        "--draws",
        type=int,
        metavar="N",
        help="draw this many steps of --samples-per-step at random (default: consecutive steps)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of --draws")
    add_search(parser)
    parser.add_argument("--out", metavar="FILE.csv", help="also write all figures to this file")


def run(options: argparse.Namespace) -> int:
    """Compare and print the table."""
    dims, config = made_of(ParallelDims, options), made_of(PlannerConfig, options)
    lengths = read_lengths(options.lengths, options.column)
    steps = compare.draw_steps(lengths, options.samples_per_step, options.draws, options.seed)
    outcomes = compare.compare(steps, dims, config, cost_model_of(options))
    sizes = sorted({len(step) for step in steps})  # the last step may hold fewer
    samples = " to ".join(map(str, sizes))
    print(f"{counted(len(steps), 'step')} of {samples} samples, {report.dims_line(dims, config)}")
    print(compare_report.as_table(outcomes))
    print(compare_report.LEGEND)
    for line in compare_report.summary(outcomes):
        print(line)
    if options.out:
        write(options.out, compare_report.as_csv(outcomes))
        print(f"wrote {printable(options.out)}")
    return 0
