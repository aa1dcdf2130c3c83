"""The flags of training jobs, by theme: data that the engine and the command line both read.

`OPTIONS` is the one declaration of a flag, `FLAGS` the one table from the library's names of
arguments to flags. Needs neither torch nor megatron: `mcore-batching flags` prints them anywhere.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterable
from typing import Any

from mcore_batching.planning import CHOICES, PlannerConfig
from mcore_batching.planning.plans.memory import LOG_PROB_CHUNK_TOKENS

PREFIX = "--dynamic-batch-"

DEFAULT_TIMEOUT_SECONDS = 600.0

CUDA_ROW_MULTIPLE = 128
"""Tokens of each rank to a multiple of which rows are padded on CUDA by default: kernels waste no
part of a tile, and the allocator, which keeps freed blocks by their size, sees few sizes."""

THEMES = {
    "the cap, and rows under it": (
        "use_dynamic_batch_size",
        "max_tokens_per_gpu",
        "on_oversize",
        "packing",
        "max_samples_per_row",
        "max_inflight_tokens",
        "share_prefixes",
        "pad_each_to",
        "pad_total_to",
    ),
    "the plan": ("balance", "fill", "plan_effort", "cost_model"),
    "samples that move between ranks, and rows that ranks share": (
        "exchange",
        "max_context_parallel",
        "no_plan_ahead",
    ),
    "forward_only, log-probs and logits": (
        "forward_only_plan",
        "forward_only_max_tokens_per_gpu",
        "log_prob_chunk_tokens",
        "logits_in_model_dtype",
        "fuse_output_layer",
    ),
    "the pipeline": ("split_backward", "split_backward_memory"),
    "faults, and the start": (
        "on_nonfinite",
        "consensus_timeout_seconds",
        "no_failure_watch",
        "no_planned_shapes",
    ),
    "recorded jobs": ("record",),
    "stock scripts: the log": ("log_all",),
    "stock scripts: fine-tuning data": ("data", "on_too_long", "tokenizer"),
}
*ENGINE, LOG, FINE_TUNING = THEMES
"""`THEMES` of every job; the last two are of stock scripts alone."""

OPTIONS: dict[str, dict[str, Any]] = {
    "use_dynamic_batch_size": {
        "action": "store_true",
        "help": "pack variable-length samples into micro-batches under --max-tokens-per-gpu",
    },
    "max_tokens_per_gpu": {
        "type": int,
        "metavar": "TOKENS",
        "help": "most padded tokens a micro-batch may put on one GPU; "
        "a micro-batch holds up to this times the context-parallel size",
    },
    "packing": {
        "help": "how samples are packed under the cap (auto: whichever needs fewer micro-batches)",
    },
    "balance": {
        "help": "what the plan is made for: the end of the pipeline's step (auto), or "
        "micro-batches packed full and evened out by cost or tokens",
    },
    "plan_effort": {
        "type": int,
        "metavar": "N",
        "help": "how long to search for a plan: simulated passes of a micro-batch per sample",
    },
    "cost_model": {
        "metavar": "auto|fixed|FILE",
        "help": "what samples and micro-batches cost on these devices. auto, the default: learnt "
        "from the times of training's own passes; fixed, the default under --deterministic-mode: "
        "by the model's shape, so that plans, and with them rounding, are the same in every run; "
        "or a file of JSON, as the cost_model.json that a job writes under --dynamic-batch-record",
    },
    "max_samples_per_row": {
        "type": int,
        "metavar": "N",
        "help": "most samples that share a micro-batch, for kernels and memory that go by their "
        "number",
    },
    "max_inflight_tokens": {
        "type": int,
        "metavar": "TOKENS",
        "help": "most padded tokens whose activations the first pipeline stage may hold at a time",
    },
    "share_prefixes": {
        "action": argparse.BooleanOptionalAction,
        "default": False,
        "help": "compute samples that begin others, as turns of a trajectory begin the next ones, "
        "in those others' segments, once; each keeps its own response, fields, weight and outputs",
    },
    "fill": {
        "help": "how a data-parallel rank with too few micro-batches reaches the common count: "
        "split its own first, or use placeholders at once",
    },
    "on_oversize": {
        "help": "a sample over the cap runs alone in its micro-batch, or is refused",
    },
    "pad_each_to": {
        "type": int,
        "metavar": "TOKENS",
        "help": "pad every sample to a multiple of this, beside what parallelism needs",
    },
    "pad_total_to": {
        "type": int,
        "metavar": "TOKENS",
        "help": "pad every packed row to a multiple of this (FP8, memory fragmentation); default: "
        f"on CUDA {CUDA_ROW_MULTIPLE} tokens per tensor- and context-parallel rank, or what of "
        "them divides the cap, so that it stays what it is",
    },
    "max_context_parallel": {
        "type": int,
        "metavar": "MAX",
        "help": "dynamic context parallelism: let each micro-batch be shared by 1, 2, 4, ... up to "
        "MAX data- and context-parallel ranks, as the plan finds best; a shared one may hold "
        "--max-tokens-per-gpu on each of them. Implies --dynamic-batch-exchange",
    },
    "exchange": {
        "action": "store_true",
        "help": "plan the samples of all data-parallel ranks as one, and move them between ranks "
        "so that these are balanced; without it every rank runs the samples that it has read",
    },
    "no_plan_ahead": {
        "action": "store_true",
        "help": "plan a step, and in stock scripts read it, while the device waits; without it "
        "this happens during the step before, where samples are exchanged (in stock scripts with "
        "--dataloader-type single), or during a rollout's first step, also with pipeline stages",
    },
    "forward_only_plan": {
        "choices": ["shared", "own"],
        "default": "shared",
        "help": "forward_only runs the micro-batches of training (shared: rounding is then the "
        "same in both, so an unchanged policy has ratio 1), or others planned for forward passes "
        "alone",
    },
    "log_prob_chunk_tokens": {
        "type": int,
        "default": LOG_PROB_CHUNK_TOKENS,
        "metavar": "TOKENS",
        "help": "tokens of which log-probs and entropies hold float32 copies of the logits at a "
        "time; the default, 512, takes 0.3 GB at a vocabulary of 152k, where 16k tokens take 10, "
        "and leaves kernels 10 million entries when eight ranks share the vocabulary",
    },
    "logits_in_model_dtype": {
        "action": "store_true",
        "help": "give losses and forward_only's functions the logits of a half-precision model as "
        "it makes them, without Megatron's float32 copy of them all: log-probs and entropies of "
        "this package are the same to the bit; what your own code computes it must cast",
    },
    "fuse_output_layer": {
        "action": "store_true",
        "help": "multiply by the output layer inside response_log_probs and its siblings, a chunk "
        "of tokens at a time and again in backward, so that logits of all tokens never exist: "
        "losses get FusedLogits, which only those functions read",
    },
    "forward_only_max_tokens_per_gpu": {
        "type": int,
        "metavar": "TOKENS",
        "help": "--max-tokens-per-gpu of forward_only, which keeps no activations for a backward "
        "pass: it then has a plan of its own, which --dynamic-batch-max-inflight-tokens does not "
        "bound (default: the plan and the cap of training)",
    },
    "split_backward": {
        "nargs": "?",
        "const": "auto",
        "help": "compute weight gradients of linear layers apart from the backward pass, in time "
        "in which pipeline stages would wait: of the passes that the plan chooses, none where it "
        "predicts under 2 %% less time (auto, or no value), or of every pass (all)",
    },
    "split_backward_memory": {
        "type": float,
        "metavar": "FACTOR",
        "help": "activations that a stage may hold under --dynamic-batch-split-backward, over "
        "those that it holds without; the default, 1.0, is no more",
    },
    "record": {
        "metavar": "DIR",
        "help": "write every training step's lengths, plan and time into this folder, for "
        "`mcore-batching replay DIR`, and what costs are known into its cost_model.json, for "
        "`--cost-model` of `mcore-batching` and for --dynamic-batch-cost-model of other jobs",
    },
    "consensus_timeout_seconds": {
        "type": float,
        "default": DEFAULT_TIMEOUT_SECONDS,
        "metavar": "SECONDS",
        "help": "how long to wait for the other ranks to have planned or collated before raising",
    },
    "no_failure_watch": {
        "action": "store_true",
        "help": "wrap no exception of the model, and leave the ranks that wait for the one that "
        "raised it to their process groups' time-out: for a debugger on one rank, or a launcher "
        "that ends the others itself",
    },
    "no_planned_shapes": {
        "action": "store_true",
        "help": "let pipeline stages exchange the shape of every tensor before they send it, "
        "instead of taking it from the plan: for models whose stages send each other anything but "
        "[tokens, 1, hidden size]",
    },
    "on_nonfinite": {
        "choices": ["error", "skip"],
        "default": "error",
        "help": "a loss or gradient of train_step that is NaN or infinite is an error on every "
        "rank, or its update is skipped on every rank; unchecked as in Megatron under "
        "--no-check-for-nan-in-loss-and-grad and dynamic loss scaling",
    },
    "log_all": {
        "action": "store_true",
        "help": "log every batching/... entry: balance, seconds of the step, tokens in flight, "
        "learnt costs and predicted seconds, beside the five of every job",
    },
    "data": {
        "nargs": "+",
        "metavar": "FILE",
        "help": "JSON-lines files to train on, instead of the script's own data: each line "
        '{"messages": [...]}, {"prompt": ..., "completion": ...} or '
        '{"question": ..., "answer": ...}; --split holds out a part of every file',
    },
    "on_too_long": {
        "choices": ["error", "drop"],
        "default": "error",
        "help": "a sample longer than --seq-length ends the job, or is left out and counted",
    },
    "tokenizer": {
        "choices": ["megatron", "bytes"],
        "default": "megatron",
        "help": "tokenizer of --dynamic-batch-data: the job's, or megatron-core's byte-level one, "
        "for which --tokenizer-type has no name "
        "(set --tokenizer-type NullTokenizer --vocab-size 258 with it)",
    },
}
"""Argument of the library to its flag's settings in argparse."""

_SPELLED = {
    "use_dynamic_batch_size": "--use-dynamic-batch-size",
    "max_tokens_per_gpu": "--max-tokens-per-gpu",
    "max_context_parallel": f"{PREFIX}context-parallel",
}

FLAGS = {name: _SPELLED.get(name, PREFIX + name.replace("_", "-")) for name in OPTIONS}
"""Argument of the library to the flag that sets it."""

_FORMER = {"consensus_timeout_seconds": (f"{PREFIX}rendezvous-timeout-seconds",)}

PLANNER_DEFAULTS = {
    option.name: option.default
    for option in dataclasses.fields(PlannerConfig)
    if option.default is not dataclasses.MISSING
}
"""Fields of `PlannerConfig` that are read from ``args.dynamic_batch_*``."""


def add_flags(parser: argparse.ArgumentParser, themes: Iterable[str]) -> argparse.ArgumentParser:
    """Add the flags of some of the `THEMES`, each theme a group of the parser's help.

    Flags that the parser has already (frameworks define the first two themselves) are left alone.
    """
    for theme in themes:
        group = parser.add_argument_group(f"mcore_batching: {theme}")
        for name in THEMES[theme]:
            # argparse has no public way to ask whether a flag is there.
            if FLAGS[name] not in parser._option_string_actions:
                group.add_argument(FLAGS[name], *_FORMER.get(name, ()), **settings_of(name))
    return parser


def settings_of(name: str) -> dict[str, Any]:
    """The settings in argparse of the flag that sets an argument of the library.

    Choices and defaults of the planner's options are those of `PlannerConfig`.
    """
    settings = dict(OPTIONS[name])
    if name in PLANNER_DEFAULTS:
        settings["default"] = PLANNER_DEFAULTS[name]
    if name in CHOICES:
        settings["choices"] = CHOICES[name]
    return settings
