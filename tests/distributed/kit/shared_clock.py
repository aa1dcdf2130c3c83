"""A job whose passes sleep as long as the cost model says, its rows on one rank or on several."""

from __future__ import annotations

import time
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from kit.exactness import arguments
from kit.learning import samples_of
from kit.model import adam, quick_model
from kit.objective import packed_objective
from kit.operations import passes_of
from mcore_batching.megatron import get_data_iterator, schedule_of, train_step
from mcore_batching.planning import CostModel, ParallelDims
from mcore_batching.planning.schedule import Pass
from mcore_batching.tools.picture import step_timeline

LENGTHS = (400, 90, 70, 60, 50, 50, 40, 30, 30, 24, 16, 16)
"""Of all samples: one nearly as long as the others together."""
COSTS = CostModel(quadratic=1 / 400, per_micro_batch=8.0, context_parallel_fixed=2.0)
"""Attention as much as all else at 400 tokens."""


def asleep(
    dims: dict[str, Any],
    seconds_per_unit: float,
    repeats: int = 1,
) -> dict[str, dict[str, Any]]:
    """Training steps of the same samples, planned with every row on one rank, and with dynamic CP.

    A pass sleeps before it computes, so ranks that share a row wait in its attention for the one
    that began last, and end together.

    Args:
        dims: of the job.
        seconds_per_unit: of a forward pass.
        repeats: steps of each plan that are timed, after one that is not.

    Returns:
        of each plan ("one rank", "dynamic CP") the ``sizes`` of this rank's rows; as
        predicted, the ``order`` of this rank's passes, their ends in seconds (``pass_ends``), that
        of the step (``predicted``), and whether the schedule ``waits_for_sends``; of every timed
        step ``passes`` (what ran, its start and its end, on a clock that all ranks read), and
        ``step_seconds``, of all of it.
    """
    shape = ParallelDims(**dims)
    model = quick_model(shape, 2 * max(LENGTHS))
    optimizer = adam(model, distributed=False)
    rank = parallel_state.get_data_parallel_rank()
    stage = parallel_state.get_pipeline_model_parallel_rank()
    data = samples_of(list(LENGTHS[rank :: shape.data_parallel]))
    found = {}
    shared = {"dynamic_batch_context_parallel": shape.data_parallel}
    plans: dict[str, dict[str, Any]] = {
        "one rank": {"dynamic_batch_exchange": True},
        "dynamic CP": shared,
    }
    for name, flags in plans.items():
        args = arguments(shape, max_tokens_per_gpu=2 * max(LENGTHS), **flags)
        iterators, counts = get_data_iterator(args, model, data, cost_model=COSTS)
        schedule = schedule_of(iterators)
        timeline = step_timeline(*schedule.step_plan(0))
        own = [each for each in timeline.ranks[rank].passes if each.stage == stage]
        seconds = {Pass(p.kind, p.chunk, p.slot): seconds_per_unit * (p.end - p.start) for p in own}

        def sleep(back: bool, slot: int, seconds: dict[Pass, float] = seconds) -> None:
            # Chunks cost the same.
            time.sleep(seconds[Pass("B" if back else "F", 0, slot)])

        clock: dict[str, Any] = {
            "sizes": list(schedule.row_sizes(0)),
            "predicted": seconds_per_unit * timeline.end,
            "pass_ends": [seconds_per_unit * each.end for each in own],
            "order": [[p.kind, p.chunk, p.slot] for p in own],
            "waits_for_sends": schedule.step_plan(0)[0].dims.waits_for_sends,
            "passes": [],
            "step_seconds": [],
        }
        for repeat in range(repeats + 1):
            dist.barrier()
            began = time.monotonic()
            with passes_of(model, before=sleep) as passes:
                train_step(packed_objective, args, model, iterators, counts, optimizer)
            if repeat:  # the first one makes buffers and connects groups
                clock["passes"].append(passes)
                clock["step_seconds"].append(time.monotonic() - began)
        found[name] = clock
    return found
