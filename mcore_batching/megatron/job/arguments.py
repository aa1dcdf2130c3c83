"""The flags in Megatron's argument parser."""

from __future__ import annotations

import argparse

from mcore_batching.flags import ENGINE, FLAGS, add_flags
from mcore_batching.planning import Argument

LEARNT, FIXED = "auto", "fixed"
"""In place of a cost model's file."""


def flag_of(argument: Argument) -> str:
    """The argument as the flag that sets it; as the library spells it where no flag does.

    flag_of(Argument("on_oversize", "own-bin"))      "--dynamic-batch-on-oversize own-bin"
    """
    if argument.name not in FLAGS:
        return str(argument)
    flag = FLAGS[argument.name]
    return flag if argument.value is None else f"{flag} {argument.value}"


def add_dynamic_batch_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags; give it to Megatron as ``extra_args_provider``.

    Flags that the parser has already (frameworks define the first two themselves) are left alone.
    """
    return add_flags(parser, ENGINE)
