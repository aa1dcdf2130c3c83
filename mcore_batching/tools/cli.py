"""The `mcore-batching` command: plan, check, compare with others' rules, replay a recorded job.

Exit status: 0 if all is well; 1 if a checked plan is broken; 2 for bad usage or bad input; 74 if
input cannot be read or output cannot be written (a missing file, a full disk, a closed stream); 130
after Ctrl-C; 141 if the reader of the output went away. Errors are one line on standard error. A
file is written whole or not at all.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence

from mcore_batching._version import __version__
from mcore_batching.planning import MCoreBatchingError
from mcore_batching.tools import check, compare, flags, plan, replay
from mcore_batching.tools.options import CommandParser, HelpWithDefaults, complain

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
    for name, module, help_text in (
        ("plan", plan, "plan a batch"),
        ("check", check, "check a plan"),
        ("compare", compare, "compare with plainer modes and other frameworks' rules"),
        ("replay", replay, "show a recorded job, and what other plans would have taken"),
        ("flags", flags, "print the flags of training jobs"),
    ):
        # No abbreviations: a script's flag must not change its meaning when another is added.
        command = commands.add_parser(
            name, help=help_text, allow_abbrev=False, formatter_class=HelpWithDefaults
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
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
            return _run(arguments)
        finally:
            # Errors of a later flush, when Python exits, would change the exit status.
            sys.stdout.flush()
    except KeyboardInterrupt:
        complain("interrupted")
        return INTERRUPTED
    except OSError as error:  # of standard output
        _discard_output()
        if isinstance(error, BrokenPipeError):  # `mcore-batching … | head`
            return NO_READER
        complain(f"cannot write standard output: {error}")
        return INPUT_OUTPUT


def _run(arguments: Sequence[str] | None) -> int:
    options = build_parser().parse_args(arguments)
    try:
        status: int = options.run(options)
    except MCoreBatchingError as error:
        if isinstance(error.__cause__, BrokenPipeError):  # --out /dev/stdout
            return NO_READER
        complain(str(error))
        return INPUT_OUTPUT if isinstance(error.__cause__, OSError) else BAD_INPUT
    return status


def _discard_output() -> None:
    """Drop output that could not be written: Python would try to write it again on exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
