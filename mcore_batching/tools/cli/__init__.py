"""The `mcore-batching` command: plan, check, compare with others' rules, replay a recorded job.

Exit status: 0 if all is well; 1 if a checked plan is broken; 2 for bad usage or bad input, a file
that cannot be opened included; 74 if reading or writing fails (a full disk, closed standard input
or output); 130 after Ctrl-C; 141 if the reader of the output went away. Errors are one line on
standard error. A file is written whole or not at all.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Sequence

from mcore_batching._version import __version__
from mcore_batching.planning import MCoreBatchingError
from mcore_batching.tools.cli import check, compare, flags, plan, replay
from mcore_batching.tools.cli.options import CommandParser, complain

__all__ = ["main"]

USAGE, INPUT_OUTPUT, INTERRUPTED, NO_READER = 2, 74, 130, 141
"""Exit statuses; 74 is EX_IOERR of sysexits.h, the last two are 128 and the signal's number."""
_DEVICE_FAULTS = {errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""A file's errors that are not the fault of its name."""


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
        command = commands.add_parser(name, help=help_text, allow_abbrev=False)
        module.add_arguments(command)
        command.set_defaults(run=module.run, spell=command.spell)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with `arguments`, or those of the process, and return the exit status."""
    if sys.stdout is None:  # `>&-` in a shell
        complain("standard output is closed; redirect it to a file or to /dev/null")
        return INPUT_OUTPUT
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A locale without UTF-8 has no "²" and no "µ".
        sys.stdout.reconfigure(errors="replace")
    try:
        try:
            return _run(arguments)
        finally:
            # Here, where errors are caught: what is left is flushed again on exit, without a word.
            sys.stdout.flush()
    except KeyboardInterrupt:
        complain("interrupted")
        return INTERRUPTED
    except BrokenPipeError:  # `mcore-batching … | head`
        _discard_output()
        return NO_READER
    except OSError as error:
        complain(f"input or output failed: {error}")
        _discard_output()
        return INPUT_OUTPUT


def _run(arguments: Sequence[str] | None) -> int:
    options = build_parser().parse_args(arguments)
    try:
        status: int = options.run(options)
    except MCoreBatchingError as error:
        complain(error.text(options.spell))
        # A full disk is no mistake in the command line, whatever error it came wrapped in.
        failed = isinstance(error.__cause__, OSError) and error.__cause__.errno in _DEVICE_FAULTS
        return INPUT_OUTPUT if failed else USAGE
    return status


def _discard_output() -> None:
    """Drop what standard output does not take: Python tries again on exit and would complain."""
    try:
        sys.stdout.flush()
    except OSError:
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
