"""A job whose passes, and parts of W, sleep as long as its plan says, whole and split."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from kit.blocking_p2p import Link, blocking_p2p
from kit.exactness import arguments
from kit.learning import samples_of
from kit.model import adam, quick_model
from kit.objective import packed_objective
from kit.operations import passes_of
from mcore_batching.megatron import get_data_iterator, schedule_of, train_step
from mcore_batching.megatron.split_backward.weight_gradients import WeightGradients
from mcore_batching.planning import CostModel, ParallelDims
from mcore_batching.planning.pipeline import PARTS
from mcore_batching.tools.pictures.timeline import step_timeline

SAMPLES_OF_A_STAGE = 6
CAP = 400
COSTS = CostModel(quadratic=1 / 400, per_micro_batch=8.0)
"""Attention as much as all else at 400 tokens."""


def lengths_of(ranks: int, stages: int) -> list[int]:
    """Log-normal ones, of which a step has about two micro-batches a stage."""
    generator = random.Random(3)
    count = SAMPLES_OF_A_STAGE * ranks * stages
    return [max(8, min(CAP, round(100 * generator.lognormvariate(0, 0.8)))) for _ in range(count)]


def asleep(
    dims: dict[str, Any], seconds: float, blocking: bool, memory: float = 1.0
) -> dict[str, list[Any]]:
    """Two training steps of each plan of the same samples.

    Args:
        dims: of the job.
        seconds: that a whole step takes as predicted.
        blocking: transfers block as NCCL's do; nobody sleeps, but clocks are told what passes
            take, and go from rank to rank with the transfers.
        memory: ``--dynamic-batch-split-backward-memory``.

    Returns:
        of both plans ("whole", "split") the predicted seconds of a step, and those of each step
        from when all ranks began to when this one was done.
    """
    if not blocking:
        return _asleep(dims, seconds, memory, time)
    clock = ToldClock()
    with blocking_p2p(seconds=60.0, link=Link(clock=clock)):
        return _asleep(dims, seconds, memory, clock)


class ToldClock:
    """Time that goes by what it is told."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def sleep(self, seconds: float) -> None:
        self._seconds += seconds

    def now(self) -> float:
        return self._seconds

    monotonic = now

    def wait_until(self, seconds: float) -> None:
        self._seconds = max(self._seconds, seconds)


def _asleep(
    dims: dict[str, Any], seconds: float, memory: float, clock: Any
) -> dict[str, list[Any]]:
    shape = ParallelDims(**dims)
    model = quick_model(shape, 2 * CAP)
    optimizer = adam(model, distributed=False)
    rank = parallel_state.get_data_parallel_rank()
    stage = parallel_state.get_pipeline_model_parallel_rank()
    lengths = lengths_of(shape.data_parallel, shape.pipeline_parallel)
    data = samples_of(lengths[rank :: shape.data_parallel])
    found: dict[str, list[Any]] = {}
    per_unit = 0.0
    for name, mode in (("whole", "off"), ("split", "all")):
        args = arguments(
            shape,
            max_tokens_per_gpu=CAP,
            dynamic_batch_exchange=True,
            dynamic_batch_split_backward=mode,
            dynamic_batch_split_backward_memory=memory,
        )
        iterators, counts = get_data_iterator(args, model, data, cost_model=COSTS)
        timeline = step_timeline(*schedule_of(iterators).step_plan(0))
        per_unit = per_unit or seconds / timeline.end
        own = [each for each in timeline.ranks[rank].passes if each.stage == stage]
        steps = []
        for _ in range(2):
            began = _together(clock)
            with _sleeping(model, own, per_unit / shape.virtual_pipeline, clock):
                train_step(packed_objective, args, model, iterators, counts, optimizer)
            steps.append(clock.monotonic() - began)
        found[name] = [per_unit * timeline.end, steps]
    return found


def _together(clock: Any) -> float:
    """The latest of all ranks' times, to which clocks that are told go on."""
    if isinstance(clock, ToldClock):
        latest = torch.tensor([clock.now()], dtype=torch.float64)
        dist.all_reduce(latest, op=dist.ReduceOp.MAX)
        clock.wait_until(float(latest))
    dist.barrier()
    return float(clock.monotonic())


@contextlib.contextmanager
def _sleeping(model: list[Any], own: list[Any], per_unit: float, clock: Any) -> Iterator[None]:
    """Let this stage's passes and parts of W take as long as planned, with what they compute.

    Args:
        model: this rank's chunks, which cost the same.
        own: passes as planned.
        per_unit: seconds.
        clock: that sleeps.
    """
    units: dict[tuple[str, int], float] = {}
    for each in own:
        key = each.kind, each.slot
        units[key] = units.get(key, 0.0) + (each.end - each.start)

    began = [0.0]

    def begin(*unused: Any) -> None:
        began[0] = clock.monotonic()

    def last(kind: str, slot: int, parts: int = PARTS) -> None:
        worked = clock.monotonic() - began[0]
        clock.sleep(max(0.0, per_unit * units[kind, slot] * parts / PARTS - worked))

    def run_parts(weights: Any, left: Any, parts: int) -> None:
        begin()
        running(weights, left, parts)
        last("W", left.passed.slot, parts)

    def flush(weights: Any, some: Any = None) -> None:
        for left in weights._waiting:
            begin()
            last("W", left.passed.slot, PARTS - left.parts_run)
        flushing(weights, some)

    running, flushing = WeightGradients._run_parts, WeightGradients.flush
    with (
        passes_of(model, lambda back, slot, start: last("B" if back else "F", slot), begin),
        mock.patch.object(WeightGradients, "_run_parts", run_parts),
        mock.patch.object(WeightGradients, "flush", flush),
    ):
        yield
