"""The `mcore-batching` command: plan, check, compare with others' rules, replay a recorded job. The
short commands, `check` and `flags`, are here.

Exit status: 0 if all is well; 1 if a checked plan is broken; 2 for bad usage or bad input; 74 if
input cannot be read or output cannot be written (a missing file, a full disk, a closed stream); 130
after Ctrl-C; 141 if the reader of the output went away. Errors are one line on standard error. A
file is written whole or not at all.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import sys
from collections.abc import Sequence
from functools import partial

from mcore_batching._version import __version__
from mcore_batching.flags import add_dynamic_batch_arguments
from mcore_batching.planning import (
    InvariantError,
    MCoreBatchingError,
    Plan,
    PlanFormatError,
    validate_plan,
)
from mcore_batching.planning.errors import printable
from mcore_batching.planning.files import parse_json_dict
from mcore_batching.planning.plans.plan import lengths_digest
from mcore_batching.tools import compare, plan, replay, report
from mcore_batching.tools.lengths_file import read_lengths
from mcore_batching.tools.options import (
    CommandParser,
    HelpWithDefaults,
    add_lengths,
    complain,
    read,
)

__all__ = ["main"]

# Exit statuses; 74 is EX_IOERR of sysexits.h, the last two are 128 plus the signal's number.
BAD_INPUT, INPUT_OUTPUT, INTERRUPTED, NO_READER = 2, 74, 130, 141


def build_parser() -> CommandParser:
    """The command's arguments."""
    parser = CommandParser(
        prog="mcore-batching",
        description="Plan micro-batches of variable-length samples; check and compare such plans.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"mcore-batching {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    others = "compare with plainer modes and other frameworks' rules"
    for name, text, add_arguments, run in (
        ("plan", "plan a batch", plan.add_arguments, plan.run),
        ("check", "check a plan", add_check_arguments, run_check),
        ("compare", others, compare.add_arguments, compare.run),
        ("replay", "show predictions of a recorded job", replay.add_arguments, replay.run),
        ("flags", "print the flags of training jobs", describe_flags, run_flags),
    ):
        # No abbreviations: a script's flag must not change its meaning when another is added.
        command = commands.add_parser(
            name, help=text, allow_abbrev=False, formatter_class=HelpWithDefaults
        )
        add_arguments(command)
        command.set_defaults(run=run)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with `arguments`, or those of the process, and return the exit status."""
    if sys.stdout is None:  # `>&-` in a shell
        complain("standard output is closed; redirect it to a file or to /dev/null")
        return INPUT_OUTPUT
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a locale without UTF-8 has no "²"
    try:
        try:
            options = build_parser().parse_args(arguments)
            return int(options.run(options))
        except MCoreBatchingError as error:
            if isinstance(error.__cause__, BrokenPipeError):  # --out /dev/stdout
                return NO_READER
            complain(str(error))
            return INPUT_OUTPUT if isinstance(error.__cause__, OSError) else BAD_INPUT
        finally:
            # Errors of a later flush, when Python exits, would change the exit status.
            sys.stdout.flush()
    except KeyboardInterrupt:
        complain("interrupted")
        return INTERRUPTED
    except OSError as error:  # of standard output
        # What could not be written is dropped: Python would try to write it again on exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):  # `mcore-batching … | head`
            return NO_READER
        complain(f"cannot write standard output: {error}")
        return INPUT_OUTPUT


def add_check_arguments(parser: CommandParser) -> None:
    """The arguments of `check`."""
    parser.description = "Check a plan against its lengths, and name the invariant that it breaks."
    parser.add_argument("plan", metavar="PLAN.json", help="a plan, as --out writes it")
    add_lengths(parser)


def run_check(options: argparse.Namespace) -> int:
    """Check a plan against its lengths; status 1 if an invariant is broken."""
    text = read(options.plan)
    lengths = read_lengths(options.lengths, options.column)
    document = parse_json_dict(text, "a plan in JSON", PlanFormatError)
    # Digests come last: a broken invariant is a better answer than "changed after it was written".
    checked = Plan.of_document(document, verify_digest=False)
    recorded, of_lengths = document.get("digest"), document.get("lengths_digest")
    fault, found = None, checked.digest()
    try:
        validate_plan(checked, lengths)
    except InvariantError as error:
        fault = str(error)
    else:
        # Other lengths may satisfy every invariant by chance, so their digest has the last word.
        if of_lengths not in (None, lengths_digest(lengths)):
            fault = f"invariants hold, but it was made from other lengths than {options.lengths}"
        elif recorded not in (None, found):
            fault = f"invariants hold, but its digest is {recorded}, the content's {found}: changed"
    if fault is not None:
        complain(f"{options.plan}: {fault}")
        return 1
    digest = "digest matches" if recorded else "no digest recorded"
    if of_lengths is None:
        digest += "; the plan does not record the lengths it was made from"
    name, heading = printable(options.plan), report.plan_heading(checked)
    print(f"{name}: {heading}: every invariant holds; {digest}")
    return 0


def describe_flags(parser: CommandParser) -> None:
    """The arguments of `flags`: none."""
    parser.description = (
        "Print the flags of a training job: of `python -m mcore_batching.run SCRIPT`, and of a "
        "loop with a parser that has them by add_dynamic_batch_arguments."
    )


def run_flags(_options: argparse.Namespace) -> int:
    """Print the flags of training jobs, by theme."""
    # argparse would fill the whole width of a wide terminal.
    width = min(100, shutil.get_terminal_size().columns)
    listed = argparse.ArgumentParser(
        prog="torchrun … -m mcore_batching.run SCRIPT",
        usage="%(prog)s --use-dynamic-batch-size --max-tokens-per-gpu TOKENS [more flags]",
        add_help=False,
        formatter_class=partial(HelpWithDefaults, width=width),
    )
    print(add_dynamic_batch_arguments(listed).format_help(), end="")
    return 0
