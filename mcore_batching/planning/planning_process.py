"""A process that makes plans while the one that asks for them does something else.

It runs this package's planner from where it was imported, in an interpreter that reads neither the
working directory nor ``PYTHON...`` variables, and ends with whoever started it: at the end of its
input, and on Linux killed with the thread that started it, stopped or not.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mcore_batching.planning.config import PlannerConfig
from mcore_batching.planning.costs.cost import CostModel
from mcore_batching.planning.errors import PlanningError
from mcore_batching.planning.parallel_dims import ParallelDims
from mcore_batching.planning.planner import plan_step
from mcore_batching.planning.plans.plan import StepPlan

NICENESS = 5
"""Added to the parent's, so that training has the processor first. Beside a busy thread on the same
core planning has a quarter of it; at 10 a tenth, and plans are late."""

_SIGNAL_AT_END_OF_PARENT = 1
"""``PR_SET_PDEATHSIG`` of Linux's prctl.h."""

# The package by its place, not by a folder on sys.path, where another `random` may lie beside it.
_START = """
import sys
from importlib import util
name, folder = "mcore_batching", sys.argv[1]
spec = util.spec_from_file_location(
    name, folder + "/__init__.py", submodule_search_locations=[folder]
)
sys.modules[name] = util.module_from_spec(spec)
spec.loader.exec_module(sys.modules[name])
from mcore_batching.planning.planning_process import serve
serve(int(sys.argv[2]))
"""


@dataclasses.dataclass(frozen=True)
class Call:
    """A function of this package's planner and its arguments, for a part of a plan."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]

    def plan(self) -> Any:
        """Plan in this process; raises what the function does."""
        return self.function(*self.arguments)


@dataclasses.dataclass(frozen=True)
class PlanRequest:
    """Arguments of `plan_step`; equal requests have equal plans."""

    lengths: tuple[int, ...]
    dims: ParallelDims
    config: PlannerConfig
    cost_model: CostModel
    forward_only: bool = False

    def plan(self) -> StepPlan:
        """Plan in this process; raises what `plan_step` does."""
        parts = self.dims, self.config, self.cost_model
        return plan_step(self.lengths, *parts, forward_only=self.forward_only)


Request = PlanRequest | Call
"""What the process can make: a plan, or a part of one."""


class PlanningProcess:
    """The process, as who starts it sees it, from a thread that lives as long as it is needed.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self) -> None:
        if not sys.executable:  # as where Python is embedded
            raise FileNotFoundError("sys.executable does not say where Python is")
        self._process = subprocess.Popen(
            # -I: neither the working directory, nor the script's folder, nor PYTHONPATH.
            [sys.executable, "-I", "-c", _START, str(Path(__file__).parents[1]), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Whoever launched the job may wait for the end of all that can write there.
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,  # a signal to the job's processes is not for this one
        )

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def plan(self, request: Request) -> Any:
        """The plan of a request; waits for it. One call at a time.

        Raises:
            PlanningError: the planner refused it, in words.
            EOFError, OSError: the process has ended.
            pickle.UnpicklingError: it has ended in the middle of its answer.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        pickle.dump(request, self._process.stdin)
        self._process.stdin.flush()
        answer = pickle.load(self._process.stdout)
        if isinstance(answer, str):
            raise PlanningError(answer)
        return answer

    def end(self) -> None:
        """End the process, also while it plans or is stopped."""
        self._process.kill()  # does nothing in a fork of who started it, whose child it is not
        self._process.wait()


def serve(parent: int) -> None:
    """Answer requests from standard input until it ends, or the process `parent` does."""
    os.nice(NICENESS)
    # Forks of the parent may hold the input open. The signal also ends a process that is stopped.
    with contextlib.suppress(AttributeError):  # not on Linux
        ctypes.CDLL(None).prctl(_SIGNAL_AT_END_OF_PARENT, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before
        return
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # what is printed is no answer
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            request: Request = pickle.load(requests)
            try:
                answer: Any = request.plan()
            except Exception as exception:
                answer = f"{type(exception).__name__}: {exception}"
            pickle.dump(answer, answers)
            answers.flush()
