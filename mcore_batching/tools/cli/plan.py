"""`mcore-batching plan`: make a plan from a file of lengths."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

from mcore_batching.planning import (
    LastStep,
    ParallelDims,
    Plan,
    PlannerConfig,
    plan_batch,
    step_statistics,
    validate_plan,
)
from mcore_batching.planning.errors import printable
from mcore_batching.planning.plans.memory import ModelShape, predicted_memory
from mcore_batching.planning.plans.statistics import total_statistics
from mcore_batching.tools import report
from mcore_batching.tools.cli.options import (
    CommandParser,
    UsageError,
    add_dims,
    add_lengths,
    add_options,
    add_search,
    cost_model_of,
    made_of,
    read,
    write,
)
from mcore_batching.tools.explain import explain
from mcore_batching.tools.lengths_file import read_groups, read_lengths
from mcore_batching.tools.pictures.picture import check_picture
from mcore_batching.tools.pictures.plot import draw_step

_LEAST_ADVICE_SECONDS = 2.0
"""Small plans get all of the advice, however busy the machine is."""


def add_arguments(parser: CommandParser) -> None:
    """The command's arguments."""
    parser.description = "Decide which samples share a micro-batch, on which rank, in which order."
    add_lengths(parser)
    add_dims(parser)
    _add_groups(parser)
    add_options(parser, "on_oversize", "fill", "packing", "balance")
    add_search(parser)
    parser.add_argument(
        "--forward-only",
        action="store_true",
        help="plan forward passes alone, as for old and reference log-probs",
    )
    parser.add_argument(
        "--fuse-output-layer",
        action="store_true",
        help="estimate memory with log-probs that multiply by the output layer themselves "
        "(--dynamic-batch-fuse-output-layer)",
    )
    parser.add_argument(
        "--no-advice",
        action="store_true",
        help="do not look for a cap and parallel sizes that would let the step end sooner, which "
        "takes about as long again as planning",
    )
    parser.add_argument("--out", metavar="PLAN.json", help="write the plan to this file")
    parser.add_argument(
        "--plot",
        metavar="FILE",
        help="draw the pipeline's time line and the fill of each micro-batch, to a .png file, or "
        "to an .svg file, where a browser tells of each pass under the pointer",
    )
    parser.add_argument("--plot-step", type=int, default=0, metavar="N", help="step to draw")


def _add_groups(parser: CommandParser) -> None:
    parser.add_argument(
        "--groups",
        metavar="FILE",
        help="group (prompt) of each sample, in files as for LENGTHS: steps hold whole groups",
    )
    parser.add_argument("--group-column", help="--column, for --groups")
    parser.add_argument(
        "--groups-per-step", type=int, metavar="N", help="groups of each step, with --groups"
    )
    parser.add_argument(
        "--last-groups",
        dest="last",
        choices=get_args(LastStep),
        default="keep",
        help="groups left over: a shorter last step, left out, or an error",
    )


def run(options: argparse.Namespace) -> int:
    """Plan, check the plan, print, write and draw it."""
    dims, config = made_of(ParallelDims, options), made_of(PlannerConfig, options)
    cost_model = cost_model_of(options)
    shape = None
    if options.model:
        shape = ModelShape.from_config_json(read(options.model))
        shape = replace(shape, fused_output=options.fuse_output_layer)
    groups = _read_groups(options)
    # What can fail at once does so before the long work.
    if options.plot:
        check_picture(options.plot)
    lengths = read_lengths(options.lengths, options.column)
    started = time.monotonic()
    plan = plan_batch(
        lengths,
        dims,
        config,
        cost_model,
        samples_per_step=options.samples_per_step,
        groups=groups,
        groups_per_step=options.groups_per_step,
        last=options.last,
        forward_only=options.forward_only,
    )
    planning_seconds = time.monotonic() - started
    # The checker shares no code with the planner: a plan that it refuses is never written.
    validate_plan(plan, lengths)
    if options.out:
        write(options.out, plan.to_json(lengths))
    # Advice plans anew: as long again as planning took, so that a command takes twice that.
    advice = 0.0 if options.no_advice else max(planning_seconds, _LEAST_ADVICE_SECONDS)
    _print(options, plan, lengths, shape, advice)
    if options.out:
        print(f"wrote {printable(options.out)}")
    if options.plot:
        _draw(options, plan, lengths)
        print(f"wrote {printable(options.plot)}")
    return 0


def _print(
    options: argparse.Namespace,
    plan: Plan,
    lengths: Sequence[int],
    shape: ModelShape | None,
    advice_seconds: float,
) -> None:
    statistics = [step_statistics(step, lengths) for step in plan.steps]
    print(report.plan_heading(plan))
    print(report.step_table(statistics))
    print(report.STEP_LEGEND)
    if shape is not None:  # the peak of all steps: memory must hold the worst of them
        memory = predicted_memory(total_statistics(statistics), plan.steps[0], shape)
        print(report.memory_line(memory))
    if len(plan.steps) == 1:
        print(explain(plan.steps[0], lengths, options.spell, advice_seconds=advice_seconds))
    else:
        print(report.packing_line(plan, lengths))
    print(f"digest {plan.digest()}")


def _draw(options: argparse.Namespace, plan: Plan, lengths: Sequence[int]) -> None:
    number = options.plot_step  # only now known to be one of the plan's
    if not 0 <= number < len(plan.steps):
        raise UsageError(f"--plot-step must be from 0 to {len(plan.steps) - 1}, got {number}")
    where = f"step {number}, " if len(plan.steps) > 1 else ""
    title = f"{where}{report.dims_line(plan.dims, plan.config)}"
    draw_step(plan.steps[number], lengths, options.plot, title=title)


def _read_groups(options: argparse.Namespace) -> list[str | int] | None:
    if options.groups is None:
        if options.group_column is not None:
            raise UsageError("--group-column needs --groups; set --groups to its file")
        return None
    if options.groups == options.lengths == "-":  # standard input can be read once
        raise UsageError("LENGTHS and --groups are both -; write one of them to a file")
    return read_groups(options.groups, options.group_column)
