"""Records of a training job's steps, for ``mcore-batching replay``: ``--dynamic-batch-record``."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch

from mcore_batching.megatron.job.job import Job
from mcore_batching.megatron.rows.schedule import MicroBatchSchedule


@contextlib.contextmanager
def recorded(job: Job, schedule: MicroBatchSchedule, step: int) -> Iterator[None]:
    """Write down a step whose forward and backward passes run inside.

    A collective over all ranks where they are recorded.

    Args:
        job: the present one.
        schedule: of the step.
        step: which of the schedule's steps.
    """
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
