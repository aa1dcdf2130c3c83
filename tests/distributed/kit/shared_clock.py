"""A job whose passes sleep as long as the cost model says, its rows on one rank or on several."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch.distributed as dist
from megatron.core import parallel_state

from kit.exactness import arguments
from kit.learning import samples_of
from kit.model import adam, quick_model
from kit.objective import packed_objective
from kit.operations import passes_of
from mcore_batching.megatron import get_data_iterator, schedule_of, train_step
from mcore_batching.megatron.split_backward.weight_gradients import WeightGradients
from mcore_batching.planning import CostModel, ParallelDims
from mcore_batching.planning.pipeline import PARTS, Pass
from mcore_batching.tools.pictures.timeline import step_timeline

LENGTHS = (400, 90, 70, 60, 50, 50, 40, 30, 30, 24, 16, 16)
"""Of all samples: one nearly as long as the others together."""
COSTS = CostModel(quadratic=1 / 400, per_micro_batch=8.0, context_parallel_fixed=2.0)
"""Attention as much as all else at 400 tokens."""


def asleep(
    dims: dict[str, Any],
    seconds_per_unit: float,
    repeats: int = 1,
) -> dict[str, dict[str, Any]]:
    """Training steps of the same samples, planned with every row on one rank, with dynamic CP, and
    on a pipeline with dynamic CP and every backward pass split.

    A pass sleeps before it computes, so ranks that share a row wait in its attention for the one
    that began last, and end together.

    Args:
        dims: of the job.
        seconds_per_unit: of a forward pass.
        repeats: steps of each plan that are timed, after one that is not.

    Returns:
        of each plan ("one rank", "dynamic CP", "split") the ``sizes`` of this rank's rows; as
        predicted, the ``order`` of this rank's passes, their ends in seconds (``pass_ends``), that
        of the step (``predicted``), and whether the schedule ``waits_for_sends``; of every timed
        step ``passes`` (what ran, its start and its end, on a clock that all ranks read),
        ``ended``, the end of the last pass and of all W on that clock, and ``step_seconds``, of all
        of it.
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
    if shape.pipeline_parallel > 1 and shape.expert_parallel == 1:
        plans["split"] = {**shared, "dynamic_batch_split_backward": "all"}
    for name, flags in plans.items():
        args = arguments(shape, max_tokens_per_gpu=2 * max(LENGTHS), **flags)
        iterators, counts = get_data_iterator(args, model, data, cost_model=COSTS)
        schedule = schedule_of(iterators)
        timeline = step_timeline(*schedule.step_plan(0))
        own = [each for each in timeline.ranks[rank].passes if each.stage == stage]
        seconds: dict[Pass, float] = {}  # parts of W are passes of their own
        for p in own:
            of = Pass(p.kind, p.chunk, p.slot)
            seconds[of] = seconds.get(of, 0.0) + seconds_per_unit * (p.end - p.start)
        whole = [p for p in own if p.kind != "W"]

        def sleep(back: bool, slot: int, seconds: dict[Pass, float] = seconds) -> None:
            # Chunks cost the same.
            time.sleep(seconds[Pass("B" if back else "F", 0, slot)])

        clock: dict[str, Any] = {
            "sizes": list(schedule.row_sizes(0)),
            "predicted": seconds_per_unit * timeline.end,
            "pass_ends": [seconds_per_unit * each.end for each in whole],
            "order": [[p.kind, p.chunk, p.slot] for p in whole],
            "waits_for_sends": schedule.step_plan(0)[0].dims.waits_for_sends,
            "passes": [],
            "ended": [],
            "step_seconds": [],
        }
        for repeat in range(repeats + 1):
            dist.barrier()
            began = time.monotonic()
            with passes_of(model, before=sleep) as passes, _sleeping_weights(seconds) as ends:
                train_step(packed_objective, args, model, iterators, counts, optimizer)
            if repeat:  # the first one makes buffers and connects groups
                clock["passes"].append(passes)
                clock["ended"].append(max(passes[-1][-1], *ends))
                clock["step_seconds"].append(time.monotonic() - began)
        found[name] = clock
    return found


@contextlib.contextmanager
def _sleeping_weights(seconds: dict[Pass, float]) -> Iterator[list[float]]:
    """Let parts of W sleep before they run; when they were done."""
    ends = [0.0]

    def sleep(left: Any, parts: int) -> None:
        passed = left.passed
        time.sleep(seconds[Pass("W", passed.chunk, passed.slot)] * parts / PARTS)

    def run_parts(weights: Any, left: Any, parts: int) -> None:
        sleep(left, parts)
        running(weights, left, parts)
        ends.append(time.monotonic())

    def flush(weights: Any, some: Any = None) -> None:
        for left in weights._waiting:
            sleep(left, PARTS - left.parts_run)
        flushing(weights, some)
        ends.append(time.monotonic())

    running, flushing = WeightGradients._run_parts, WeightGradients.flush
    with (
        mock.patch.object(WeightGradients, "_run_parts", run_parts),
        mock.patch.object(WeightGradients, "flush", flush),
    ):
        yield ends
