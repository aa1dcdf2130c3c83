"""Planning the next step while the present one trains.

    with PlanAhead(plan_step) as ahead:
        ahead.start(lengths_of_first_step, layout, config)
        for ...:
            plan = ahead.result()
            ahead.start(lengths_of_next_step, layout, config)
            train(plan)

A thread shares Python's lock with the loop that launches kernels and takes turns with it; a process
does not, and is the default. It is a fresh interpreter that imports the plan function's module and
nothing of the training script; it needs arguments that can be pickled, which lengths, layouts,
configurations and cost models are.

Guarantees: the plan is the one that a call gives; an exception of the plan function is raised by
`result`; results come in the order of `start`; the process ends when it is closed and when the
training process ends, however it ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import subprocess
import sys
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, Literal, TypeVar

from mcore_batching.planning.errors import PlanningError

Plan = TypeVar("Plan")

_START_WORKER = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from mcore_batching.planning.ahead_worker import serve
serve()
"""


class PlanAheadError(PlanningError):
    """Planning ahead was asked for something that it cannot do, or its process has gone."""


class PlanAhead(Generic[Plan]):
    """Calls of one function, each begun before its result is needed.

    Args:
        plan_function: what to call; with "process", a function of a module that can be imported,
            not of the script that is being run.
        where: in a process of its own or in a thread of this one.

    Raises:
        PlanAheadError: the other process could not find the function.
    """

    def __init__(
        self,
        plan_function: Callable[..., Plan],
        *,
        where: Literal["process", "thread"] = "process",
    ) -> None:
        call: Callable[..., Plan] = plan_function
        self._worker: _Worker | None = None
        if where == "process":
            if getattr(plan_function, "__module__", None) == "__main__":
                raise PlanAheadError(
                    f"{plan_function!r} is defined in the script that is being run, where another "
                    "process cannot import it; move it to a module, or set where='thread'"
                )
            self._worker = _Worker(plan_function)
            call = self._worker.call
        elif where != "thread":
            raise PlanAheadError(f"where must be 'process' or 'thread', got {where!r}; set it so")
        self._call = call
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="plan-ahead")
        self._begun: deque[Future[Plan]] = deque()

    def start(self, *arguments: Any, **keywords: Any) -> None:
        """Begin a plan.

        Args:
            arguments: of the plan function. With a thread they must not change until `result`.
            keywords: likewise.
        """
        self._begun.append(self._thread.submit(self._call, *arguments, **keywords))

    def result(self, timeout_seconds: float | None = None) -> Plan:
        """The plan of the earliest `start` whose result was not asked for yet.

        Args:
            timeout_seconds: how long to wait; None: until it is there.

        Raises:
            PlanAheadError: nothing was started, or the other process ended.
            TimeoutError: it is not there in time; it can be asked for again.
            Exception: whatever the plan function raised.
        """
        if not self._begun:
            raise PlanAheadError("no plan was started; call start before result")
        begun = self._begun[0]
        try:
            return begun.result(timeout_seconds)
        finally:
            if begun.done():
                self._begun.popleft()

    def close(self) -> None:
        """Leave out what was started and not asked for, and end the process."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._worker is not None:
            self._worker.end()
        self._thread.shutdown(wait=True)

    def __enter__(self) -> PlanAhead[Plan]:
        """Itself."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Close it."""
        self.close()


class _Worker:
    """A Python process that answers calls of one function, one at a time."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START_WORKER, json.dumps([os.getcwd(), *sys.path])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        # Closing its standard input is what ends it, also if this process is killed.
        self.end = weakref.finalize(self, _end, self._process)
        try:
            self._ask(function)
        except Exception:
            self.end()
            raise

    def call(self, *arguments: Any, **keywords: Any) -> Any:
        return self._ask((arguments, keywords))

    def _ask(self, question: Any) -> Any:
        text = pickle.dumps(question)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(text)
            self._process.stdin.flush()
            succeeded, answer = pickle.load(self._process.stdout)
        except (OSError, EOFError, ValueError, pickle.UnpicklingError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=1)
            raise PlanAheadError(
                f"the planning process ended with status {self._process.poll()}; see standard "
                "error, or set where='thread'"
            ) from None
        if not succeeded:
            raise answer
        return answer


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    process.wait()
