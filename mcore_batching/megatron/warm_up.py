"""The largest rows first, and no trace of them: ``--dynamic-batch-warm-up-at-cap``.

PyTorch's allocator keeps freed blocks and serves a request from a block at least as large. Where
rows grow from step to step it reserves more and more, and the blocks of former rows lie idle. So
before a model's first training step, rows of as many tokens as the cap allows run forward and
backward, as many as the pipeline holds at a time. What they leave behind serves every shorter row,
and a cap that does not fit into memory is an error now, not hours later.

Training is bit for bit what it would have been: random numbers, buffers (counts of experts, expert
biases), what routers recorded, gradients and their bookkeeping are as before; nothing is reduced,
updated, timed or logged. What modules keep elsewhere cannot be given back, so FP8 and FP4, with
scales and maxima outside of buffers, are refused.

Not in it: what a loss function holds beside log-probs, the optimizer's state, samples over the cap,
communication of rows that ranks share under ``--dynamic-batch-context-parallel`` (a rank's part of
them is no longer), and forward passes under ``--dynamic-batch-forward-only-max-tokens-per-gpu``.
"""

from __future__ import annotations

import contextlib
import random
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.utils import get_model_config

from mcore_batching.batch import PackedMicroBatch
from mcore_batching.batch.errors import described
from mcore_batching.megatron import compat
from mcore_batching.megatron.arguments import FLAGS, uses_dynamic_batch_size, warms_up_at_cap
from mcore_batching.megatron.consensus import agree_after_pipeline, get_consensus
from mcore_batching.megatron.errors import CollationFailedError, DynamicBatchArgumentError
from mcore_batching.megatron.failure_watch import reporting
from mcore_batching.megatron.prepared_step import PreparedStep
from mcore_batching.megatron.routing_replay import replayed_step
from mcore_batching.megatron.schedule import MicroBatchSchedule
from mcore_batching.megatron.transfer_shapes import planned_transfers
from mcore_batching.planning import row_multiple_tokens
from mcore_batching.planning.pipeline import inflight_tokens
from mcore_batching.planning.tokens import placeholder_tokens, row_capacity_tokens

_warm: weakref.WeakSet[Any] = weakref.WeakSet()
"""First chunks of the models that have been warmed up."""

_OF_GRADIENTS = ("finalize_model_grads_func", "no_sync_func", "grad_sync_func", "param_sync_func")
"""Of the model's configuration: what Megatron's schedules call to reduce gradients."""


def warm_up_at_cap(
    args: Any,
    model: list[Any],
    schedule: MicroBatchSchedule,
    step: int,
    run: Callable[[PreparedStep], Sequence[Exception]],
    *,
    change: Callable[[PackedMicroBatch], PackedMicroBatch] = lambda row: row,
) -> None:
    """Run rows at the cap through a model, before its first step, and leave no trace of them.

    A collective over all ranks. Does nothing without the flag, nor the second time.

    Args:
        args: Megatron's arguments.
        model: this rank's model chunks in Megatron's data-parallel wrapper, gradients zero.
        schedule: gives the cap and the samples.
        step: the optimizer step that comes next, whose samples the rows are filled with.
        run: runs all passes of a prepared step and returns what its loss function raised.
        change: from a row to the one that the model and the loss get.

    Raises:
        CollationFailedError: on every rank, if the rows cannot be made on any, or the settings
            leave something behind.
        ForwardFailedError: on every rank, if the loss function raised on any.
        PipelineFailedError: on every rank that can be reached, if the model raised on any.
    """
    if not warms_up_at_cap(args) or model[0] in _warm:
        return
    operation = f"warm-up at {FLAGS['max_tokens_per_gpu']} {args.max_tokens_per_gpu}"

    def work() -> PreparedStep:
        check_warm_up(args, get_model_config(model[0]))
        return PreparedStep.of_rows(schedule, step, rows_at_cap(schedule, step), model, change)

    prepared = (
        get_consensus(args)
        .agree(f"{operation}, collating", work, failure=CollationFailedError)
        .result
    )
    torch.cuda.empty_cache()  # of the shorter rows of forward passes before
    with (
        reporting(args, operation),
        no_trace(model),
        planned_transfers(args, model, prepared, forward_only=False),
        replayed_step(model),
    ):
        failed = run(prepared)
    named = [DynamicBatchArgumentError(f"{operation}: {described(each)}") for each in failed]
    agree_after_pipeline(args, operation, named)
    _warm.add(model[0])


def check_warm_up(args: Any, config: Any) -> None:
    """Refuse a warm-up without a cap, and of modules whose state cannot be given back.

    Args:
        args: Megatron's arguments.
        config: the model's `TransformerConfig`.

    Raises:
        DynamicBatchArgumentError: naming what to change.
    """
    if not warms_up_at_cap(args):
        return
    if not uses_dynamic_batch_size(args):
        raise DynamicBatchArgumentError(
            f"{FLAGS['warm_up_at_cap']} runs rows at a cap: set --use-dynamic-batch-size and "
            f"--max-tokens-per-gpu as well, or unset {FLAGS['warm_up_at_cap']}"
        )
    if config.fp8 or config.fp4:
        raise DynamicBatchArgumentError(
            "FP8 and FP4 modules keep scales and maxima of the rows they have seen, which a "
            f"warm-up would change: unset {FLAGS['warm_up_at_cap']}"
        )


def rows_at_cap(schedule: MicroBatchSchedule, step: int) -> list[PackedMicroBatch]:
    """Rows at the cap, as many as the pipeline holds at a time, packed, on the host.

    Under ``--dynamic-batch-max-inflight-tokens`` as many as that allows, then short ones.

    Args:
        schedule: gives the cap and the samples.
        step: the optimizer step whose samples the rows are filled with.
    """
    size = 1 if schedule.has_sizes_of_rows else schedule.dims.context_parallel
    dims, config = schedule.dims.for_rows_on(size), schedule.config
    # Interleaved, the first stage holds most in the second group of micro-batches.
    count = dims.pipeline_parallel if dims.virtual_pipeline == 1 else 2 * dims.group_size
    tokens, least = row_capacity_tokens(dims, config), placeholder_tokens(dims, config)
    bound = (config.max_inflight_tokens or sys.maxsize) * size // schedule.dims.context_parallel
    multiple = row_multiple_tokens(dims, config)
    tokens = max(least, min(tokens, bound) // multiple * multiple)
    row_tokens = [tokens] * count
    for slot in reversed(range(1, count)):
        if inflight_tokens(row_tokens, dims) > bound:
            row_tokens[slot] = least
    rows = {each: schedule.row_of_tokens(step, each, size) for each in set(row_tokens)}
    return [rows[each] for each in row_tokens]


@contextlib.contextmanager
def no_trace(model: list[Any]) -> Iterator[None]:
    """Undo what passes that run inside change, but for what the allocator keeps.

    Args:
        model: this rank's model chunks in Megatron's data-parallel wrapper, gradients zero.
    """
    with contextlib.ExitStack() as kept:
        kept.enter_context(_same_random_numbers())
        kept.enter_context(_same_buffers(model))
        kept.enter_context(compat.kept_moe_metrics())
        kept.enter_context(_no_gradients(model))
        yield


@contextlib.contextmanager
def _same_random_numbers() -> Iterator[None]:
    """Keep the generators that Megatron's checkpoints save."""
    tracker = get_cuda_rng_tracker()
    tracked = {name: _state_of(generator) for name, generator in tracker.get_states().items()}
    python, numpy = random.getstate(), np.random.get_state()
    host, device = torch.get_rng_state(), torch.cuda.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(host)
        torch.cuda.set_rng_state(device)
        states = tracker.get_states()
        for name, state in tracked.items():
            if isinstance(states[name], torch.Generator):  # shared with the device's own generator
                states[name].set_state(state)
            else:
                states[name] = state
        if states:
            tracker.set_states(states)


def _state_of(tracked: Any) -> torch.Tensor:
    """A copy of what a tracker keeps of a generator: the state, or the generator itself."""
    is_generator = isinstance(tracked, torch.Generator)
    state: torch.Tensor = tracked.get_state() if is_generator else tracked.clone()
    return state


@contextlib.contextmanager
def _same_buffers(model: list[Any]) -> Iterator[None]:
    kept = [
        (module, name, buffer, buffer.data, buffer.detach().clone())
        for chunk in model
        for module in chunk.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        for module, name, buffer, data, values in kept:
            data.copy_(values)
            buffer.data = data  # routers replace it by a float32 copy
            module._buffers[name] = buffer


@contextlib.contextmanager
def _no_gradients(model: list[Any]) -> Iterator[None]:
    """Let gradients be neither reduced nor counted, then forget them; no timers either."""
    config = get_model_config(model[0])
    kept = {name: getattr(config, name) for name in (*_OF_GRADIENTS, "timers")}
    with contextlib.ExitStack() as stack:
        for chunk in model:
            stack.callback(chunk.zero_grad_buffer)
            stack.enter_context(chunk.no_sync())
        for name, value in kept.items():
            stack.callback(setattr, config, name, value)
            setattr(config, name, None)
        yield
