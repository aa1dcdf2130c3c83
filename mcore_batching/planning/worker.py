"""One process that plans steps while the process that started it does something else.

The worker runs this package's planner from where it was imported, in an interpreter that reads
neither the working directory nor `PYTHON...` variables nor site packages. Requests and plans travel
over a socket, its standard input. Whatever happens to it, a plan is made: the caller then plans in
line, with the same result.

The worker ends with its parent: by the end of its input, and on Linux by a signal that also ends a
stopped process. Linux sends that signal when the thread that started the worker ends, so `submit`
is for the main thread. One gap is left: a worker that is stopped in its first 20 ms, before it can
ask for the signal, stays stopped if its parent ends before the stop takes effect.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import pickle
import subprocess
import sys
import threading
import weakref
from concurrent import futures
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue

from mcore_batching.planning.config import PlannerConfig
from mcore_batching.planning.costs.cost import CostModel
from mcore_batching.planning.errors import PlanFormatError, PlanningError
from mcore_batching.planning.forest import Forest
from mcore_batching.planning.parallel_dims import ParallelDims
from mcore_batching.planning.planner import plan_step
from mcore_batching.planning.plans.plan import StepPlan

MOST_FAILURES = 3
"""Workers that may fail one after the other; then all plans are made in line."""
JOIN_SECONDS = 2.0
"""How long the end of the thread is awaited after its worker was killed."""

# The first lines run before any import of this package, so that a worker is gone with its parent
# whenever that ends. 1 is PR_SET_PDEATHSIG of Linux's prctl.h. The package is loaded by its place,
# not from a folder on sys.path, where another `random` may lie beside it.
_START = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
try:
    import ctypes
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
except (ImportError, AttributeError, OSError):
    pass
if os.getppid() != int(sys.argv[2]):
    os._exit(0)
from importlib import util
name, folder = "mcore_batching", sys.argv[1]
spec = util.spec_from_file_location(
    name, folder + "/__init__.py", submodule_search_locations=[folder]
)
sys.modules[name] = util.module_from_spec(spec)
spec.loader.exec_module(sys.modules[name])
from mcore_batching.planning.worker import serve
serve()
"""


@dataclasses.dataclass(frozen=True)
class PlanRequest:
    """Arguments of `plan_step`; equal requests have equal plans."""

    lengths: tuple[int, ...]
    dims: ParallelDims
    config: PlannerConfig
    cost_model: CostModel
    forward_only: bool = False
    forest: Forest | None = None

    def plan(self) -> bytes:
        """Plan in this process; the plan as `read` takes it. Raises what `plan_step` does."""
        given = self.lengths, self.dims, self.config, self.cost_model
        return serialize(plan_step(*given, forward_only=self.forward_only, forest=self.forest))

    def read(self, data: bytes) -> StepPlan:
        """Return the plan of this request, wherever it was made. What the plan contains is for
        `validate_plan` to check.

        Raises:
            PlanFormatError: no plan, a damaged one, or one of another request.
        """
        content = data[_DIGEST_BYTES:]
        if hashlib.sha256(content).digest() != data[:_DIGEST_BYTES]:
            raise PlanFormatError(f"{len(data)} bytes that are no plan; plan again")
        plan: StepPlan = pickle.loads(content)
        due = self.dims, self.config, self.cost_model, self.forward_only
        found = plan.dims, plan.config, plan.cost_model, plan.forward_only
        if due != found or plan.sample_indices != tuple(range(len(self.lengths))):
            raise PlanFormatError(
                f"a plan of {plan.num_samples} samples for {len(plan.micro_batches)} ranks, "
                "expected one by this job's settings; plan again"
            )
        return plan


def serialize(plan: StepPlan) -> bytes:
    """A plan in some bytes a sample, with a digest, as the ranks of one job read it."""
    content = pickle.dumps(plan)
    return hashlib.sha256(content).digest() + content


_DIGEST_BYTES = hashlib.sha256().digest_size

_Answer = futures.Future[bytes | str | None]
"""An answer of the worker: a plan, why there is none, or None: in line the planner raises an
error."""


@dataclasses.dataclass(eq=False)
class PlanTicket:
    """A plan that was requested of the worker."""

    request: PlanRequest
    worker: PlanningWorker
    process: _Process | None
    answer: _Answer

    def wait(self, timeout: float) -> bool:
        """Wait for the worker, up to `timeout` seconds; return True if `result` need not."""
        return bool(futures.wait([self.answer], timeout).done)

    def result(self, waited: float) -> bytes:
        """Return the plan in bytes: the worker's if it came within the `waited` seconds that passed
        in `wait`, or else one made in line, with the reason in `PlanningWorker.complaint`.

        Raises:
            PlanningError: as `plan_step` does for this request.
        """
        answer: bytes | str | None = f"took more than {waited:.3g} s for a plan"
        if self.answer.done():
            answer = self.answer.result()
        if isinstance(answer, bytes):
            try:
                self.request.read(answer)
            except PlanFormatError as exception:
                answer = f"gave a wrong answer: {exception}"
            else:
                self.worker.failures = 0
                return answer
        if answer is not None:
            self.worker.give_up(self.process, answer)
        return self.request.plan()


class PlanningWorker:
    """The worker process, which the first request starts. For one thread, the main one."""

    def __init__(self) -> None:
        self.failures = 0
        self._process: _Process | None = None
        self._complaint: str | None = None
        self._complaints: set[str] = set()

    @property
    def pid(self) -> int | None:
        """The worker's process id; None while there is none."""
        return None if self._process is None else self._process.popen.pid

    def submit(self, request: PlanRequest) -> PlanTicket:
        """Let the worker plan, after all earlier requests. Returns at once and never raises."""
        answer: _Answer = futures.Future()
        try:
            if self._process is None:
                if self.failures >= MOST_FAILURES:
                    raise OSError(f"it failed {MOST_FAILURES} times")
                self._process = _Process()
                weakref.finalize(self, self._process.end)
            self._process.requests.put((request, answer))
        except (OSError, RuntimeError) as exception:
            self.give_up(self._process, f"got no request: {exception}")
            answer.set_result(None)
        return PlanTicket(request, self, self._process, answer)

    def complaint(self) -> str | None:
        """Return why the caller plans in line, once for each reason; None: nothing new."""
        complaint, self._complaint = self._complaint, None
        return complaint

    def close(self) -> None:
        """End the process, also while it plans or is stopped. A later request starts another."""
        if self._process is not None:
            self._process.end()
            self._process = None

    def give_up(self, process: _Process | None, why: str) -> None:
        """End a worker that failed; the next request starts another."""
        if process is self._process:  # else it was given up for an earlier request
            if why not in self._complaints:
                self._complaints.add(why)
                self._complaint = f"the planning worker {why}"
            self.failures += 1
            self.close()


class _Process:
    """A process, and the thread that moves requests and answers.

    The thread is needed since a socket's buffer is smaller than a plan.

    Raises:
        OSError, RuntimeError: process or thread cannot be started.
    """

    def __init__(self) -> None:
        if not sys.executable:  # as where Python is embedded
            raise FileNotFoundError("sys.executable is empty: it must be the path of Python")
        package = str(Path(__file__).parents[1])
        self._connection, others = Pipe()
        with others:
            self.popen = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _START, package, str(os.getpid())],
                stdin=others.fileno(),
                # The job's launcher may wait until all processes that can write there have ended.
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                # No signal to the job's processes reaches it, Ctrl-C included. In a session of its
                # own a worker that is stopped before its first line would stay so: in this one,
                # Unix continues and hangs up a stopped process group when its last parent ends.
                process_group=0,
            )
        self.requests: SimpleQueue[tuple[PlanRequest, _Answer] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._exchange, name="planning worker", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            self.popen.kill()
            self.popen.wait()
            raise

    def _exchange(self) -> None:
        failure = ""
        for request, answer in iter(self.requests.get, None):
            answered: bytes | str | None = failure
            if not failure:
                try:
                    self._connection.send(request)
                    answered = self._connection.recv()
                except (EOFError, OSError):
                    answered = failure = self._why_ended()
                except Exception as exception:  # of pickling, or of what is no answer
                    answered = failure = f"got no request or sent no answer: {exception!r:.200}"
            answer.set_result(answered)

    def _why_ended(self) -> str:
        try:
            code = self.popen.wait(JOIN_SECONDS)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        return f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"

    def end(self) -> None:
        """End process and thread."""
        self.popen.kill()  # does nothing in a fork of its parent
        self.requests.put(None)
        # The garbage collector may run in any thread, this one included.
        if threading.current_thread() is not self._thread:
            self._thread.join(JOIN_SECONDS)
        self.popen.wait()
        self._connection.close()


def serve() -> None:
    """Answer requests from standard input until it ends. The worker's side."""
    connection = Connection(sys.stdin.fileno())
    with contextlib.suppress(EOFError, OSError):
        while True:
            request: PlanRequest = connection.recv()
            answer: bytes | str | None
            try:
                answer = request.plan()
            except PlanningError:
                answer = None
            except Exception as exception:
                answer = f"raised {type(exception).__name__}: {exception}"
            connection.send(answer)
