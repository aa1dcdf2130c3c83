"""One process that plans steps while the process that started it does something else.

The worker runs this package's planner from where it was imported, in an interpreter that reads
neither the working directory nor `PYTHON...` variables nor site packages. Requests and plans travel
over its standard input and output. Whatever happens to it, a plan is made: the caller then plans
in line, with the same result.

The worker ends with its parent: by the end of its input, and on Linux by a signal that also ends a
stopped process. Linux sends that signal when the thread that started the worker ends, so `submit`
is for the main thread. One gap is left: a worker that is stopped in its first 20 ms, before it can
ask for the signal, stays stopped if its parent ends before the stop takes effect.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import struct
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from queue import SimpleQueue
from typing import IO

from mcore_batching.planning.config import PlannerConfig
from mcore_batching.planning.costs.cost import CostModel
from mcore_batching.planning.errors import PlanFormatError, PlanningError
from mcore_batching.planning.parallel_dims import ParallelDims
from mcore_batching.planning.planner import plan_step
from mcore_batching.planning.plans.plan import StepPlan
from mcore_batching.planning.prefix_trees import Forest
from mcore_batching.planning.tree_planner import plan_forest

MOST_FAILURES = 3
"""Workers that may fail one after the other; then all plans are made in line."""
JOIN_SECONDS = 2.0
"""How long the end of the thread is awaited after its worker was killed."""

_FRAME = struct.Struct("<4sII")
"""Before a request or an answer: `_MAGIC`, the request's number, bytes that follow."""
_MAGIC = b"mcbw"
_PLAN, _IN_LINE, _FAILED = b"P", b"I", b"F"
"""First byte of an answer: a plan, nothing (in line the planner raises an error), or why there is
no plan."""

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
    """Arguments of `plan_step`, or of `plan_forest`; equal requests have equal plans."""

    lengths: tuple[int, ...]
    dims: ParallelDims
    config: PlannerConfig
    cost_model: CostModel
    forward_only: bool = False
    forest: Forest | None = None

    def plan(self) -> bytes:
        """Plan in this process; the plan as JSON. Raises what `plan_step` does."""
        settings = self.dims, self.config, self.cost_model
        if self.forest is not None:
            plan = plan_forest(self.forest, *settings, forward_only=self.forward_only)
        else:
            plan = plan_step(self.lengths, *settings, forward_only=self.forward_only)
        return plan.to_json().encode()

    def read(self, document: bytes) -> StepPlan:
        """Return the plan of this request, wherever it was made. What the plan contains is for
        `validate_plan` to check.

        Raises:
            PlanFormatError: no plan, a damaged one, or one of another request.
        """
        try:
            plan = StepPlan.from_json(document.decode())
        except UnicodeDecodeError:
            raise PlanFormatError(f"{len(document)} bytes that are no plan; plan again") from None
        due = self.dims, self.config, tuple(range(len(self.lengths)))
        if (plan.dims, plan.config, plan.sample_indices) != due:
            raise PlanFormatError(
                f"a plan of {plan.num_samples} samples for {len(plan.micro_batches)} ranks, "
                "expected one by this job's settings; plan again"
            )
        # The document has neither, as a plan is the same whatever it was made by.
        return dataclasses.replace(plan, cost_model=self.cost_model, forward_only=self.forward_only)


class PlanTicket:
    """A plan that was requested of the worker."""

    def __init__(
        self, worker: PlanningWorker, process: _Process | None, request: PlanRequest
    ) -> None:
        self._worker, self._process = worker, process
        self.request = request
        self._plan = b""
        # Set by the worker's thread, the event last.
        self._answer = b""
        self._is_settled = threading.Event()

    @property
    def is_ready(self) -> bool:
        """True if `result` does not wait for the worker."""
        return self._is_settled.is_set()

    def wait(self, timeout: float) -> bool:
        """Wait for the worker, up to `timeout` seconds; return `is_ready`."""
        return self._is_settled.wait(timeout)

    def result(self, waited: float) -> bytes:
        """Return the plan as JSON: the worker's if it came within the `waited` seconds that passed
        in `wait`, or else one made in line.

        Raises:
            PlanningError: as `plan_step` does for this request.
        """
        if not self._plan:
            self._plan = self._received(waited) or self.request.plan()
        return self._plan

    def settle(self, answer: bytes) -> None:
        """Let `result` return by an answer of the worker, or by why there is none."""
        self._answer = answer
        self._is_settled.set()

    def _received(self, waited: float) -> bytes:
        """The worker's plan; nothing where there is none, with the reason if it failed."""
        is_ready, fault = self.is_ready, ""  # before the answer, which comes first
        kind, content = self._answer[:1], self._answer[1:]
        if not is_ready:
            fault = f"took more than {waited:.3g} s for a plan"
        elif kind == _FAILED:
            fault = content.decode(errors="replace")
        elif kind == _PLAN:
            try:
                self.request.read(content)
            except PlanFormatError as exception:
                fault = f"gave a wrong answer: {exception}"
        elif kind != _IN_LINE:
            fault = "sent no answer to a request"
        if fault:
            self._worker.give_up(self._process, fault)
        elif kind == _PLAN:
            self._worker.failures = 0
            return content
        return b""


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
        try:
            if self._process is None:
                if self.failures >= MOST_FAILURES:
                    raise OSError(f"it failed {MOST_FAILURES} times")
                self._process = _Process()
                weakref.finalize(self, self._process.end)
            ticket = PlanTicket(self, self._process, request)
            self._process.requests.put((pickle.dumps(request), ticket))
        except (OSError, RuntimeError, TypeError, AttributeError, pickle.PickleError) as exception:
            self.give_up(self._process, f"got no request: {exception}")
            ticket = PlanTicket(self, None, request)
            ticket.settle(_IN_LINE)
        return ticket

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

    The thread is needed since a pipe's buffer is smaller than a plan. It touches nothing but
    pipes.

    Raises:
        OSError, RuntimeError: process or thread cannot be started.
    """

    def __init__(self) -> None:
        if not sys.executable:  # as where Python is embedded
            raise FileNotFoundError("sys.executable is empty: it must be the path of Python")
        package = str(Path(__file__).parents[1])
        self.popen = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _START, package, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # The job's launcher may wait until all processes that can write there have ended.
            stderr=subprocess.DEVNULL,
            cwd="/",
            # No signal to the job's processes reaches it, Ctrl-C included. In a session of its own
            # a worker that is stopped before its first line would stay so: in this one, Unix
            # continues and hangs up a stopped process group when its last parent ends.
            process_group=0,
        )
        self.requests: SimpleQueue[tuple[bytes, PlanTicket] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._exchange, name="planning worker", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            self.popen.kill()
            self.popen.wait()
            raise

    def _exchange(self) -> None:
        assert self.popen.stdin is not None
        assert self.popen.stdout is not None
        failure: str | None = None
        for number, (packet, ticket) in enumerate(iter(self.requests.get, None)):
            if failure is None:
                try:
                    _write(self.popen.stdin, number, packet)
                    answered, answer = _read(self.popen.stdout)
                    if answered != number:
                        raise PlanFormatError("an answer to another request")
                except (EOFError, OSError):
                    failure = self._why_ended()
                except (PlanFormatError, MemoryError) as exception:
                    failure = f"sent {exception or 'too much'}"
            ticket.settle(answer if failure is None else _FAILED + failure.encode())

    def _why_ended(self) -> str:
        try:
            code = self.popen.wait(JOIN_SECONDS)
        except subprocess.TimeoutExpired:
            return "closed its pipes"
        return f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"

    def end(self) -> None:
        """End process and thread."""
        self.popen.kill()  # does nothing in a fork of its parent
        self.requests.put(None)
        # The garbage collector may run in any thread, this one included.
        if threading.current_thread() is not self._thread:
            self._thread.join(JOIN_SECONDS)
        self.popen.wait()
        for pipe in (self.popen.stdin, self.popen.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def _write(pipe: IO[bytes], number: int, packet: bytes) -> None:
    pipe.write(_FRAME.pack(_MAGIC, number, len(packet)) + packet)
    pipe.flush()


def _read(pipe: IO[bytes]) -> tuple[int, bytes]:
    """Read what `_write` wrote.

    Raises:
        EOFError: nothing more comes.
        PlanFormatError: what comes is not from `_write`.
    """
    head = pipe.read(_FRAME.size)
    if len(head) < _FRAME.size:
        raise EOFError
    magic, number, size = _FRAME.unpack(head)
    if magic != _MAGIC:
        raise PlanFormatError(f"{head!r}, the start of no answer")
    packet = pipe.read(size)
    if len(packet) < size:
        raise EOFError
    return number, packet


def serve() -> None:
    """Answer requests from standard input until it ends. The worker's side."""
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # what is printed is no answer
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            number, packet = _read(requests)
            try:
                request: PlanRequest = pickle.loads(packet)
                answer = _PLAN + request.plan()
            except PlanningError:
                answer = _IN_LINE
            except Exception as exception:
                answer = _FAILED + f"raised {type(exception).__name__}: {exception}".encode()
            _write(answers, number, answer)
