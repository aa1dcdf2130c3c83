"""The next step, planned, exchanged and collated while the device runs this one.

    main thread   step n: first pass, reads samples of n+1, other passes ...   step n+1 is ready
    a thread                          lengths     samples move, rows are laid out
    a process                                plan

The thread takes all steps of the planning protocol, by messages of its own. What it made is taken
if all ranks have it, of exactly the samples and settings of the step; that is one agreement. If
not, the step is planned in line, with the same result: each rank by the plan that its process has
made, or, where that one is late, failed or is of something else, by its own.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, InvalidStateError
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from mcore_batching.batch.agreement.consensus import Statement
from mcore_batching.batch.agreement.figures import least
from mcore_batching.megatron import cpu_emulation
from mcore_batching.megatron.errors import PlanningFailedError
from mcore_batching.megatron.job.consensus import JobConsensus
from mcore_batching.megatron.job.failure_watch import NO_WATCH, NoWatch
from mcore_batching.megatron.job.job import Job
from mcore_batching.megatron.learning.cost_learning import learners_of
from mcore_batching.megatron.rollout.settings import Settings
from mcore_batching.megatron.rows.prepared_step import PreparedStep
from mcore_batching.planning import CostModel, PlanningError, StepPlan
from mcore_batching.planning.errors import MCoreBatchingError
from mcore_batching.planning.learning.learnt_costs import LearntCosts
from mcore_batching.planning.planning_process import PlanningProcess, PlanRequest

JOIN_SECONDS = 2.0
"""Time that the thread has to end with the job. It takes as long only where another rank has failed
and it waits for that one's messages: doubled, such a job ends 2 s later."""

Plan = Callable[[PlanRequest], StepPlan]
Make = Callable[[Job, str, Plan], PreparedStep]
"""``(job, operation, plan) -> step``: all of the planning protocol, and `prepare`."""


_Planned = Future[tuple[PlanRequest, StepPlan]]


class _Ahead:
    """One step that is made ahead."""

    def __init__(self, job: Job, make: Make) -> None:
        self.job, self.make = job, make
        self.plan: _Planned = Future()
        self.step: Future[PreparedStep] = Future()


class PlansAhead:
    """The steps of a job that are made ahead, one at a time."""

    def __init__(self) -> None:
        self._ahead: _Ahead | None = None
        self._maker: _Maker | None = None
        self._seconds_in_line = 0.0
        self._times: collections.Counter[type[Exception]] = collections.Counter()

    def connect(self, job: Job) -> None:
        """Be ready to make steps. A collective over all ranks at the first call.

        Raises:
            CollectiveError: on every rank, as `Job.consensus`.
        """
        if self._maker is None:
            self._maker = _Maker(job.consensus.for_thread())
            # With the job, which a new one replaces where Megatron's groups are made anew, or with
            # the interpreter.
            weakref.finalize(self, self._maker.end)

    @property
    def has_begun(self) -> bool:
        """True if a step has begun to be made; the same on every rank."""
        return self._ahead is not None

    def begin(self, job: Job, make: Make) -> None:
        """Let the next step be made. All ranks call it equally often; not a collective.

        Args:
            job: the present one.
            make: called in a thread; what it raises is found out in line.
        """
        assert self._maker is not None
        if self._ahead is not None:
            self._ahead.plan.cancel()  # its thread would go on waiting for a plan that is late
        self._ahead = _Ahead(job, make)
        self._maker.requests.put(self._ahead)

    def take(
        self, job: Job, chunks: list[Any], given: CostModel | None, *, is_of_these: bool
    ) -> tuple[PreparedStep | None, LearntCosts | None]:
        """The step that was begun last, if all ranks have made it. A collective over all ranks.

        Args:
            job: the present one.
            chunks: this rank's model chunks.
            given: costs to plan by; None: by the arguments.
            is_of_these: it is of the samples that are due.

        Returns:
            the step; the costs to plan it by otherwise, where they are learnt: those known when it
            was begun.

        Raises:
            CollectiveError: on every rank, if settings cannot be read on any.
        """
        learns = given is None and job.options.learns_cost_model
        learner = learners_of(job).of(chunks) if learns else None

        def work() -> tuple[Settings, PreparedStep | None]:
            settings = Settings.of(job, chunks, None, given, forward_only=False)
            made = self._made() if is_of_these else None
            if made is not None:
                planned = made.schedule
                if settings != Settings(planned.dims, planned.config, planned.cost_model):
                    made = None
            return settings, made

        def says(found: tuple[Settings, PreparedStep | None]) -> Statement:
            settings, made = found
            figures = {"made ahead": least(int(made is not None))}
            if learner is None:
                return Statement(figures=figures)
            evidence = learner.evidence(
                shares_rows=settings.config.max_context_parallel is not None,
                in_lockstep=settings.dims.in_lockstep,
            )
            equal = {"what was learnt of costs": learner.state_dict()}
            return Statement(equal=equal, figures=figures | evidence)

        agreed = job.consensus.agree("next step", work, says, failure=PlanningFailedError)
        made, learnt = agreed.result[1], None
        if learner is not None:
            learnt = learner.learnt
            learner.learn(agreed.figures)
        if made is None or not agreed.figures["made ahead"]:
            return None, learnt
        schedule = dataclasses.replace(made.schedule, learnt=learnt)
        return dataclasses.replace(made, schedule=schedule), learnt

    def _made(self) -> PreparedStep | None:
        assert self._ahead is not None
        try:
            # It is waited for as long as planning takes in line, in which it may be late twice.
            return self._ahead.step.result(timeout=self._seconds_in_line)
        except Exception:
            self._ahead.plan.cancel()  # other ranks need not wait for it
            return None

    def plan(self, request: PlanRequest) -> StepPlan:
        """The plan of a step that was not made ahead on all ranks, if on this one, or in line.

        Raises:
            As `plan_step`.
        """
        if self._ahead is not None and self._ahead.plan.done():
            try:
                planned_of, plan = self._ahead.plan.result()
                if planned_of == request:
                    return plan
            except PlanningError:
                pass  # nothing to plan, or an error that is raised in line with all that it says
            except CancelledError:
                self._say(TimeoutError("the plan that is made ahead is late"))
            except Exception as exception:
                self._say(exception)
        started = time.perf_counter()
        plan = request.plan()
        self._seconds_in_line = time.perf_counter() - started
        return plan

    def _say(self, why: Exception) -> None:
        """Once a job and kind, on the rank that it is about."""
        self._times[type(why)] += 1
        # The first plan may be late for the start of the process alone.
        if self._times[type(why)] == 1 + isinstance(why, TimeoutError):
            print(
                f"mcore_batching: rank {dist.get_rank()} plans in line, for which its device "
                f"waits: {why}",
                flush=True,
            )


@dataclasses.dataclass(frozen=True)
class _JobOfThread(Job):
    """A job whose agreements are the thread's own."""

    own: JobConsensus

    def _connected(self) -> tuple[JobConsensus, NoWatch]:
        return self.own, NO_WATCH


class _Maker:
    """The thread that makes steps, and the process that plans.

    Between two steps nothing here refers to the job, so that it can be collected meanwhile: errors
    are kept in words, since their tracebacks would.
    """

    def __init__(self, consensus: JobConsensus) -> None:
        self._consensus = consensus
        self._device = torch.cuda.current_device()
        self.requests: SimpleQueue[_Ahead | None] = SimpleQueue()
        self._planning = threading.Lock()
        self._process: PlanningProcess | None = None
        self._failure: str | None = None  # of the process
        self._loss: str | None = None  # of the other ranks
        self._is_up = threading.Event()
        self._thread = threading.Thread(target=self._run, name="plans ahead", daemon=True)
        self._thread.start()
        self._is_up.wait()

    def _run(self) -> None:
        # Here, since it ends with the thread that starts it.
        try:
            self._process = PlanningProcess()
        except OSError as exception:
            self._failure = f"no planning process: {exception}"
        self._is_up.set()
        # Threads have a device, and modes of torch's functions, of their own.
        torch.cuda.set_device(self._device)
        cpu_emulation.enable_in_thread()
        number = 0
        while self._make_next(number):
            number += 1

    def _make_next(self, number: int) -> bool:
        ahead = self.requests.get()
        if ahead is None:
            return False
        job = _JobOfThread(ahead.job.options, ahead.job.memory, self._consensus)
        try:
            if self._loss is not None:
                raise ConnectionError(self._loss)
            plan = functools.partial(self._plan, ahead.plan)
            ahead.step.set_result(ahead.make(job, f"step {number} ahead", plan))
        except MCoreBatchingError as exception:
            ahead.step.set_exception(exception)  # on all ranks alike
        except Exception as exception:
            # Ranks may now be at different steps: this one waits for no other again.
            self._loss = self._loss or f"ranks lost each other: {exception}"
            _settle(ahead.plan, ConnectionError(self._loss))
            ahead.step.set_exception(exception)
        return True

    def _plan(self, plan: _Planned, request: PlanRequest) -> StepPlan:
        if self._failure is not None:
            _settle(plan, RuntimeError(self._failure))
        elif not self._planning.acquire(blocking=False):
            plan.cancel()
        else:
            # Not here: a process that is stopped must not keep this thread from its messages.
            threading.Thread(target=self._ask, args=(plan, request), daemon=True).start()
        try:
            return plan.result()[1]
        except Exception as exception:
            # Of this package: what ranks raise alike is no sign that they lost each other.
            raise PlanningError(f"{type(exception).__name__}: {exception}") from exception

    def _ask(self, plan: _Planned, request: PlanRequest) -> None:
        assert self._process is not None
        try:
            made = self._process.plan(request)
            with contextlib.suppress(InvalidStateError):  # nobody waits any more
                plan.set_result((request, made))
        except PlanningError as exception:
            _settle(plan, exception)
        except Exception as exception:
            self._failure = f"planning process {self._process.pid} failed: {exception}"
            _settle(plan, RuntimeError(self._failure))
        finally:
            self._planning.release()

    def end(self) -> None:
        """End thread and process."""
        self.requests.put(None)
        if self._process is not None:
            self._process.end()
        # One that came back from C++ into an interpreter that is going down would abort it. The
        # collector of garbage may run in any thread, this one included.
        if threading.current_thread() is not self._thread:
            self._thread.join(JOIN_SECONDS)


def _settle(future: Future[Any], exception: Exception) -> None:
    with contextlib.suppress(InvalidStateError):
        future.set_exception(exception)
