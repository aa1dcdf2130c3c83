"""`mcore-batching flags`: the flags of training jobs, by theme."""

from __future__ import annotations

import argparse
import shutil
from functools import partial

from mcore_batching.flags import THEMES, add_flags
from mcore_batching.tools.options import CommandParser, HelpWithDefaults


def add_arguments(parser: CommandParser) -> None:
    """The command's arguments: none."""
    parser.description = (
        "Print the flags of a training job: of `python -m mcore_batching.run SCRIPT`, and of a "
        "loop with a parser that has them by add_dynamic_batch_arguments."
    )


def run(_options: argparse.Namespace) -> int:
    """Print them."""
    # argparse would fill the whole width of a wide terminal.
    width = min(100, shutil.get_terminal_size().columns)
    listed = argparse.ArgumentParser(
        prog="torchrun … -m mcore_batching.run SCRIPT",
        usage="%(prog)s --use-dynamic-batch-size --max-tokens-per-gpu TOKENS [more flags]",
        add_help=False,
        formatter_class=partial(HelpWithDefaults, width=width),
    )
    print(add_flags(listed, THEMES).format_help(), end="")
    return 0
