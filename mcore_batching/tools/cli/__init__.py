"""The `mcore-batching` command: plan, check, compare with others' rules, replay a recorded job.

Exit status: 0 if all is well, 1 if a checked plan is broken, 2 for bad usage or bad input, 141 if
the reader of the output went away. Errors are one line on standard error.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from mcore_batching._version import __version__
from mcore_batching.planning import MCoreBatchingError
from mcore_batching.tools.cli import calibrate, check, compare, plan, replay
from mcore_batching.tools.cli.options import CommandParser, complain

__all__ = ["build_parser", "main"]


def build_parser() -> CommandParser:
    """The command's arguments."""
    parser = CommandParser(
        prog="mcore-batching",
        description="Plan micro-batches of variable-length samples; check and compare such plans.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"mcore-batching {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, module, help_text in (
        ("plan", plan, "plan a batch"),
        ("check", check, "check a plan"),
        ("compare", compare, "compare with plainer modes and other frameworks' rules"),
        ("replay", replay, "show a recorded job, and what other plans would have taken"),
        ("calibrate", calibrate, "time a layer stack, write a cost model"),
    ):
        command = commands.add_parser(name, help=help_text, allow_abbrev=False)
        module.add_arguments(command)
        command.set_defaults(run=module.run, spell=command.spell)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with `arguments`, or those of the process, and return the exit status."""
    options = build_parser().parse_args(arguments)
    try:
        status: int = options.run(options)
        sys.stdout.flush()
    except MCoreBatchingError as error:
        complain(error.text(options.spell))
        return 2
    except BrokenPipeError:
        # Python flushes standard output once more on exit and would complain there.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return status
