"""`mcore-batching compare`: this planner, its plainer modes and other frameworks' rules."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from mcore_batching.planning import ParallelDims, PlannerConfig
from mcore_batching.planning.plans.plan import counted
from mcore_batching.tools import report
from mcore_batching.tools.cli.options import (
    CommandParser,
    add_dims,
    add_lengths,
    add_search,
    cost_model_of,
    made_of,
)
from mcore_batching.tools.cli.progress import progress
from mcore_batching.tools.compare import OURS, Outcome, compare, consecutive_steps
from mcore_batching.tools.lengths_file import read_lengths

COLUMNS = (
    "planner",
    "steps",
    "time/ours, given cap",
    "own best cap",
    "time/ours, own best cap",
    "time/floor",
    "micro-batches/rank",
    "planning",
)
LEGEND = f"""\
time/ours     predicted end of the step / that under {OURS}'s plan, mean over steps: at the
              given --max-tokens-per-gpu, and at the cap up to it under which the planner's
              own steps end soonest; the second is what a tuned job takes
time/floor    predicted end of the step / the floor, mean over steps; no plan ends before it:
              {report.FLOOR}
planning      processor time for one step at the given cap, mean over steps"""


def add_arguments(parser: CommandParser) -> None:
    """The command's arguments."""
    parser.description = (
        "Plan the same steps with this planner, its plainer modes and others' rules (first-fit, "
        "verl's, Megatron's dp_balanced), and predict how long each step takes, under the cap "
        "and under the best cap below it for each."
    )
    add_lengths(parser)
    add_dims(parser)
    add_search(parser)


def run(options: argparse.Namespace) -> int:
    """Compare and print the table."""
    dims, config = made_of(ParallelDims, options), made_of(PlannerConfig, options)
    lengths = read_lengths(options.lengths, options.column)
    steps = consecutive_steps(lengths, options.samples_per_step)
    with progress("comparing") as on_planner:
        outcomes = compare(steps, dims, config, cost_model_of(options), on_planner=on_planner)
    sizes = sorted({len(step) for step in steps})  # the last step may hold fewer
    samples = " to ".join([*map(str, sizes[:-1]), counted(sizes[-1], "sample")])
    print(f"{counted(len(steps), 'step')} of {samples}, {report.dims_line(dims, config)}")
    print(as_table(outcomes))
    print(LEGEND)
    for line in summary(outcomes):
        print(line)
    return 0


def as_table(outcomes: Sequence[Outcome]) -> report.Table:
    """One row per planner."""
    return report.Table(columns=COLUMNS, rows=tuple(map(_row, outcomes)))


def _row(outcome: Outcome) -> tuple[str, ...]:
    seconds = outcome.planning_seconds
    figures = (
        ("{:.3f}", outcome.time_over_ours),
        ("{}", outcome.best_cap),
        ("{:.3f}", outcome.time_over_ours_at_best_cap),
        ("{:.3f}", outcome.time_over_floor),
        ("{:.1f}", outcome.num_microbatches),
        ("{:.1f} ms", None if seconds is None else 1000 * seconds),
    )
    shown = ["-" if value is None else text.format(value) for text, value in figures]
    return (outcome.name, f"{outcome.planned}/{outcome.steps}", *shown)


def summary(outcomes: Sequence[Outcome]) -> list[str]:
    """Lines below the table: the gain on the best rules, and who has no plan."""
    lines = []
    # A rule that has no plan for some steps would win by the ones that it left out.
    peers = [o for o in outcomes if o.kind == "peer" and o.planned == o.steps]
    at_cap = [(o.time_over_ours, o.name) for o in peers if o.time_over_ours]
    tuned = [
        (o.time_over_ours_at_best_cap, o.name, o.best_cap)
        for o in peers
        if o.time_over_ours_at_best_cap
    ]
    if at_cap and tuned:
        time, name = min(at_cap)
        time_tuned, name_tuned, cap = min(tuned)
        lines.append(
            f"of the other frameworks' rules at their own best caps {name_tuned} under {cap} ends "
            f"soonest, at {time_tuned:.3f} x the time of {OURS}; at the given cap {name}, at "
            f"{time:.3f} x"
        )
    return lines + [
        f"{o.name} has no plan for {o.steps - o.planned} of {counted(o.steps, 'step')}: {o.failure}"
        for o in outcomes
        if o.failure
    ]
