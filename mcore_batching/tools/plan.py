"""`mcore-batching plan`: make a plan from a file of lengths."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace

from mcore_batching.planning import (
    ConfigError,
    ParallelDims,
    Plan,
    PlannerConfig,
    plan_batch,
    step_statistics,
    validate_plan,
)
from mcore_batching.planning.costs.layers_of import config_of_json
from mcore_batching.planning.errors import printable
from mcore_batching.planning.plans.memory import ModelShape, predicted_memory
from mcore_batching.planning.plans.statistics import total_statistics
from mcore_batching.tools import report
from mcore_batching.tools.explain import explain
from mcore_batching.tools.lengths_file import read_groups, read_lengths
from mcore_batching.tools.options import (
    CommandParser,
    add_dims,
    add_lengths,
    add_options,
    add_search,
    cost_model_of,
    made_of,
    progress,
    read,
    write,
)
from mcore_batching.tools.picture import check_picture, draw_step


def add_arguments(parser: CommandParser) -> None:
    """The command's arguments."""
    parser.description = "Decide which samples share a micro-batch, on which rank, in which order."
    add_lengths(parser)
    add_dims(parser)
    add_options(parser.add_argument_group("packing"), "on_oversize", "fill", "packing", "balance")
    add_search(parser)
    shared = parser.add_argument_group(
        "beginnings that samples of a group share (--dynamic-batch-share-prefixes)"
    )
    shared.add_argument(
        "--group-column", help="column or key with the group (uid) of each sample; with the next"
    )
    shared.add_argument(
        "--prompt-column", help="column or key with the prompt's tokens, the same for a group"
    )
    output = parser.add_argument_group("what is planned, printed and written")
    output.add_argument(
        "--forward-only",
        action="store_true",
        help="plan forward passes alone, as for old and reference log-probs",
    )
    output.add_argument(
        "--fuse-output-layer",
        action="store_true",
        help="estimate memory with log-probs that multiply by the output layer themselves "
        "(--dynamic-batch-fuse-output-layer)",
    )
    output.add_argument(
        "--no-advice",
        action="store_true",
        help="do not look for a cap and parallel sizes that would let the step end sooner, which "
        "takes at most as long as planning does",
    )
    output.add_argument("--out", metavar="PLAN.json", help="write the plan to this file")
    output.add_argument(
        "--plot",
        metavar="FILE",
        help="draw the first step's time line, to a .png or an .svg file",
    )


def run(options: argparse.Namespace) -> int:
    """Plan, check the plan, print, write and draw it."""
    dims, config = made_of(ParallelDims, options), made_of(PlannerConfig, options)
    cost_model = cost_model_of(options)
    shape = None
    if options.model:
        shape = ModelShape.of(config_of_json(read(options.model)))
        shape = replace(shape, fused_output=options.fuse_output_layer)
    # What can fail at once does so before the long work.
    if options.plot:
        check_picture(options.plot)
    lengths = read_lengths(options.lengths, options.column)
    shares = options.group_column is not None
    if shares != (options.prompt_column is not None):
        raise ConfigError("--group-column and --prompt-column need each other; set both or none")
    prompts = read_lengths(options.lengths, options.prompt_column) if shares else None
    groups = read_groups(options.lengths, options.group_column) if shares else None
    started = time.process_time()
    with progress("planning") as on_step:
        plan = plan_batch(
            lengths,
            dims,
            config,
            cost_model,
            samples_per_step=options.samples_per_step,
            groups=groups,
            prompts=prompts,
            forward_only=options.forward_only,
            on_step=on_step,
        )
    advice_seconds = 0.0 if options.no_advice else time.process_time() - started
    # The checker shares no code with the planner: a plan that it refuses is never written.
    validate_plan(plan, lengths)
    if options.out:
        write(options.out, plan.to_json(lengths).encode() + b"\n")
    _print(options, plan, lengths, shape, advice_seconds)
    if options.out:
        print(f"wrote {printable(options.out)}")
    if options.plot:
        # Last: what fails while drawing takes nothing from a plan that is printed and written.
        draw_step(plan.steps[0], lengths, options.plot)
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
        print(
            f"estimated memory per rank beside weights, gradients and optimizer: first stage "
            f"{memory.first_stage_bytes / 2**30:.2f} GiB, last stage "
            f"{memory.last_stage_bytes / 2**30:.2f} GiB "
            f"({memory.logit_bytes / 2**30:.2f} GiB of it for logits)"
        )
    if len(plan.steps) == 1:
        with progress("looking for advice"):
            text = explain(plan.steps[0], lengths, advice_seconds=advice_seconds)
        print(text)
    elif not options.no_advice:
        print("plan one step's samples alone to see what holds it back and what would help")
    print(f"digest {plan.digest()}")
