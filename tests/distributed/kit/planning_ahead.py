"""Stock training whose planning process, or reading ahead, meets with something."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

from megatron.core.pipeline_parallel import schedules

from kit.stock import train, train_blocking
from mcore_batching.megatron.rollout.plan_ahead import PlansAhead
from mcore_batching.planning import planning_process
from mcore_batching.planning.planning_process import PlanRequest

FAULTY_STEP = 3
SECONDS_TO_START = 60.0
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
    made: dict[str, Any] = {"in_line": 0, "said": [], "pids": [], "begun": 0}
    plan_ahead, begin, say = PlansAhead.plan, PlansAhead.begin, PlansAhead._say
    is_faulty = fault is not None and os.environ["RANK"] == "0"

    def planned(self: PlansAhead, request: PlanRequest) -> Any:
        # Here a plan takes a few milliseconds in line, and a process may take seconds to start.
        is_late = fault == "late" or (fault in (*_SIGNALS, "lost") and made["begun"] >= FAULTY_STEP)
        waits = is_late and (is_faulty or fault == "lost")
        self._seconds_in_line = 0.1 if waits else SECONDS_TO_START
        return plan_ahead(self, request)

    def begun(self: PlansAhead, *arguments: Any) -> None:
        made["begun"] += 1
        maker = self._maker
        assert maker is not None
        if maker._process is not None:
            made["pids"] = [maker._process.pid]
        if is_faulty and made["begun"] == FAULTY_STEP:
            if fault in _SIGNALS:
                os.kill(*made["pids"], _SIGNALS[fault])
            elif fault == "lost":
                reduce = mock.Mock(side_effect=ConnectionError("connection closed"))
                maker._messages.reduce = reduce  # type: ignore[method-assign]
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

        def counted(request: PlanRequest) -> Any:
            made["in_line"] += 1
            return plan(request)

        for target, name, value in (
            (PlanRequest, "plan", counted),
            (PlansAhead, "plan", planned),
            (PlansAhead, "begin", begun),
            (PlansAhead, "_say", said),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        record = (train_blocking if blocking else train)(script, words)
    return record | made


def pauses(script: str, words: Sequence[str], seconds: float) -> dict[str, Any]:
    """`train` with passes that sleep, and planning of so many seconds.

    Returns:
        its record, with ``pauses``, the seconds from a backward to a forward pass on this rank:
        those of two steps, where all forward passes of a step come before its backward passes.
    """
    passes: list[tuple[str, float, float]] = []
    forward, backward = schedules.forward_step, schedules.backward_step

    def sleeping(kind: str, step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def run(*arguments: Any, **options: Any) -> Any:
            started = time.perf_counter()
            result = step(*arguments, **options)
            time.sleep(_PASS_SECONDS[kind])
            passes.append((kind, started, time.perf_counter()))
            return result

        return run

    with (
        slow_planning(seconds),
        mock.patch.object(schedules, "forward_step", sleeping("F", forward)),
        mock.patch.object(schedules, "backward_step", sleeping("B", backward)),
    ):
        record = train(script, words)
    # On the first stage nothing else runs dry: one forward pass follows another without a wait.
    in_turn = itertools.pairwise(passes)
    before = [(b, a) for a, b in in_turn if (a[0], b[0]) == ("B", "F")]
    return record | {"pauses": [first[1] - last[2] for first, last in before]}


_PASS_SECONDS = {"F": 0.4, "B": 0.6}
_SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
