"""What may happen to the worker that plans, on the planning rank."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any
from unittest import mock

import torch.distributed as dist

from mcore_batching.megatron import plan
from mcore_batching.planning import worker
from mcore_batching.planning.worker import PlanningWorker, PlanRequest, PlanTicket

FAULTS = ("killed", "stopped", "late", "absent", "out of memory")
SECONDS_LATE = 5.0
_SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
_IMPATIENT_SECONDS = 1.0
_SLOW_START = """
import time
from mcore_batching.planning import worker
plan = worker.PlanRequest.plan
worker.PlanRequest.plan = lambda self: time.sleep({seconds}) or plan(self)
serve()"""
_LIMITED_START = """
from mcore_batching.planning import worker
worker.PlanRequest.plan = lambda self: bytearray(1 << 60)
serve()"""


@contextlib.contextmanager
def slow_planning(seconds: float, *, in_line: float | None = None) -> Iterator[None]:
    """Planning that takes so much longer: in the worker, and in line (None: as much)."""
    plan_of = PlanRequest.plan

    def slowly(request: PlanRequest) -> Any:
        time.sleep(seconds if in_line is None else in_line)
        return plan_of(request)

    with (
        _started_by(_SLOW_START.format(seconds=seconds)),
        mock.patch.object(PlanRequest, "plan", slowly),
    ):
        yield


@contextlib.contextmanager
def _started_by(lines: str) -> Iterator[None]:
    start = worker._START.replace("\nserve()", lines)
    assert start != worker._START
    with mock.patch.object(worker, "_START", start):
        yield


@contextlib.contextmanager
def worker_with(fault: str | None) -> Iterator[dict[str, Any]]:
    """Let something happen to the worker, with the first request; None: nothing; "in line": no
    request reaches it.

    Yields:
        ``in_line``: the number of plans that this rank made itself; ``said`` of them; ``pids`` of
        the workers.
    """
    made: dict[str, Any] = {"in_line": 0, "said": [], "pids": []}
    submit, plan_in_line, say = PlanningWorker.submit, PlanRequest.plan, plan.say

    def submitted(self: PlanningWorker, request: PlanRequest) -> PlanTicket:
        if fault == "in line":
            answer: Any = Future()
            answer.set_result(None)
            return PlanTicket(request, self, None, answer)
        ticket = submit(self, request)
        is_first = not made["pids"]
        if self.pid is not None and self.pid not in made["pids"]:
            made["pids"].append(self.pid)
        if is_first and fault in _SIGNALS:
            os.kill(made["pids"][-1], _SIGNALS[fault])
            if fault == "stopped":
                plan.SECONDS_LATE = _IMPATIENT_SECONDS  # until the patch below ends
        return ticket

    def counted(request: PlanRequest) -> Any:
        made["in_line"] += 1
        return plan_in_line(request)

    def said(text: str) -> None:
        made["said"].append(text)
        say(text)

    with contextlib.ExitStack() as stack:
        for target, name, value in (
            (PlanningWorker, "submit", submitted),
            (PlanRequest, "plan", counted),
            (plan, "say", said),
            # A worker may take seconds to start on a busy core.
            (plan, "SECONDS_LATE", _IMPATIENT_SECONDS if fault == "late" else 60.0),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        if fault == "absent":
            stack.enter_context(mock.patch("sys.executable", "/nowhere/python"))
        if fault == "late":
            stack.enter_context(slow_planning(SECONDS_LATE, in_line=0.0))
        if fault == "out of memory":
            stack.enter_context(_started_by(_LIMITED_START))
        yield made


def is_planning_rank() -> bool:
    """True on the rank that has the worker."""
    return dist.get_rank() == 0
