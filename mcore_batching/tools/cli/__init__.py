"""The `mcore-batching` command: plan, check, compare with others' rules, replay a recorded job.

Exit status: 0 if all is well, 1 if a checked plan is broken, 2 for bad usage or bad input, 141 if
the reader of the output went away. Errors are one line on standard error.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from mcore_batching._version import __version__
from mcore_batching.planning import PlanFormatError, PlanningError
from mcore_batching.tools.cli import calibrate, check, compare, plan, replay
from mcore_batching.tools.cli.options import UsageError, complain, with_flags
from mcore_batching.tools.lengths_file import LengthsFileError

__all__ = ["build_parser", "main"]


def build_parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    parser = argparse.ArgumentParser(
        prog="mcore-batching",
        description="Plan micro-batches of variable-length samples; check and compare such plans.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"mcore-batching {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, command, help_text in (
        ("plan", plan, "plan a batch"),
        ("check", check, "check a plan"),
        ("compare", compare, "compare with plainer modes and other frameworks' rules"),
        ("replay", replay, "show a recorded job, and what other plans would have taken"),
        ("calibrate", calibrate, "time a layer stack, write a cost model"),
    ):
        command.add_arguments(commands.add_parser(name, help=help_text, allow_abbrev=False))
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with `arguments`, or those of the process, and return the exit status."""
    options = build_parser().parse_args(arguments)
    try:
        status: int = options.run(options)
        sys.stdout.flush()
    except (UsageError, LengthsFileError, PlanFormatError) as error:
        complain(str(error))
        return 2
    except PlanningError as error:
        complain(with_flags(str(error)))
        return 2
    except BrokenPipeError:
        # Python flushes standard output once more on exit and would complain there.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return status
