"""Arguments, files and messages that several commands share."""

from __future__ import annotations

import argparse
import contextlib
import sys
from dataclasses import fields
from typing import TYPE_CHECKING, Any, NoReturn

from mcore_batching.planning import (
    CHOICES,
    Argument,
    CostModel,
    MCoreBatchingError,
    ParallelDims,
    PlannerConfig,
)
from mcore_batching.planning.costs.layers_of import config_of_json, first_guess
from mcore_batching.planning.errors import printable
from mcore_batching.planning.json_text import read_document
from mcore_batching.tools.files import write_whole

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

FLAG_OF_SIZE = {
    "data_parallel": "--dp",
    "pipeline_parallel": "--pp",
    "virtual_pipeline": "--vpp",
    "context_parallel": "--cp",
    "tensor_parallel": "--tp",
    "expert_parallel": "--ep",
}
_LENGTHS_HELP = (
    "lengths in tokens: a text file with one integer per line, a .csv or .jsonl file (with "
    "--column), or - for text on standard input"
)


class UsageError(MCoreBatchingError, ValueError):
    """A mistake in the command line, or a file that it names and that cannot be used."""


class CommandParser(argparse.ArgumentParser):
    """A parser that knows which flag sets which argument of the library.

    The `dest` of a flag is the argument's name in the library.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        self.flags: dict[str, str] = {}
        super().__init__(*args, **settings)

    def add_argument(self, *names: str, **settings: Any) -> argparse.Action:
        """As argparse's."""
        action = super().add_argument(*names, **settings)
        # The flag itself, or for a positional argument its name in the usage.
        self.flags[action.dest] = [*action.option_strings, str(action.metavar)][0]
        return action

    def print_help(self, file: SupportsWrite[str] | None = None) -> None:
        """As argparse's, but output that cannot be written is an error."""
        (file or sys.stdout).write(self.format_help())

    def error(self, message: str) -> NoReturn:
        """As argparse's, with what a terminal would act on escaped."""
        # The message may quote any word of the command line.
        super().error(printable(message))

    def spell(self, argument: Argument) -> str:
        """An argument as this command calls it; as the library does if it has no flag for it."""
        flag = self.flags.get(argument.name)
        if flag is None:  # an argument of the library alone
            return str(argument)
        return flag if argument.value is None else f"{flag}={argument.value}"


def add_lengths(parser: CommandParser) -> None:
    """LENGTHS and --column."""
    parser.add_argument("lengths", metavar="LENGTHS", help=_LENGTHS_HELP)
    parser.add_argument("--column", help="column of a CSV file or key of JSON lines")


def add_dims(parser: CommandParser) -> None:
    """The cap, and the sizes of the parallel groups."""
    parser.add_argument(
        "--max-tokens-per-gpu",
        type=int,
        required=True,
        metavar="N",
        help="most padded tokens one GPU holds of a micro-batch",
    )
    # Defaults are the library's, so that both plan the same.
    for option, flag in FLAG_OF_SIZE.items():
        parser.add_argument(
            flag,
            dest=option,
            type=int,
            default=default(ParallelDims, option),
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


def add_search(parser: CommandParser) -> None:
    """The search's effort, its bounds on samples and memory, and its costs."""
    add_plan_effort(parser)
    parser.add_argument(
        "--max-samples-per-row",
        type=int,
        metavar="N",
        help="most samples that share a micro-batch (default: as many as the cap holds)",
    )
    parser.add_argument(
        "--max-inflight-tokens",
        type=int,
        metavar="N",
        help="most padded tokens whose activations the first pipeline stage may hold at a time",
    )
    parser.add_argument(
        "--dynamic-cp",
        dest="max_context_parallel",
        type=int,
        metavar="MAX",
        help="choose a context-parallel size for each micro-batch, up to MAX of the data- and "
        "context-parallel ranks: a power of two, or all of them (default: --cp for all)",
    )
    add_cost_model(parser)
    parser.add_argument(
        "--model",
        "--model-config",
        metavar="config.json",
        help="a model's config.json, as Hugging Face's have it: its layers and stages are what "
        "samples cost, unless --cost-model says it; `plan` also estimates the memory of "
        "activations and logits",
    )


def add_cost_model(parser: CommandParser) -> None:
    """--cost-model."""
    parser.add_argument(
        "--cost-model",
        metavar="FILE",
        help="JSON of what samples and micro-batches cost: the cost_model.json that a job writes "
        "under --dynamic-batch-record (default: "
        "L + L²/24576 for a sample of L tokens, 256 for a micro-batch, backward twice forward)",
    )


def add_plan_effort(parser: CommandParser) -> None:
    """--plan-effort."""
    parser.add_argument(
        "--plan-effort",
        type=int,
        default=default(PlannerConfig, "plan_effort"),
        metavar="N",
        help="how long to search: simulated passes of a micro-batch for each sample of a step "
        "(default: %(default)s)",
    )


def default(options: type[ParallelDims] | type[PlannerConfig], name: str) -> Any:
    """The default of one of the planner's options."""
    # Of a class with slots the attribute of that name is not its default.
    return next(option.default for option in fields(options) if option.name == name)


def dims_of(options: argparse.Namespace) -> ParallelDims:
    """The parallel dims of `add_dims`'s flags."""
    return ParallelDims(
        **{option: getattr(options, option) for option in FLAG_OF_SIZE},
        sequence_parallel=options.sequence_parallel,
        microbatch_group_size=options.microbatch_group_size,
    )


def config_of(options: argparse.Namespace) -> PlannerConfig:
    """The planner's options, as far as the command has flags for its policies."""
    return PlannerConfig(
        max_tokens_per_gpu=options.max_tokens_per_gpu,
        # `compare` has no flags for these: each of its planners sets its own.
        **{option: getattr(options, option) for option in CHOICES if hasattr(options, option)},
        plan_effort=options.plan_effort,
        max_samples_per_row=options.max_samples_per_row,
        max_inflight_tokens=options.max_inflight_tokens,
        max_context_parallel=options.max_context_parallel,
    )


def cost_model_of(options: argparse.Namespace) -> CostModel | None:
    """The costs in the file of --cost-model, or of the model of --model; None without either."""
    if options.cost_model:
        return CostModel.from_json(read(options.cost_model))
    if getattr(options, "model", None) is None:
        return None
    ranks = {"expert_model_parallel_size": options.expert_parallel}
    return first_guess(config_of_json(read(options.model)) | ranks)


def read(path: str) -> str:
    """The text of a file of JSON.

    Raises:
        UsageError: it cannot be read.
    """
    try:
        return read_document(path)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}") from error


def write(path: str, text: str) -> None:
    """Write a line or more to a file.

    Raises:
        UsageError: it cannot be written.
    """
    try:
        write_whole(path, text + "\n")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error}; name a writable file") from error


def complain(message: str) -> None:
    """One line on standard error, if there is one to write to."""
    if sys.stderr is not None:
        # One line, so that logs of many processes stay readable; nobody is left to tell of a fault.
        with contextlib.suppress(OSError):
            line = printable(" ".join(message.split()))
            print(f"mcore-batching: {line}", file=sys.stderr, flush=True)


def check_at_least(options: argparse.Namespace, name: str, minimum: int) -> None:
    """Check an integer of the command line.

    Raises:
        UsageError: it is below `minimum`.
    """
    value = getattr(options, name)
    if value < minimum:
        raise UsageError(Argument(name), f" must be {minimum} or more, got {value}; increase it")
