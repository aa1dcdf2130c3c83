"""The flags in Megatron's argument parser, and the planner's settings made from them."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import math
import sys
from collections.abc import Iterator
from typing import Any

import torch

from mcore_batching.batch.value_shapes import as_number
from mcore_batching.flags import (
    CUDA_ROW_MULTIPLE,
    ENGINE,
    PLANNER_DEFAULTS,
    add_flags,
)
from mcore_batching.flags import DEFAULT_TIMEOUT_SECONDS as DEFAULT_TIMEOUT_SECONDS
from mcore_batching.flags import FLAGS as FLAGS
from mcore_batching.flags import PREFIX as PREFIX
from mcore_batching.megatron import cpu_emulation
from mcore_batching.megatron.errors import DynamicBatchArgumentError
from mcore_batching.megatron.log_probs import CHUNK_TOKENS
from mcore_batching.planning import (
    Argument,
    ConfigError,
    CostModel,
    MCoreBatchingError,
    ParallelDims,
    PlannerConfig,
    PlanningError,
    at_least,
)
from mcore_batching.planning.integers import as_integer
from mcore_batching.planning.json_text import read_document

LEARNT, FIXED = "auto", "fixed"
"""In place of a cost model's file."""

_MOST_TIMEOUT_SECONDS = 10**9  # some 30 years; process groups count nanoseconds in 64 bits


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


def uses_dynamic_batch_size(args: Any) -> bool:
    """True if micro-batches are packed under a cap: unless the flag is there and off."""
    return bool(getattr(args, "use_dynamic_batch_size", True))


def log_prob_chunk_tokens(args: Any) -> int:
    """Tokens of which log-probs and entropies hold float32 logits at a time.

    Raises:
        DynamicBatchArgumentError: less than 1.
    """
    tokens = getattr(args, "dynamic_batch_log_prob_chunk_tokens", CHUNK_TOKENS)
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
        raise DynamicBatchArgumentError(
            f"{FLAGS['log_prob_chunk_tokens']} must be 1 or more, got {tokens!r}: leave it out for "
            f"{CHUNK_TOKENS}"
        )
    return tokens


def consensus_timeout_seconds(args: Any) -> float:
    """How long a rank waits for the others in an agreement.

    Raises:
        DynamicBatchArgumentError: no such time.
    """
    given = getattr(args, "dynamic_batch_consensus_timeout_seconds", DEFAULT_TIMEOUT_SECONDS)
    seconds = as_number(given)
    if seconds is None or not 1 <= seconds <= _MOST_TIMEOUT_SECONDS:
        raise DynamicBatchArgumentError(
            f"{FLAGS['consensus_timeout_seconds']} must be a number of seconds from 1 to "
            f"{_MOST_TIMEOUT_SECONDS}, got {given!r}: leave it out for {DEFAULT_TIMEOUT_SECONDS:g}"
        )
    return seconds


def keeps_logits_in_model_dtype(args: Any) -> bool:
    """True if losses get logits (or `FusedLogits`) in the model's type, not copied to float32."""
    asked = getattr(args, "dynamic_batch_logits_in_model_dtype", False)
    return bool(asked) or fuses_output_layer(args)


def fuses_output_layer(args: Any) -> bool:
    """True if losses get `FusedLogits` in place of logits."""
    return bool(getattr(args, "dynamic_batch_fuse_output_layer", False))


def warms_up_at_cap(args: Any) -> bool:
    """True if rows at the cap run before the first training step."""
    return bool(getattr(args, "dynamic_batch_warm_up_at_cap", False))


def planner_config(args: Any, dims: ParallelDims | None = None) -> PlannerConfig:
    """The planner's settings from Megatron's arguments.

    Without ``--use-dynamic-batch-size`` there is no cap, and ranks with fewer micro-batches are
    filled up with placeholders.

    Args:
        args: Megatron's arguments.
        dims: the job's parallel dims, by which rows have a default multiple on CUDA; None: none.

    Raises:
        DynamicBatchArgumentError: ``--max-tokens-per-gpu`` is missing.
        ConfigError: a value is out of range.
    """
    if not uses_dynamic_batch_size(args):
        if max_context_parallel(args) is not None:
            raise DynamicBatchArgumentError(
                f"{FLAGS['max_context_parallel']} plans micro-batches under a cap: set "
                "--use-dynamic-batch-size and --max-tokens-per-gpu as well"
            )
        return PlannerConfig(
            max_tokens_per_gpu=sys.maxsize,
            fill="placeholder",
            balance="none",
            pad_each_to=getattr(args, "dynamic_batch_pad_each_to", None),
            pad_total_to=getattr(args, "dynamic_batch_pad_total_to", None),
        )
    if getattr(args, "max_tokens_per_gpu", None) is None:
        raise DynamicBatchArgumentError(
            "--use-dynamic-batch-size needs a cap: set --max-tokens-per-gpu to the most tokens "
            "that fit into one GPU's memory in one micro-batch (16384, say)"
        )
    chosen = {
        name: getattr(args, _attribute(name), default) for name, default in PLANNER_DEFAULTS.items()
    }
    if chosen["pad_total_to"] is None and dims is not None and _runs_on_cuda():
        smallest = dims if max_context_parallel(args) is None else dims.for_rows_on(1)
        chosen["pad_total_to"] = _default_row_multiple(args.max_tokens_per_gpu, smallest)
    try:
        config = PlannerConfig(max_tokens_per_gpu=args.max_tokens_per_gpu, **chosen)
        if dims is not None:
            config.check_max_context_parallel(dims)
        forward_only_config(args, config)
        return config
    except MCoreBatchingError as error:
        error.args = (error.text(flag_of),)
        raise


def max_context_parallel(args: Any) -> int | None:
    """Most ranks that may share a row; None without ``--dynamic-batch-context-parallel``."""
    most: int | None = getattr(args, _attribute("max_context_parallel"), None)
    return most


def exchanges_samples(args: Any) -> bool:
    """True if the samples of all data-parallel ranks are planned as one, and move between them."""
    asked = getattr(args, _attribute("exchange"), False)
    return bool(asked) or max_context_parallel(args) is not None


def _attribute(name: str) -> str:
    """Of Megatron's arguments, for an argument of the library."""
    return FLAGS[name].removeprefix("--").replace("-", "_")


def _runs_on_cuda() -> bool:
    return torch.cuda.is_available() and not cpu_emulation.is_enabled()


def _default_row_multiple(max_tokens_per_gpu: Any, dims: ParallelDims) -> int:
    """`CUDA_ROW_MULTIPLE` of each rank as far as it divides the cap: none is oversize for it."""
    cap = as_integer(max_tokens_per_gpu) or 1
    return dims.context_parallel * math.gcd(CUDA_ROW_MULTIPLE * dims.tensor_parallel, cap)


def has_own_forward_plan(args: Any) -> bool:
    """True if forward passes alone have a plan of their own."""
    own = getattr(args, "dynamic_batch_forward_only_plan", "shared") != "shared"
    return own or has_own_forward_cap(args)


def has_own_forward_cap(args: Any) -> bool:
    """True if forward passes alone have a cap of their own."""
    cap = getattr(args, "dynamic_batch_forward_only_max_tokens_per_gpu", None)
    return cap is not None and uses_dynamic_batch_size(args)


def forward_only_config(args: Any, training: PlannerConfig) -> PlannerConfig:
    """The planner's settings for forward passes alone: training's, under a cap of their own.

    Raises:
        ConfigError: the cap is out of range.
    """
    if not has_own_forward_cap(args):
        return training
    given = args.dynamic_batch_forward_only_max_tokens_per_gpu
    cap = at_least("forward_only_max_tokens_per_gpu", given, 1, ConfigError)
    return dataclasses.replace(training, max_tokens_per_gpu=cap, max_inflight_tokens=None)


@contextlib.contextmanager
def naming_the_cap(args: Any, *, forward_only: bool) -> Iterator[None]:
    """Let errors of planning name the cap that was planned with."""
    try:
        yield
    except PlanningError as error:
        if forward_only and has_own_forward_cap(args):
            error.rename("max_tokens_per_gpu", "forward_only_max_tokens_per_gpu")
        raise


def learns_cost_model(args: Any) -> bool:
    """True if costs are learnt from training's own passes: unless asked for others.

    Rows that are never packed, without ``--use-dynamic-batch-size``, have no use for them.
    """
    chosen = getattr(args, _attribute("cost_model"), None)
    if chosen is None:
        chosen = FIXED if getattr(args, "deterministic_mode", False) else LEARNT
    return bool(chosen == LEARNT) and uses_dynamic_batch_size(args)


def given_cost_model(args: Any) -> CostModel | None:
    """The cost model in the file of ``--dynamic-batch-cost-model``; None if it names none.

    Raises:
        DynamicBatchArgumentError: the file cannot be read, or holds no cost model.
    """
    chosen = getattr(args, _attribute("cost_model"), None)
    return None if chosen in (None, LEARNT, FIXED) else _read_cost_model(chosen)


@functools.cache
def _read_cost_model(path: str) -> CostModel:
    try:
        return CostModel.from_json(read_document(path))
    except (OSError, UnicodeDecodeError, ConfigError) as error:
        raise DynamicBatchArgumentError(
            f"{PREFIX}cost-model {path}: {error}; set it to the cost_model.json that a job wrote "
            f"under {FLAGS['record']}, to auto or to fixed"
        ) from None
