"""Which backward passes of a step are split, and how many parts of W run before which pass."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from megatron.core import parallel_state

from mcore_batching.flags import FLAGS
from mcore_batching.megatron.job.job import Job
from mcore_batching.megatron.rows.prepared_step import PreparedStep
from mcore_batching.megatron.rows.schedule import MicroBatchSchedule
from mcore_batching.megatron.split_backward.weight_gradients import WeightGradients
from mcore_batching.planning.pipeline import Schedule
from mcore_batching.planning.pipeline.split_backward import PARTS, SplitStage


def planned_split(job: Job, schedule: MicroBatchSchedule, step: int) -> tuple[SplitStage, ...]:
    """Of each stage of this replica; empty where no pass is split.

    Args:
        job: the present one.
        schedule: of the step.
        step: which of the schedule's steps.
    """
    if job.options.split_backward is None:
        return ()
    if schedule.dims.pipeline_parallel == 1:
        flag = FLAGS["split_backward"]
        job.say_once(flag, f"{flag} has no effect without pipeline stages: none waits for another")
        return ()
    count = schedule.num_microbatches[step]
    return tuple(
        _stage_of(Schedule(dims=schedule.dims), stage, count)
        for stage in range(schedule.dims.pipeline_parallel)
    )


def _stage_of(schedule: Schedule, stage: int, count: int) -> SplitStage:
    order, most = schedule.order(stage, count), schedule.warm_up(0, count) + 1
    held, forwards, waiting = 0, sum(each.kind == "F" for each in order), 0
    parts = [0] * (len(order) + 1)
    for at, each in enumerate(order):
        if each.kind == "F":
            if held == most:
                parts[at] += PARTS
                held, waiting = held - 1, waiting - 1
            held, forwards = held + 1, forwards - 1
        else:
            waiting += 1
            if not forwards:
                parts[at + 1] += PARTS
    return SplitStage(tuple(each.kind == "B" for each in order), tuple(parts[:-1]))


def digest_of(stages: Sequence[SplitStage]) -> str:
    """Of a replica's stages, the same on all of its ranks."""
    return hashlib.sha256(repr([tuple(stage) for stage in stages]).encode()).hexdigest()


class LastStep:
    """What this rank left for later in the last training step of the job; None: nothing."""

    def __init__(self) -> None:
        self.weights: WeightGradients | None = None


def deferred_weights(job: Job, prepared: PreparedStep) -> WeightGradients | None:
    """What this stage will leave for later in a step; None if nothing."""
    last = job.memory.only(LastStep)
    last.weights = None
    if prepared.split_backward:
        rank = parallel_state.get_pipeline_model_parallel_rank()
        stage = prepared.split_backward[rank]
        order = Schedule(dims=prepared.schedule.dims).order(rank, len(prepared.rows))
        if any(stage.split):
            last.weights = WeightGradients(order, stage)
    return last.weights
