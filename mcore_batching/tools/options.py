"""Arguments, files and messages that several commands share."""

from __future__ import annotations

import argparse
import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from mcore_batching.flags import refuse_removed, settings_of
from mcore_batching.planning import (
    CostModel,
    MCoreBatchingError,
    ParallelDims,
    PlannerConfig,
)
from mcore_batching.planning.costs.layers_of import config_of_json, first_guess
from mcore_batching.planning.errors import FLAG_OF, printable
from mcore_batching.planning.files import read_text, write_whole

_Settings = TypeVar("_Settings", ParallelDims, PlannerConfig)


# Of options that are not called by their name without the prefix of training jobs' flags.
SHORT_FLAGS = {"max_context_parallel": "--dynamic-cp"}


class UsageError(MCoreBatchingError, ValueError):
    """A mistake in the command line, or a file that it names and that cannot be used."""


class CommandParser(argparse.ArgumentParser):
    """A parser of flags; each one's `dest` is the argument of the library that it sets."""

    def _print_message(self, message: str, file: Any = None) -> None:
        if message and file is sys.stdout:
            file.write(message)  # argparse's own passes over a full disk in silence
        else:
            super()._print_message(message, file)


class HelpWithDefaults(argparse.ArgumentDefaultsHelpFormatter):
    """Help that adds a flag's default to its text, where it has one and the text does not."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        # argparse's own adds every default, `False` and `None` included.
        if action.default in (None, False) or "default" in str(action.help):
            return action.help
        return super()._get_help_string(action)


def add_lengths(parser: CommandParser) -> None:
    """LENGTHS and --column."""
    parser.add_argument(
        "lengths",
        metavar="LENGTHS",
        help="lengths in tokens: a text file with one integer per line, a .csv or .jsonl file "
        "(with --column), or - for text on standard input",
    )
    parser.add_argument("--column", help="column of a CSV file or key of JSON lines")


def add_dims(parser: Any) -> None:
    """The cap, and the sizes of the parallel groups."""
    parser = parser.add_argument_group("cap, parallel sizes, steps")
    add_options(parser, "max_tokens_per_gpu", required=True)
    for size in fields(ParallelDims):
        if size.type == "int":
            parser.add_argument(
                FLAG_OF[size.name],
                dest=size.name,
                type=int,
                default=size.default,  # the library's, so that both plan the same
                metavar="N",
                help=f"{size.name.replace('_', '-')} size",
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


def add_search(parser: CommandParser) -> None:
    """The search's effort, its bound on samples, and its costs."""
    refuse_removed(parser, "--")
    search = parser.add_argument_group("search")
    add_options(search, "plan_effort", "max_samples_per_row", "max_context_parallel")
    costs = parser.add_argument_group("what samples cost")
    costs.add_argument(
        "--cost-model",
        metavar="FILE",
        help="JSON of what samples and micro-batches cost: the cost_model.json that a job writes "
        "under --dynamic-batch-record (default: "
        "L + L²/24576 for a sample of L tokens, 256 for a micro-batch, backward twice forward)",
    )
    costs.add_argument(
        "--model",
        "--model-config",
        metavar="config.json",
        help="a model's config.json, as Hugging Face's have it: its layers and stages are what "
        "samples cost, unless --cost-model gives it; `plan` also estimates the memory of "
        "activations and logits",
    )


def add_options(parser: Any, *names: str, required: bool = False) -> None:
    """Options of the planner, by training jobs' flags and shorter ones."""
    for name in names:
        short = SHORT_FLAGS.get(name, f"--{name.replace('_', '-')}")
        flags = dict.fromkeys((short, FLAG_OF[name]))
        parser.add_argument(*flags, dest=name, required=required, **settings_of(name))


def made_of(kind: type[_Settings], options: argparse.Namespace) -> _Settings:
    """Parallel dims or the planner's options, of those flags that the command has."""
    names = [option.name for option in fields(kind)]
    return kind(**{name: getattr(options, name) for name in names if name in options})


def cost_model_of(options: argparse.Namespace) -> CostModel | None:
    """The costs in the file of --cost-model, or of the model of --model; None without either."""
    if options.cost_model:
        return CostModel.from_json(read(options.cost_model))
    if options.model is None:
        return None
    ranks = {"expert_model_parallel_size": options.expert_parallel}
    return first_guess(config_of_json(read(options.model)) | ranks)


def read(path: str) -> str:
    """The text of a file of JSON."""
    try:
        return read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}") from error


def write(path: str | Path, content: bytes) -> None:
    """Write a file."""
    try:
        write_whole(path, content)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}; name another file") from error


def complain(message: str) -> None:
    """One line on standard error, if it is open: logs of many processes stay readable."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError):  # a full disk
            line = printable(" ".join(message.split()))
            print(f"mcore-batching: {line}", file=sys.stderr, flush=True)


SECONDS = 1.0  # from one drawing to the next; shorter work shows nothing


@contextlib.contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show what runs and for how long, and a bar once the function given has been called with the
    number of parts that are done and of all."""
    parts = [0, 0]
    ended = threading.Event()
    started = time.monotonic()

    def count(done: int, total: int) -> None:
        parts[:] = done, total

    def draw() -> None:
        while not ended.wait(SECONDS):
            done, total = parts
            bar = f"[{'#' * (30 * done // total):<30}] {done}/{total}, " if total else ""
            _show(f"{what}: {bar}{time.monotonic() - started:.0f} s")
        _show("")

    if sys.stderr is None or not sys.stderr.isatty():
        yield count
        return
    drawing = threading.Thread(target=draw, daemon=True)
    drawing.start()
    try:
        yield count
    finally:
        ended.set()
        drawing.join()


def _show(line: str) -> None:
    with contextlib.suppress(OSError):
        # Over what stood there before; one column less than a terminal has.
        print(f"\r{line:<79}\r", end="", file=sys.stderr, flush=True)
