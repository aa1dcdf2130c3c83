"""Stock training whose planning process, or reading ahead, meets with something."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from megatron.core.pipeline_parallel import schedules

from kit.stock import train, train_blocking
from mcore_batching.megatron.rollout.plan_ahead import PlansAhead
from mcore_batching.planning import planning_process
from mcore_batching.planning.planning_process import PlanRequest

Clocks = tuple[float, float]

FAULTY_STEP = 3
SECONDS_TO_START = 60.0
_SLOW_START = """
import time
from mcore_batching.planning import planning_process
plan_step = planning_process.plan_step
planning_process.plan_step = lambda *a, **o: time.sleep({seconds}) or plan_step(*a, **o)
serve("""


@contextlib.contextmanager
def slow_planning(seconds: float, *, in_line: float | None = None) -> Iterator[None]:
    """Planning that takes so much longer: in the process, and in line (None: as much)."""
    start = planning_process._START.replace("\nserve(", _SLOW_START.format(seconds=seconds))
    assert start != planning_process._START
    plan_step = planning_process.plan_step

    def slowly(*arguments: Any, **options: Any) -> Any:
        time.sleep(seconds if in_line is None else in_line)
        return plan_step(*arguments, **options)

    with (
        mock.patch.object(planning_process, "_START", start),
        mock.patch.object(planning_process, "plan_step", slowly),
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
            ``absent``: it cannot be started; ``lost``: its messages of the third step.
        blocking: transfers block as NCCL's do.

    Returns:
        its record, with ``in_line``, the number of plans that this rank made itself, ``said``, what
        it said of them, ``taken``, the number of steps that were made ahead, and ``pids``, of its
        planning processes.
    """
    made: dict[str, Any] = {"in_line": 0, "taken": 0, "said": [], "pids": [], "begun": 0}
    take, begin, say = PlansAhead.take, PlansAhead.begin, PlansAhead._say
    is_faulty = fault is not None and os.environ["RANK"] == "0"

    def taken(self: PlansAhead, *arguments: Any, **options: Any) -> Any:
        # Here a plan takes a few milliseconds in line, and a process may take seconds to start.
        is_late = fault == "late" or (fault in (*_SIGNALS, "lost") and made["begun"] >= FAULTY_STEP)
        waits = is_late and (is_faulty or fault == "lost")
        self._seconds_in_line = 0.1 if waits else SECONDS_TO_START
        found = take(self, *arguments, **options)
        made["taken"] += found[0] is not None
        return found

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
                messages = maker._consensus._messages
                assert messages is not None
                messages.reduce = reduce  # type: ignore[method-assign]
        elif fault is None:
            # What was asked for before and not used, as where the batch grows: under load it could
            # be planned still, and this step's plan be late for it.
            with maker._planning:
                pass
        begin(self, *arguments)

    def said(self: PlansAhead, why: Exception) -> None:
        made["said"].append(str(why))
        say(self, why)

    with contextlib.ExitStack() as stack:
        if is_faulty and fault == "absent":
            stack.enter_context(mock.patch("sys.executable", "/nowhere/python"))
        if is_faulty and fault == "late":
            stack.enter_context(slow_planning(60.0, in_line=0.0))
        plan, plan_in_line = PlansAhead.plan, PlanRequest.plan

        def counted(request: PlanRequest) -> Any:
            made["in_line"] += 1
            return plan_in_line(request)

        def planned(self: PlansAhead, request: Any) -> Any:
            # Here alone: evaluation is planned in line anyway.
            with mock.patch.object(PlanRequest, "plan", counted):
                return plan(self, request)

        for target, name, value in (
            (PlansAhead, "plan", planned),
            (PlansAhead, "take", taken),
            (PlansAhead, "begin", begun),
            (PlansAhead, "_say", said),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        record = (train_blocking if blocking else train)(script, words)
    return record | made


def held(script: str, words: Sequence[str]) -> dict[str, Any]:
    """`train` over many steps, each made ahead.

    Returns:
        ``error``, if the run raised, ``steps``, their number, and ``held``: every hundredth step
        what this process and its planning process hold, KiB of memory each.
    """
    looks: list[list[int]] = []
    take, numbers = PlansAhead.take, itertools.count(1)

    def taken(self: PlansAhead, *arguments: Any, **options: Any) -> Any:
        if next(numbers) % 100 == 0:
            assert self._maker is not None
            assert self._maker._process is not None
            looks.append([*map(_resident_kib, (os.getpid(), self._maker._process.pid))])
        return take(self, *arguments, **options)

    with mock.patch.object(PlansAhead, "take", taken):
        record = train(script, words)
    return {"error": record.get("error"), "steps": len(record["steps"]), "held": looks}


def _resident_kib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def pauses(script: str, words: Sequence[str], seconds: float) -> dict[str, Any]:
    """`train` with passes that sleep, and planning of so many seconds.

    Returns:
        its record, with ``pauses``: from each backward to a forward pass on this rank, which are of
        two steps where all forward passes of a step come before its backward passes, the seconds
        and those of them that the main thread computed.
    """
    passes: list[tuple[str, Clocks, Clocks]] = []
    forward, backward = schedules.forward_step, schedules.backward_step

    def sleeping(kind: str, step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def run(*arguments: Any, **options: Any) -> Any:
            started = _clocks()
            result = step(*arguments, **options)
            time.sleep(_PASS_SECONDS[kind])
            passes.append((kind, started, _clocks()))
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
    between = [(a[2], b[1]) for a, b in in_turn if (a[0], b[0]) == ("B", "F")]
    found = [[end - start for start, end in zip(*clocks, strict=True)] for clocks in between]
    return record | {"pauses": found}


def _clocks() -> Clocks:
    return time.perf_counter(), time.thread_time()


_PASS_SECONDS = {"F": 0.4, "B": 0.6}
_SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
