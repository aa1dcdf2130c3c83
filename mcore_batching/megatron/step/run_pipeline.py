"""`run_pipeline`: the one place that calls Megatron's schedule, for training, forward passes alone
and stock scripts, inside of everything that has to hold meanwhile."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

from mcore_batching.megatron.job.job import Job
from mcore_batching.megatron.logits.log_probs import chunks_of_tokens
from mcore_batching.megatron.rows.prepared_step import PreparedStep
from mcore_batching.megatron.rows.routing_replay import replayed_step
from mcore_batching.megatron.rows.schedule import MicroBatchSchedule
from mcore_batching.megatron.step.transfer_shapes import planned_transfers
from mcore_batching.megatron.timing import learners_of


def run_pipeline(
    job: Job,
    model: list[Any],
    prepared: PreparedStep,
    operation: str,
    forward_step: Callable[..., Any],
    *,
    forward_only: bool,
    inside: Sequence[contextlib.AbstractContextManager[Any]] = (),
    rows: Sequence[Iterator[Any]] | None = None,
    schedule: Callable[..., Any] | None = None,
    **options: Any,
) -> tuple[list[Any], Collection[float]]:
    """Run a step's rows forward, and backward unless ``forward_only``.

    Args:
        operation: the call, in words.
        inside: context managers of the caller's around the passes; the first is the outermost.
        rows: one iterator per model chunk; None: over the prepared rows.
        schedule: from ``get_forward_backward_func``; None: that which it gives now.
        options: further arguments of the schedule.

    Returns:
        what the last stage's loss function returned by row; temperatures that it asked for.
    """
    rows = prepared.iterators(len(model)) if rows is None else rows
    around: list[contextlib.AbstractContextManager[Any]] = [
        # Outermost the watch: whatever raises inside of it, the other ranks are told.
        job.watch.reporting(operation),
        *([] if forward_only else _timed(job, model, prepared)),
        planned_transfers(job.options, model, prepared, forward_only=forward_only),
        # Around all passes: the backward ones recompute with what the forward ones told routers.
        replayed_step(model),
        *inside,
    ]
    with contextlib.ExitStack() as stack:
        for each in around:
            stack.enter_context(each)
        temperatures = stack.enter_context(chunks_of_tokens(job.options.checked_chunk_tokens()))
        made: list[Any] = (schedule or get_forward_backward_func())(
            forward_step_func=forward_step,
            # The interleaved schedule takes lists, the others a model and an iterator.
            data_iterator=rows if len(rows) > 1 else rows[0],
            model=model if len(model) > 1 else model[0],
            num_microbatches=len(prepared.rows),
            # Not read, since lengths vary.
            **{"seq_length": job.options.seq_length, "micro_batch_size": 1, **options},
            forward_only=forward_only,
        )
    return made, temperatures


def _timed(
    job: Job, model: list[Any], prepared: PreparedStep
) -> Iterator[contextlib.AbstractContextManager[Any]]:
    """Contexts that record and time a training step; forward passes alone teach no costs."""
    yield _recorded(job, prepared.schedule, prepared.step)
    if job.options.learns_cost_model:
        yield learners_of(job).of(model).timing(prepared)


@contextlib.contextmanager
def _recorded(job: Job, schedule: MicroBatchSchedule, step: int) -> Iterator[None]:
    """Write down a step whose passes run inside; a collective over all ranks if steps are."""
    recorder = job.recorder
    if recorder is None:
        yield
        return
    # The device runs behind the host: without these two waits the clock would time launches.
    torch.cuda.synchronize()
    started = time.monotonic()
    yield
    torch.cuda.synchronize()
    seconds = time.monotonic() - started  # without the wait for the other ranks' plans
    learnt = schedule.learnt
    # After the clock has stopped: `step_plan` gathers the plans of all ranks the first time.
    recorder.append(
        *schedule.step_plan(step),
        seconds,
        seconds_per_unit=None if learnt is None else learnt.seconds_per_unit,
    )
