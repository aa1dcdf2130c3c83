"""Stock training whose planning process, or reading ahead, meets with something."""

from __future__ import annotations

import functools
import itertools
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from megatron.core.pipeline_parallel import schedules

from kit.stock import train
from kit.workers import slow_planning, worker_with
from mcore_batching.megatron.plan import Planner

Clocks = tuple[float, float]


def train_ahead(script: str, words: Sequence[str], fault: str | None = None) -> dict[str, Any]:
    """`train` with something that happens to the worker, and what `worker_with` yields of it."""
    with worker_with(fault) as made:
        record = train(script, words)
    return record | made


def held(script: str, words: Sequence[str]) -> dict[str, Any]:
    """``error`` of `train` over many steps, each made ahead, if it raised, and ``held``: every
    hundredth step what this process and its planning process hold, KiB of memory each."""
    looks: list[list[int]] = []
    plan, numbers = Planner.plan, itertools.count(1)

    def planned(self: Planner, *arguments: Any) -> Any:
        if next(numbers) % 100 == 0:
            pid = self.worker.pid
            assert pid is not None
            looks.append([*map(_resident_kib, (os.getpid(), pid))])
        return plan(self, *arguments)

    with mock.patch.object(Planner, "plan", planned):
        record = train(script, words)
    return {"error": record.get("error"), "held": looks}


def _resident_kib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def pauses(
    script: str, words: Sequence[str], seconds: float, fault: str | None = None
) -> dict[str, Any]:
    """`train` with passes that sleep, planning of so many seconds, and a worker with a `fault`.

    ``pauses``: from each backward to a forward pass on this rank, which are of two steps where all
    forward passes of a step come before its backward passes, the seconds and those of them that the
    main thread computed.
    """
    passes: list[tuple[str, Clocks, Clocks]] = []

    def sleeping(kind: str, step: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        started = _clocks()
        result = step(*arguments, **options)
        time.sleep(_PASS_SECONDS[kind])
        passes.append((kind, started, _clocks()))
        return result

    steps = {
        "forward_step": functools.partial(sleeping, "F", schedules.forward_step),
        "backward_step": functools.partial(sleeping, "B", schedules.backward_step),
    }
    with slow_planning(seconds), worker_with(fault), mock.patch.multiple(schedules, **steps):
        record = train(script, words)
    # On the first stage nothing else runs dry: one forward pass follows another without a wait.
    in_turn = itertools.pairwise(passes)
    between = [(a[2], b[1]) for a, b in in_turn if (a[0], b[0]) == ("B", "F")]
    found = [[end - start for start, end in zip(*clocks, strict=True)] for clocks in between]
    return record | {"pauses": found}


def _clocks() -> Clocks:
    return time.perf_counter(), time.thread_time()


_PASS_SECONDS = {"F": 0.4, "B": 0.6}
