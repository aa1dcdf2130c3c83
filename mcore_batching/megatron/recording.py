"""Records of a training job's steps, for ``mcore-batching replay``: ``--dynamic-batch-record``."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from mcore_batching.megatron.schedule import MicroBatchSchedule
from mcore_batching.planning.records import StepRecorder

_recorders: dict[str, StepRecorder] = {}


def open_record(args: Any) -> StepRecorder | None:
    """The job's recorder, made at the first call; None without ``--dynamic-batch-record``.

    Rank 0 alone writes.

    Raises:
        RecordError: the folder cannot be made or written to.
    """
    directory = getattr(args, "dynamic_batch_record", None)
    if directory is None:
        return None
    if directory not in _recorders:
        _recorders[directory] = StepRecorder(directory, writes=dist.get_rank() == 0)
    return _recorders[directory]


@contextlib.contextmanager
def recorded(args: Any, schedule: MicroBatchSchedule, step: int) -> Iterator[None]:
    """Write down a step whose forward and backward passes run inside.

    A collective over all ranks where they are recorded.

    Args:
        args: Megatron's arguments.
        schedule: of the step.
        step: which of the schedule's steps.
    """
    recorder = open_record(args)
    if recorder is None:
        yield
        return
    torch.cuda.synchronize()
    started = time.monotonic()
    yield
    torch.cuda.synchronize()
    seconds = time.monotonic() - started  # without the wait for the other ranks' plans
    learnt = schedule.learnt
    recorder.append(
        *schedule.step_plan(step),
        seconds,
        seconds_per_unit=None if learnt is None else learnt.seconds_per_unit,
    )
