"""The `mcore-batching` command: make a plan from a file of lengths, check a plan.

Exit status: 0 if all is well, 1 if a checked plan is broken, 2 for bad usage or bad input, 141 if
the reader of the output went away. Errors are one line on standard error.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

from mcore_batching import report
from mcore_batching._version import __version__
from mcore_batching.planning import (
    CostModel,
    InvariantError,
    Layout,
    Plan,
    PlanFormatError,
    PlannerConfig,
    PlanningError,
    plan_batch,
    step_statistics,
)
from mcore_batching.planning.config import CHOICES
from mcore_batching.planning.groups import LastStep
from mcore_batching.planning.lengths_file import LengthsFileError, read_groups, read_lengths
from mcore_batching.planning.serialization import recorded_digest

_FLAG_OF_OPTION = {
    "data_parallel": "--dp",
    "pipeline_parallel": "--pp",
    "virtual_pipeline": "--vpp",
    "context_parallel": "--cp",
    "tensor_parallel": "--tp",
    "expert_parallel": "--ep",
}
_FLAG_OF_ARGUMENT = {
    **_FLAG_OF_OPTION,
    "max_tokens_per_gpu": "--max-tokens-per-gpu",
    "microbatch_group_size": "--microbatch-group-size",
    "samples_per_step": "--samples-per-step",
    "groups_per_step": "--groups-per-step",
    "last=": "--last-groups ",
    "plan_effort": "--plan-effort",
    "max_inflight_tokens": "--max-inflight-tokens",
}
_LENGTHS_HELP = (
    "lengths in tokens: a text file with one integer a line, a .csv or .jsonl file (with "
    "--column), or - for text on standard input"
)


class _UsageError(Exception):
    """Something that the user can put right; its text is shown after `mcore-batching:`."""


def build_parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    parser = argparse.ArgumentParser(
        prog="mcore-batching",
        description="Plan micro-batches of variable-length samples, and check such plans.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"mcore-batching {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_plan(commands.add_parser("plan", help="plan a batch", allow_abbrev=False))
    _add_check(commands.add_parser("check", help="check a plan", allow_abbrev=False))
    return parser


def _add_plan(parser: argparse.ArgumentParser) -> None:
    parser.description = "Decide which samples share a micro-batch, on which rank, in which order."
    parser.add_argument("lengths", metavar="LENGTHS", help=_LENGTHS_HELP)
    parser.add_argument("--column", help="column of a CSV file or key of JSON lines")
    parser.add_argument(
        "--max-tokens-per-gpu",
        type=int,
        required=True,
        metavar="N",
        help="most padded tokens one GPU holds of a micro-batch",
    )
    for option, flag in _FLAG_OF_OPTION.items():
        parser.add_argument(
            flag,
            dest=option,
            type=int,
            default=_default(Layout, option),
            metavar="N",
            help=f"{option.replace('_', '-')} size (default: %(default)s)",
        )
    parser.add_argument(
        "--sequence-parallel", action="store_true", help="sequence parallelism is on"
    )
    parser.add_argument(
        "--microbatch-group-size",
        type=int,
        metavar="N",
        help="micro-batches a model chunk runs in turn, with --vpp (default: --pp)",
    )
    parser.add_argument(
        "--samples-per-step",
        type=int,
        metavar="N",
        help="cut the samples into consecutive steps of this many (default: one step)",
    )
    _add_groups(parser)
    for option, help_text in (
        ("on_oversize", "a sample over the cap runs alone, or is an error"),
        ("fill", "split micro-batches before adding placeholders, or never split"),
        ("packing", "auto takes the one of the others that needs fewer micro-batches"),
        (
            "balance",
            "what the plan is made for: the pipeline's end, or full micro-batches evened out by "
            "cost or tokens; auto is pipeline",
        ),
    ):
        parser.add_argument(
            f"--{option.replace('_', '-')}",
            choices=CHOICES[option],
            default=_default(PlannerConfig, option),
            help=f"{help_text} (default: %(default)s)",
        )
    parser.add_argument(
        "--plan-effort",
        type=int,
        default=_default(PlannerConfig, "plan_effort"),
        metavar="N",
        help="how long to search: simulated passes of a micro-batch for each sample of a step "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--max-inflight-tokens",
        type=int,
        metavar="N",
        help="most padded tokens whose activations the first pipeline stage may hold at a time",
    )
    parser.add_argument(
        "--cost-model",
        metavar="FILE",
        help="JSON of what samples and micro-batches cost, as `calibrate` writes it (default: "
        "L + L²/24576 tokens a sample of L tokens, 256 a micro-batch, backward twice forward)",
    )
    parser.add_argument("--out", metavar="PLAN.json", help="write the plan to this file")
    parser.set_defaults(run=_plan)


def _add_groups(parser: argparse.ArgumentParser) -> None:
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
        choices=get_args(LastStep),
        default="keep",
        help="groups left over: a shorter last step, left out, or an error (default: %(default)s)",
    )


def _default(options: type[Layout] | type[PlannerConfig], name: str) -> Any:
    return next(option.default for option in fields(options) if option.name == name)


def _add_check(parser: argparse.ArgumentParser) -> None:
    parser.description = "Check a plan against its lengths, and name the invariant that it breaks."
    parser.add_argument("plan", metavar="PLAN.json", help="a plan, as --out writes it")
    parser.add_argument("lengths", metavar="LENGTHS", help=_LENGTHS_HELP)
    parser.add_argument("--column", help="column of a CSV file or key of JSON lines")
    parser.set_defaults(run=_check)


def _plan(options: argparse.Namespace) -> int:
    layout = Layout(
        **{option: getattr(options, option) for option in _FLAG_OF_OPTION},
        sequence_parallel=options.sequence_parallel,
        microbatch_group_size=options.microbatch_group_size,
    )
    config = PlannerConfig(
        max_tokens_per_gpu=options.max_tokens_per_gpu,
        **{option: getattr(options, option) for option in CHOICES},
        plan_effort=options.plan_effort,
        max_inflight_tokens=options.max_inflight_tokens,
    )
    cost_model = CostModel.from_json(_read(options.cost_model)) if options.cost_model else None
    groups = _read_groups(options)
    lengths = read_lengths(options.lengths, options.column)
    plan = plan_batch(
        lengths,
        layout,
        config,
        cost_model,
        samples_per_step=options.samples_per_step,
        groups=groups,
        groups_per_step=options.groups_per_step,
        last=options.last_groups,
    )
    plan.validate(lengths)
    if options.out:
        _write(options.out, plan.to_json())
    print(report.plan_heading(plan))
    report.print_table(
        report.step_table([step_statistics(step, lengths) for step in plan.steps]), sys.stdout
    )
    print(report.STEP_LEGEND)
    if len(plan.steps) == 1:
        print(plan.steps[0].explain(lengths))
    print(f"digest {plan.digest()}")
    if options.out:
        print(f"wrote {options.out}")
    return 0


def _read_groups(options: argparse.Namespace) -> list[str | int] | None:
    if options.groups is None:
        if options.group_column is not None:
            raise _UsageError("--group-column needs --groups; set --groups to the file with it")
        return None
    if options.groups == options.lengths == "-":
        raise _UsageError("LENGTHS and --groups are both -; write one of them to a file")
    return read_groups(options.groups, options.group_column)


def _check(options: argparse.Namespace) -> int:
    text = _read(options.plan)
    lengths = read_lengths(options.lengths, options.column)
    # The digest comes last: "changed after it was written" says less than what the change broke.
    plan = Plan.from_json(text, verify_digest=False)
    try:
        plan.validate(lengths)
    except InvariantError as error:
        _complain(f"{options.plan}: {error}")
        return 1
    recorded, found = recorded_digest(text), plan.digest()
    if recorded not in (None, found):
        _complain(
            f"{options.plan}: the invariants hold, but the digest is {recorded} and the content "
            f"gives {found}: the plan was changed after it was written"
        )
        return 1
    held = ["exact cover", "cap", "equal count"]
    if plan.config.fill == "split":
        held.append("split before placeholder")
    digest = "digest matches" if recorded else "no digest recorded"
    print(f"{options.plan}: {report.plan_heading(plan)}: {', '.join(held)} hold; {digest}")
    return 0


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _UsageError(f"cannot read {path}: {error}") from None


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise _UsageError(f"cannot write {path}: {error}; set --out to a writable file") from None


def _complain(message: str) -> None:
    print(f"mcore-batching: {' '.join(message.split())}", file=sys.stderr)


def _with_flags(message: str) -> str:
    """A library error in the command's words: argument names become flags."""
    for option, flag in _FLAG_OF_ARGUMENT.items():
        message = re.sub(rf"\b(?<!-){option}\b", flag, message)
    return message


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with `arguments`, or those of the process, and return the exit status."""
    options = build_parser().parse_args(arguments)
    try:
        status: int = options.run(options)
        sys.stdout.flush()
    except (_UsageError, LengthsFileError, PlanFormatError) as error:
        _complain(str(error))
        return 2
    except PlanningError as error:
        _complain(_with_flags(str(error)))
        return 2
    except BrokenPipeError:
        # Python flushes standard output once more on exit and would complain there.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return status
