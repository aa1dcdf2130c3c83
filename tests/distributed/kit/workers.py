"""What may happen to the worker that plans, on the planning rank."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any
from unittest import mock

from megatron.core.pipeline_parallel import schedules

from mcore_batching.megatron import plan
from mcore_batching.planning import worker
from mcore_batching.planning.worker import PlanningWorker, PlanRequest, PlanTicket

FAULTS = ("killed", "stopped", "late", "absent", "out of memory")
_SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
_IMPATIENT_SECONDS = 1.0
_SLOW_START = """
import time
from mcore_batching.planning import worker
plan = worker.PlanRequest.plan
worker.PlanRequest.plan = lambda self: time.sleep(5.0) or plan(self)
serve()"""
_LIMITED_START = """
from mcore_batching.planning import worker
worker.PlanRequest.plan = lambda self: bytearray(1 << 60)
serve()"""


@contextlib.contextmanager
def _started_by(lines: str) -> Iterator[None]:
    start = worker._START.replace("\nserve()", lines)
    assert start != worker._START
    with mock.patch.object(worker, "_START", start):
        yield


@contextlib.contextmanager
def worker_with(fault: str | None) -> Iterator[dict[str, Any]]:
    """Let something happen to the worker, with the first request; None: nothing; "in line": no
    request reaches it. Its answers are there when their steps are due: who awaits one before that,
    while the device could run the step before, does so until the time is up.

    Yields:
        ``begun`` and ``in_line``: the numbers of plans that this rank's worker was given, and that
        it made itself; ``idle``: of those that were due before a forward pass ran beside them; what
        it ``said``.
    """
    made: dict[str, Any] = {"begun": 0, "in_line": 0, "idle": 0, "said": []}
    submit, plan_in_line, say = PlanningWorker.submit, PlanRequest.plan, plan.say
    plan_due, forward_step = plan.Planner.plan, schedules.forward_step
    answers: dict[PlanTicket, tuple[Any, int]] = {}
    passes = 0

    def counted_pass(*arguments: Any, **options: Any) -> Any:
        nonlocal passes
        passes += 1
        return forward_step(*arguments, **options)

    def submitted(self: PlanningWorker, request: PlanRequest) -> PlanTicket:
        if fault == "in line":
            answer: Any = Future()
            answer.set_result(None)
            return PlanTicket(request, self, None, answer)
        ticket = submit(self, request)
        made["begun"] += 1
        if made["begun"] == 1 and fault in _SIGNALS:
            assert self.pid is not None
            os.kill(self.pid, _SIGNALS[fault])
            if fault == "stopped":
                plan.SECONDS_LATE = _IMPATIENT_SECONDS  # until the patch below ends
        answers[ticket], ticket.answer = (ticket.answer, passes), Future()
        return ticket

    def due(self: plan.Planner, job: Any, request: PlanRequest, ticket: PlanTicket | None) -> bytes:
        if ticket is not None and ticket in answers:
            ticket.answer, before = answers.pop(ticket)
            made["idle"] += before == passes
        return plan_due(self, job, request, ticket)

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
            (plan.Planner, "plan", due),
            (schedules, "forward_step", counted_pass),
            (plan, "say", said),
            # A worker may take seconds to start on a busy core.
            (plan, "SECONDS_LATE", _IMPATIENT_SECONDS if fault == "late" else 60.0),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        if fault == "absent":
            stack.enter_context(mock.patch("sys.executable", "/nowhere/python"))
        if fault == "late":
            stack.enter_context(_started_by(_SLOW_START))
        if fault == "out of memory":
            stack.enter_context(_started_by(_LIMITED_START))
        yield made
