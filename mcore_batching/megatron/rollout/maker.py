"""The thread that makes steps ahead, and the process that plans for it."""

from __future__ import annotations

import contextlib
import functools
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, InvalidStateError
from operator import methodcaller
from queue import SimpleQueue
from typing import Any

import torch

from mcore_batching.megatron.job.consensus import JobConsensus
from mcore_batching.megatron.job.failure_watch import FailureWatch
from mcore_batching.megatron.job.job import Job
from mcore_batching.planning import PlanningError
from mcore_batching.planning.errors import MCoreBatchingError
from mcore_batching.planning.planning_process import PlanningProcess, Request

JOIN_SECONDS = 4.0
"""Time that the thread has to end with the job. It takes as long only where another rank has failed
and it waits for that one's messages: doubled, such a job ends 4 s later; halved, more of them end
by an abort after their error is printed, where processes take long to end."""
ANSWER_SECONDS = 30.0
"""Time that the process has for one plan of a rollout, before the thread makes it: halved, a slow
plan on a busy core is more often made twice; doubled, a job whose process is stopped waits as much
longer, once."""

Plan = Callable[[Request], Any]
IN_LINE: Plan = methodcaller("plan")
"""Plans where it is called."""
Make = Callable[[Job, str, Plan], Any]
"""``(job, operation, plan) -> what is made``: all of the planning protocol, and what follows it."""
Planned = Future[tuple[Request, Any]]


class Ahead:
    """One step that is made ahead, by a function that is called in the thread."""

    def __init__(self, job: Job, make: Make) -> None:
        self.job, self.make = job, make
        self.plan: Planned = Future()  # whoever no longer waits for it cancels it
        self.made: Future[Any] = Future()  # what `make` gave or raised

    def planned(self, maker: Maker, request: Request) -> Any:
        """The plan of a request, by the process, or `PlanningError`. In the thread."""
        maker.ask(self.plan, request)
        try:
            return self.plan.result()[1]
        except Exception as exception:
            # Of this package: what ranks raise alike is no sign that they lost each other.
            raise PlanningError(f"{type(exception).__name__}: {exception}") from exception

    def lost(self, why: str, exception: Exception) -> None:
        """This rank's thread will answer no other's again. In the thread."""
        del exception
        settle(self.plan, ConnectionError(why))


class RolloutAhead(Ahead):
    """Later steps of a rollout, of which any number of plans are asked."""

    def __init__(self, job: Job, make: Make, say: Callable[[Exception], None]) -> None:
        super().__init__(job, make)
        self._say = say  # why this rank makes a plan in the thread
        # Now: in the thread Megatron's groups may be gone.
        self.watch: FailureWatch = job.watch

    def planned(self, maker: Maker, request: Request) -> Any:
        """By the process, or where that one is lost or late by the thread."""
        asked: Planned = Future()
        maker.ask(asked, request)
        try:
            return asked.result(ANSWER_SECONDS)[1]
        except (PlanningError, CancelledError):
            pass  # raised below with all that it says; the process is late with another one
        except TimeoutError:
            asked.cancel()
            self._say(RuntimeError(f"the planning process took more than {ANSWER_SECONDS:g} s"))
        except Exception as exception:
            self._say(exception)
        maker.raise_lost()
        return request.plan()

    def lost(self, why: str, exception: Exception) -> None:
        """As `Ahead.lost`; nothing can be made in its place, so that the job is to end."""
        del why
        # The other ranks' threads may wait for this one's messages, and their main threads for
        # them.
        self.watch.report("planning the later steps of a rollout", exception)


class Maker:
    """The thread that makes steps, and the process that plans.

    Between two steps nothing here refers to the job, so that it can be collected meanwhile: errors
    are kept in words, since their tracebacks would.
    """

    def __init__(self, consensus: JobConsensus) -> None:
        self._consensus = consensus
        self._device = torch.cuda.current_device()
        # What is to be made, in the same order on every rank; None ends the thread.
        self.requests: SimpleQueue[Ahead | None] = SimpleQueue()
        self._planning = threading.Lock()
        self._process: PlanningProcess | None = None
        self._failure: str | None = None  # of the process
        self._loss: str | None = None  # of the other ranks
        self._has_ended = False
        self._is_up = threading.Event()
        self._thread = threading.Thread(target=self._run, name="plans ahead", daemon=True)
        self._thread.start()
        self._is_up.wait()

    def _run(self) -> None:
        # Here, since it ends with the thread that starts it.
        try:
            self._process = PlanningProcess()
        except Exception as exception:  # whatever it is, plans are made without it
            self._failure = f"no planning process: {exception}"
        self._is_up.set()
        # Threads have a device of their own.
        torch.cuda.set_device(self._device)
        number = 0
        while self._make_next(number):
            number += 1

    def _make_next(self, number: int) -> bool:
        ahead = self.requests.get()
        if ahead is None:
            return False
        job = Job(ahead.job.options, ahead.job.memory, of_thread=self._consensus)
        try:
            self.raise_lost()
            plan = functools.partial(ahead.planned, self)
            ahead.made.set_result(ahead.make(job, f"step {number} ahead", plan))
        except MCoreBatchingError as exception:
            ahead.made.set_exception(exception)  # on all ranks alike
        except Exception as exception:
            # Ranks may now be at different steps: this one waits for no other again.
            self._loss = self._loss or f"ranks lost each other: {exception}"
            if not self._has_ended:
                ahead.lost(self._loss, exception)
            ahead.made.set_exception(exception)
            # Their threads would wait for this one's messages for as long as it lives, and abort
            # them where they come back from gloo into an interpreter that is going down.
            del job
            traceback.clear_frames(exception.__traceback__)
            self._consensus.leave()
        return True

    def raise_lost(self) -> None:
        """Raise if this rank waits for no other again."""
        if self._loss is not None:
            raise ConnectionError(self._loss)

    def ask(self, plan: Planned, request: Request) -> None:
        """Let the process settle a plan; cancel it where the process is late with another one."""
        if self._failure is not None:
            settle(plan, RuntimeError(self._failure))
        elif not self._planning.acquire(blocking=False):
            plan.cancel()
        else:
            # Not here: a process that is stopped must not keep this thread from its messages.
            try:
                threading.Thread(target=self._ask, args=(plan, request), daemon=True).start()
            except RuntimeError as exception:  # no thread can be started
                self._planning.release()
                settle(plan, exception)

    def _ask(self, plan: Planned, request: Request) -> None:
        assert self._process is not None
        try:
            outcome: Any = request, self._process.plan(request)
        except PlanningError as exception:
            outcome = exception
        except Exception as exception:
            self._failure = f"planning process {self._process.pid} failed: {exception}"
            outcome = RuntimeError(self._failure)
        finally:
            self._planning.release()  # first: who waits may ask for the next plan as soon as it can
        settle(plan, outcome)

    def end(self) -> None:
        """End thread and process."""
        self._has_ended = True
        self._loss = self._loss or "the job has ended"
        self.requests.put(None)
        if self._process is not None:
            self._process.end()
        # One that came back from C++ into an interpreter that is going down would abort it. The
        # collector of garbage may run in any thread, this one included.
        if threading.current_thread() is not self._thread:
            self._thread.join(JOIN_SECONDS)


def settle(future: Future[Any], outcome: Any) -> None:
    """Let a future have a result, or an exception, unless it is settled or cancelled."""
    settles = future.set_exception if isinstance(outcome, Exception) else future.set_result
    with contextlib.suppress(InvalidStateError):
        settles(outcome)
