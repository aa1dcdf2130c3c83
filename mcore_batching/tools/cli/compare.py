"""`mcore-batching compare`: this planner, its plainer modes and other frameworks' rules."""

from __future__ import annotations

import argparse
import sys

from mcore_batching.planning.errors import printable
from mcore_batching.tools import compare, compare_report, report
from mcore_batching.tools.cli.options import (
    CommandParser,
    UsageError,
    add_dims,
    add_lengths,
    add_search,
    config_of,
    cost_model_of,
    dims_of,
    write,
)
from mcore_batching.tools.lengths_file import read_lengths

_FORMATS = {".csv": compare_report.as_csv, ".json": compare_report.as_json}


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
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of --draws (default: %(default)s)"
    )
    add_search(parser)
    parser.add_argument(
        "--out", metavar="FILE", help="also write the table, to a .csv or a .json file"
    )


def run(options: argparse.Namespace) -> int:
    """Compare and print the table."""
    dims, config = dims_of(options), config_of(options)
    cost_model = cost_model_of(options)
    # Before the long work: a wrong name of the file would be found out only after it.
    to_text = None
    if options.out:
        to_text = next((f for end, f in _FORMATS.items() if options.out.endswith(end)), None)
        if to_text is None:
            raise UsageError(f"--out must end in .csv or .json, got {options.out}")
    lengths = read_lengths(options.lengths, options.column)
    steps = compare.draw_steps(lengths, options.samples_per_step, options.draws, options.seed)
    outcomes = compare.compare(steps, dims, config, cost_model)
    per_step = sorted({len(step) for step in steps})  # the last step may hold fewer
    samples = str(per_step[0]) if len(per_step) == 1 else f"{per_step[0]} to {per_step[-1]}"
    print(
        f"{report.counted(len(steps), 'step')} of {samples} samples, "
        f"{report.dims_line(dims, config)}"
    )
    report.print_table(compare_report.as_table(outcomes), sys.stdout)
    print(compare_report.LEGEND)
    for line in compare_report.summary(outcomes):
        print(line)
    if to_text is not None:
        write(options.out, to_text(outcomes))
        print(f"wrote {printable(options.out)}")
    return 0
