"""A job that writes down in which order Megatron's schedules run passes, and when."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func, schedules

from kit.exactness import arguments
from kit.model import quick_model
from kit.samples import VOCABULARY
from mcore_batching.megatron import get_data_iterator, schedule_of
from mcore_batching.megatron.job import job_of
from mcore_batching.megatron.prepare import collated, collating
from mcore_batching.megatron.run_pipeline import planned_transfers, run_for_losses
from mcore_batching.planning import ParallelDims

Operation = list[Any]
"""``["F" or "B", model chunk, slot, start, end]``, times in seconds since the step began."""


def operations(
    dims: dict[str, Any],
    steps: list[tuple[list[float], bool]],
    seconds_per_cost: float = 0.0,
) -> list[list[Operation]]:
    """The passes of this rank in the order in which Megatron's own schedule ran them.

    Args:
        dims: of the job; one data-parallel rank.
        steps: for each step, the forward cost of its micro-batches in every model chunk, and
            whether there is no backward pass.
        seconds_per_cost: how long a forward pass sleeps for each unit of cost, a backward pass
            twice as long.

    Returns:
        the passes of every step.
    """
    shape = ParallelDims(**dims)
    model = quick_model(shape, 64)
    return [
        _one_step(shape, model, costs, forward_only, seconds_per_cost)
        for costs, forward_only in steps
    ]


def _one_step(
    shape: ParallelDims,
    model: list[Any],
    forward_costs: list[float],
    forward_only: bool,
    seconds_per_cost: float,
) -> list[Operation]:
    lengths = [2 + slot % 5 for slot in range(len(forward_costs))]
    data = {
        "tokens": [torch.randint(VOCABULARY, (length,)) for length in lengths],
        "total_lengths": lengths,
        "response_lengths": [1] * len(lengths),
    }
    one_each = arguments(
        shape,
        dynamic_batch_max_samples_per_row=1,
        dynamic_batch_packing="first-fit",
        dynamic_batch_fill="placeholder",
        dynamic_batch_balance="none",
        dynamic_batch_exchange=False,
    )
    iterators, (count,) = get_data_iterator(one_each, model, data)
    job, schedule = job_of(one_each), schedule_of(iterators)
    with collating(job, "timing") as agree:
        prepared = collated(agree, job, model, schedule, 0, forward_only=True)

    options = job_of().options

    def sleep(slot: int, factor: float) -> None:
        if seconds_per_cost:
            time.sleep(factor * seconds_per_cost * forward_costs[slot])

    def forward_step(rows: Iterator[Any], chunk: Any, *unused: Any) -> Any:
        del unused
        row = next(rows)
        slot = row.sample_indices[0]
        sleep(slot, 1.0)
        output, _ = run_for_losses(job, chunk, row)
        if output.requires_grad:
            output.register_hook(lambda gradient: sleep(slot, 2.0))

        def loss(logits: torch.Tensor) -> Any:
            value = logits.float().sum()
            return value, torch.tensor(1, dtype=torch.int), {"loss": value.detach()}

        return output, loss

    rows = prepared.iterators(len(model))
    planned = planned_transfers(options, model, prepared, forward_only=forward_only)
    with passes_of(model) as passes, planned:
        # The last rank to get here: no pass begins before, on any.
        entered = torch.tensor([time.monotonic()], dtype=torch.float64)
        dist.all_reduce(entered, op=dist.ReduceOp.MAX)
        began = float(entered)
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=rows if len(rows) > 1 else rows[0],
            model=model if len(model) > 1 else model[0],
            num_microbatches=count,
            seq_length=1,
            micro_batch_size=1,
            forward_only=forward_only,
        )
    return [[*what, start - began, end - began] for *what, start, end in passes]


@contextlib.contextmanager
def passes_of(
    model: list[Any],
    during: Callable[[bool, int, float], Any] = lambda *unused: None,
    before: Callable[[bool, int], Any] = lambda *unused: None,
) -> Iterator[list[Any]]:
    """Write down every call of the schedules' own forward and backward step.

    Args:
        model: this rank's chunks.
        during: called at the end of each, with whether it is a backward pass, the slot and when it
            began.
        before: called at the start of each, with whether it is a backward pass and the slot.
    """
    passes: list[Any] = []
    drawn = [0] * len(model)
    made_by: dict[int, tuple[int, int]] = {}
    forward, backward = schedules.forward_step, schedules.backward_step

    def forward_step(step: Any, iterator: Any, chunk: Any, *rest: Any, **options: Any) -> Any:
        number = next(i for i, each in enumerate(model) if each is chunk)
        slot = drawn[number]
        drawn[number] += 1
        start = time.monotonic()
        before(False, slot)
        result = forward(step, iterator, chunk, *rest, **options)
        during(False, slot, start)
        passes.append(["F", number, slot, start, time.monotonic()])
        made_by[id(_only(result[0]))] = (number, slot)
        return result

    def backward_step(input_tensor: Any, output_tensor: Any, *rest: Any, **options: Any) -> Any:
        number, slot = made_by.pop(id(_only(output_tensor)))
        start = time.monotonic()
        before(True, slot)
        result = backward(input_tensor, output_tensor, *rest, **options)
        during(True, slot, start)
        passes.append(["B", number, slot, start, time.monotonic()])
        return result

    schedules.forward_step, schedules.backward_step = forward_step, backward_step
    try:
        yield passes
    finally:
        schedules.forward_step, schedules.backward_step = forward, backward


def _only(tensors: Any) -> Any:
    return tensors[0] if isinstance(tensors, list) else tensors
