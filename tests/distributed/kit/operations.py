"""Jobs that write down in which order Megatron's schedules run passes, and when.

Passes may sleep what they cost: on one rank, and where ranks share rows.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules

from kit.model import adam, arguments, quick_model
from kit.objective import log_probs_of, packed_objective
from kit.samples import rollout_of
from mcore_batching.megatron import forward_only, get_data_iterator, schedule_of, train_step
from mcore_batching.planning import CostModel, ParallelDims
from mcore_batching.planning.schedule import Pass
from mcore_batching.tools.picture import step_passes

LENGTHS = (400, 90, 70, 60, 50, 50, 40, 30, 30, 24, 16, 16)
"""Of all samples: one nearly as long as the others together."""
COSTS = CostModel(quadratic=1 / 400, per_micro_batch=8.0, context_parallel_fixed=2.0)
"""Attention as much as all else at 400 tokens."""
Operation = list[Any]
"""``["F" or "B", model chunk, slot, start, end]``, seconds on a clock that all ranks read."""


def operations(dims: ParallelDims, steps: list[tuple[int, bool]]) -> list[list[Operation]]:
    """The passes of this rank in the order in which Megatron's own schedule ran them, of steps of
    so many micro-batches, True: without a backward pass."""
    model = quick_model(dims, 64)
    optimizer = adam(model, distributed=False)
    args = arguments(
        dims,
        dynamic_batch_max_samples_per_row=1,
        dynamic_batch_packing="first-fit",
        dynamic_batch_fill="placeholder",
        dynamic_batch_balance="none",
        dynamic_batch_exchange=False,
    )
    found = []
    for count, has_no_backward in steps:
        data = rollout_of([(2 + slot % 5, 1) for slot in range(count)])
        planned = get_data_iterator(args, model, data)
        with passes_of(model) as passes:
            if has_no_backward:
                forward_only(log_probs_of, args, model, *planned)
            else:
                train_step(packed_objective, args, model, *planned, optimizer)
        found.append(passes)
    return found


def asleep(
    dims: ParallelDims, seconds_per_unit: float, repeats: int = 1, **flags: Any
) -> dict[str, dict[str, Any]]:
    """Training steps of the same samples, planned with every row on one rank, and with dynamic CP.

    A pass sleeps before it computes, so ranks that share a row wait in its attention for the one
    that began last, and end together. ``repeats`` steps are timed after one that is not: of each,
    ``passes`` are what ran, its start and its end, on a clock that all ranks read.
    """
    model = quick_model(dims, 2 * max(LENGTHS))
    optimizer = adam(model, distributed=False)
    rank = parallel_state.get_data_parallel_rank()
    stage = parallel_state.get_pipeline_model_parallel_rank()
    data = rollout_of([(length, 1) for length in LENGTHS[rank :: dims.data_parallel]])
    found = {}
    flags["max_tokens_per_gpu"] = 2 * max(LENGTHS)
    shared = {"dynamic_batch_context_parallel": dims.data_parallel}
    for name, own_flags in {"one rank": {}, "dynamic CP": shared}.items():
        args = arguments(dims, **flags, **own_flags)
        iterators, counts = get_data_iterator(args, model, data, cost_model=COSTS)
        schedule = schedule_of(iterators)
        ranks = step_passes(*schedule.step_plan(0))
        own = [each for each in ranks[rank] if each.stage == stage]
        seconds = {Pass(p.kind, p.chunk, p.slot): seconds_per_unit * (p.end - p.start) for p in own}

        def sleep(back: bool, slot: int, seconds: dict[Pass, float] = seconds) -> None:
            # Chunks cost the same.
            time.sleep(seconds[Pass("B" if back else "F", 0, slot)])

        clock: dict[str, Any] = {
            "sizes": list(schedule.row_sizes(0)),
            "predicted": seconds_per_unit * max(p.end for passes in ranks for p in passes),
            "pass_ends": [seconds_per_unit * each.end for each in own],
            "order": [[p.kind, p.chunk, p.slot] for p in own],
            "waits_for_sends": schedule.step_plan(0)[0].dims.waits_for_sends,
            "passes": [],
        }
        for repeat in range(repeats + 1):
            dist.barrier()
            with passes_of(model, sleep) as passes:
                train_step(packed_objective, args, model, iterators, counts, optimizer)
            if repeat:  # the first one makes buffers and connects groups
                clock["passes"].append(passes)
        found[name] = clock
    return found


@contextlib.contextmanager
def passes_of(
    model: list[Any], before: Callable[[bool, int], Any] = lambda *unused: None
) -> Iterator[list[Any]]:
    """Write down every call of the schedules' own forward and backward step; `before` is called at
    the start of each, with whether it is a backward pass and the slot."""
    passes: list[Any] = []
    drawn = [0] * len(model)
    made_by: dict[int, tuple[int, int]] = {}

    def run(kind: str, chunk: int, slot: int, step: Callable[[], Any]) -> Any:
        start = time.monotonic()
        before(kind == "B", slot)
        result = step()
        passes.append([kind, chunk, slot, start, time.monotonic()])
        return result

    def forward_step(step: Any, iterator: Any, chunk: Any, *rest: Any, **options: Any) -> Any:
        number = next(i for i, each in enumerate(model) if each is chunk)
        slot = drawn[number]
        drawn[number] += 1
        call = functools.partial(forward, step, iterator, chunk, *rest, **options)
        result = run("F", number, slot, call)
        made_by[id(_only(result[0]))] = (number, slot)
        return result

    def backward_step(input_tensor: Any, output_tensor: Any, *rest: Any, **options: Any) -> Any:
        call = functools.partial(backward, input_tensor, output_tensor, *rest, **options)
        return run("B", *made_by.pop(id(_only(output_tensor))), call)

    forward, backward = schedules.forward_step, schedules.backward_step
    steps = {"forward_step": forward_step, "backward_step": backward_step}
    with mock.patch.multiple(schedules, **steps):
        yield passes


def _only(tensors: Any) -> Any:
    return tensors[0] if isinstance(tensors, list) else tensors
