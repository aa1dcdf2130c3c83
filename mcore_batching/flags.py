"""The flags of training jobs, by theme: data that the engine and the command line both read.

`OPTIONS` is the one declaration of a flag, `FLAGS` the one table from the library's names of
arguments to flags. Needs neither torch nor megatron: `mcore-batching flags` prints them anywhere.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from typing import Any

from mcore_batching.planning import CHOICES, PlannerConfig
from mcore_batching.planning.errors import FLAG_OF

PREFIX = "--dynamic-batch-"

DEFAULT_TIMEOUT_SECONDS = 600.0
LEARNT, FIXED = "auto", "fixed"
"""In place of a cost model's file."""

CUDA_ROW_MULTIPLE = 128
"""Tokens of each rank to a multiple of which rows are padded on CUDA by default: kernels waste no
part of a tile, and the allocator, which keeps freed blocks by their size, sees few sizes."""


def _flag(text: str, **settings: Any) -> dict[str, Any]:
    return {"help": text, **settings}


_tokens = functools.partial(_flag, type=int, metavar="TOKENS")
_number = functools.partial(_flag, type=int, metavar="N")
_switch = functools.partial(_flag, action="store_true")

THEMES: dict[str, dict[str, dict[str, Any]]] = {
    "the cap, and rows under it": {
        "use_dynamic_batch_size": _switch(
            "pack variable-length samples into micro-batches under --max-tokens-per-gpu"
        ),
        "max_tokens_per_gpu": _tokens(
            "most padded tokens a micro-batch may put on one GPU; a micro-batch holds up to this "
            "times the context-parallel size"
        ),
        "on_oversize": _flag("a sample over the cap runs alone in its micro-batch, or is refused"),
        "packing": _flag(
            "how samples are packed under the cap (auto: whichever needs fewer micro-batches)"
        ),
        "max_samples_per_row": _number(
            "most samples that share a micro-batch, for kernels and memory that go by their number"
        ),
        "share_prefixes": _flag(
            "compute what samples have in common at their beginnings once, as prompts of a group "
            "and turns of a trajectory; each keeps its own response, fields, weight and outputs",
            action=argparse.BooleanOptionalAction,
            default=False,
        ),
        "pad_each_to": _tokens(
            "pad every sample to a multiple of this, beside what parallelism needs"
        ),
        "pad_total_to": _tokens(
            "pad every packed row to a multiple of this (FP8, memory fragmentation); default: on "
            f"CUDA {CUDA_ROW_MULTIPLE} tokens per tensor- and context-parallel rank, or what of "
            "them divides the cap, so that it stays what it is"
        ),
    },
    "the plan": {
        "balance": _flag(
            "what the plan is made for: the end of the pipeline's step (auto), or micro-batches "
            "packed full and evened out by cost or tokens"
        ),
        "fill": _flag(
            "how a data-parallel rank with too few micro-batches reaches the common count: split "
            "its own first, or use placeholders at once"
        ),
        "plan_effort": _number(
            "how long to search for a plan: simulated passes of a micro-batch per sample"
        ),
        "cost_model": _flag(
            "what samples and micro-batches cost on these devices. fixed, the default: by the "
            "model's shape, so that plans, and with them rounding, are the same in every run; "
            "auto: learnt from the times of training's own passes, without expert parallelism; or "
            "a file of JSON, as the cost_model.json that a job writes under --dynamic-batch-record",
            metavar="auto|fixed|FILE",
        ),
    },
    "samples that move between ranks, and rows that ranks share": {
        "exchange": _flag(
            "the samples of all data-parallel ranks are planned together, and move to the ranks "
            "that run them: the default; --no-dynamic-batch-exchange leaves each on the rank that "
            "has read it, for samples too heavy to move, such as images, and steps end later",
            action=argparse.BooleanOptionalAction,
            default=None,
        ),
        "max_context_parallel": _flag(
            "dynamic context parallelism: let each micro-batch be shared by 1, 2, 4, ... up to "
            "MAX data- and context-parallel ranks, as the plan finds best; a shared one may hold "
            "--max-tokens-per-gpu on each of them",
            type=int,
            metavar="MAX",
        ),
    },
    "forward_only, log-probs and logits": {
        "forward_only_max_tokens_per_gpu": _tokens(
            "--max-tokens-per-gpu of forward_only, which keeps no activations for a backward "
            "pass: each rank packs the samples that it trains on anew (default: training's plan)"
        ),
        "logits_in_model_dtype": _switch(
            "give losses and forward_only's functions the logits of a half-precision model as it "
            "makes them, without Megatron's float32 copy of them all: log-probs and entropies of "
            "this package are the same to the bit; what your own code computes it must cast"
        ),
        "fuse_output_layer": _switch(
            "multiply by the output layer inside response_log_probs and its siblings, a chunk of "
            "tokens at a time and again in backward, so that logits of all tokens never exist: "
            "losses get FusedLogits, which are made where anything else reads them"
        ),
    },
    "faults, and the start": {
        "on_nonfinite": _flag(
            "a loss or gradient of train_step that is NaN or infinite is an error on every rank, "
            "or its update is skipped on every rank; unchecked as in Megatron under "
            "--no-check-for-nan-in-loss-and-grad and dynamic loss scaling",
            choices=["error", "skip"],
            default="error",
        ),
        "consensus_timeout_seconds": _flag(
            "how long to wait for the other ranks to have planned or collated before raising",
            type=float,
            default=DEFAULT_TIMEOUT_SECONDS,
            metavar="SECONDS",
        ),
        "no_planned_shapes": _switch(
            "let pipeline stages exchange the shape of every tensor before they send it, instead "
            "of taking it from the plan: for models with stages that send each other anything but "
            "[tokens, 1, hidden size]"
        ),
    },
    "recorded jobs": {
        "record": _flag(
            "write every training step's lengths, plan and time into this folder, for "
            "`mcore-batching replay DIR`, and what costs are known into its cost_model.json, for "
            "`--cost-model` of `mcore-batching` and for --dynamic-batch-cost-model of other jobs",
            metavar="DIR",
        ),
    },
}
"""By theme, of each argument of the library its flag's settings in argparse."""

OPTIONS = {name: each for options in THEMES.values() for name, each in options.items()}

FLAGS = {name: FLAG_OF.get(name, PREFIX + name.replace("_", "-")) for name in OPTIONS}
FLAGS["use_dynamic_batch_size"] = "--use-dynamic-batch-size"
"""Argument of the library to the flag that sets it."""

REMOVED_FLAGS = {
    f"{PREFIX}data": (
        "Megatron's own fine-tuning data is packed: set --sft, --data-path and "
        "--tokenizer-type SFTTokenizer instead"
    ),
    f"{PREFIX}no-plan-ahead": "plans are made ahead by one worker process: leave it out",
    f"{PREFIX}forward-only-plan": (
        "forward passes run training's plan, or one of their own under "
        f"{PREFIX}forward-only-max-tokens-per-gpu: leave it out"
    ),
    f"{PREFIX}split-backward": "backward passes run whole: leave it out",
    f"{PREFIX}split-backward-memory": "backward passes run whole: leave it out",
    f"{PREFIX}max-inflight-tokens": (
        "a stage holds at most as many micro-batches as 1F1B has stages: lower --max-tokens-per-gpu"
    ),
    f"{PREFIX}log-prob-chunk-tokens": (
        "give response_log_probs and its sibling chunk_tokens instead (default: 512)"
    ),
    f"{PREFIX}no-failure-watch": (
        "a rank that raises ends the others; the error's __cause__ is its own: leave it out"
    ),
    f"{PREFIX}log-all": (
        f"set {PREFIX}record DIR, and read a step's figures by `mcore-batching replay DIR`"
    ),
    f"{PREFIX}rendezvous-timeout-seconds": f"set {PREFIX}consensus-timeout-seconds instead",
}
"""Flags of earlier releases, which are refused, and what to do instead."""

PLANNER_DEFAULTS = {
    option.name: option.default
    for option in dataclasses.fields(PlannerConfig)
    if option.default is not dataclasses.MISSING
}
"""Fields of `PlannerConfig` that are read from ``args.dynamic_batch_*``."""


def add_dynamic_batch_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags, each theme a group of the help; give it to Megatron as
    ``extra_args_provider``.

    Flags that the parser has already (frameworks define the first two themselves) are left alone.
    """
    for theme, options in THEMES.items():
        group = parser.add_argument_group(f"mcore_batching: {theme}")
        for name in options:
            # argparse has no public way to ask whether a flag is there.
            if FLAGS[name] not in parser._option_string_actions:
                group.add_argument(FLAGS[name], **settings_of(name))
    refuse_removed(parser)
    return parser


_NOT_SHOWN: Any = {"help": argparse.SUPPRESS, "default": argparse.SUPPRESS}


class _Removed(argparse.Action):
    """Refuses a removed flag in one line."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        parser.error(_refusal(self.option_strings[0], self.metavar))


def refuse_removed(parser: argparse.ArgumentParser, prefix: str = PREFIX) -> None:
    """Let a parser refuse the removed flags that it lacks; its own begin with `prefix`."""
    for flag, instead in REMOVED_FLAGS.items():
        flag = flag.replace(PREFIX, prefix)
        if flag not in parser._option_string_actions:
            parser.add_argument(flag, action=_Removed, nargs="*", metavar=instead, **_NOT_SHOWN)


def removed_settings(args: Any) -> list[str]:
    """Refusals of the removed flags that an object of arguments has set."""
    set_to = {
        flag: getattr(args, flag.lstrip("-").replace("-", "_"), None) for flag in REMOVED_FLAGS
    }
    # YAML reads `off` as False.
    return [
        _refusal(flag, REMOVED_FLAGS[flag])
        for flag, value in set_to.items()
        if value not in (None, False, "off")
    ]


def _refusal(flag: str, instead: Any) -> str:
    return f"{flag} is gone: {instead}"


def settings_of(name: str) -> dict[str, Any]:
    """The settings in argparse of a flag; choices and defaults of the planner's options are those
    of `PlannerConfig`."""
    settings = dict(OPTIONS[name])
    if name in PLANNER_DEFAULTS:
        settings["default"] = PLANNER_DEFAULTS[name]
    if name in CHOICES:
        settings["choices"] = CHOICES[name]
    return settings
