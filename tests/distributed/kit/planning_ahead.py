"""Stock training whose planning process, or reading ahead, meets with something."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch.distributed as dist

from kit.stock import train, train_blocking
from mcore_batching.megatron.rollout.plan_ahead import PlansAhead
from mcore_batching.planning import planning_process
from mcore_batching.planning.planning_process import PlanRequest

FAULTY_STEP = 3
SLOWLY = """
import time
from mcore_batching.planning.planning_process import PlanRequest
plan = PlanRequest.plan
PlanRequest.plan = lambda request: time.sleep({seconds}) or plan(request)
"""
"""In the planning process, before it serves: planning that takes longer."""


@contextlib.contextmanager
def slow_planning(seconds: float, *, in_line: float | None = None) -> Iterator[None]:
    """Planning that takes so long: in the process, and in line (None: as long)."""
    plan, start = PlanRequest.plan, planning_process._START
    slow = start.replace("\nserve(", SLOWLY.format(seconds=seconds) + "\nserve(")
    assert slow != start

    def slowly(request: PlanRequest) -> Any:
        time.sleep(seconds if in_line is None else in_line)
        return plan(request)

    with (
        mock.patch.object(planning_process, "_START", slow),
        mock.patch.object(PlanRequest, "plan", slowly),
    ):
        yield


def train_ahead(
    script: str, words: Sequence[str], fault: str | None = None, blocking: bool = False
) -> dict[str, Any]:
    """`train` (or `train_blocking`) with something that happens to rank 0's planning ahead.

    Args:
        script: as of `train`.
        words: as of `train`.
        fault: ``killed`` or ``stopped``: the process, in the third step; ``late``: its plans are;
            ``absent``: it cannot be started; ``lost``: lengths of the third step are not gathered.
        blocking: transfers block as NCCL's do.

    Returns:
        its record, with ``in_line``, the number of plans that this rank made itself, ``said``, what
        it said of them, and ``pids``, of its planning processes.
    """
    made: dict[str, Any] = {"in_line": 0, "said": [], "pids": [], "steps begun": 0}
    plan, begin, say = PlanRequest.plan, PlansAhead.begin, PlansAhead._say
    is_faulty = os.environ.get("RANK") == "0"

    def counted(request: PlanRequest) -> Any:
        made["in_line"] += 1
        return plan(request)

    def begun(self: PlansAhead, *arguments: Any) -> None:
        made["steps begun"] += 1
        maker = self._maker
        assert maker is not None
        if maker._process is not None:
            made["pids"] = [maker._process.pid]
        if is_faulty and made["steps begun"] == FAULTY_STEP and fault in _SIGNALS:
            os.kill(maker._process.pid, _SIGNALS[fault])
        if is_faulty and made["steps begun"] == FAULTY_STEP and fault == "lost":
            maker._messages.reduce = mock.Mock(side_effect=ConnectionError("connection closed"))
        begin(self, *arguments)

    def said(self: PlansAhead, why: Exception) -> None:
        made["said"].append(str(why))
        say(self, why)

    with contextlib.ExitStack() as stack:
        if is_faulty and fault == "absent":
            stack.enter_context(mock.patch("sys.executable", "/nowhere/python"))
        if is_faulty and fault == "late":
            stack.enter_context(slow_planning(60.0, in_line=0.0))
        plan = PlanRequest.plan
        for target, name, value in (
            (PlanRequest, "plan", counted),
            (PlansAhead, "begin", begun),
            (PlansAhead, "_say", said),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        record = (train_blocking if blocking else train)(script, words)
    return record | made


_SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
