"""The next step's plan, made while the device runs this one.

    main thread   step n: first pass, reads samples of n+1, other passes ...   step n+1 has its plan
    a thread                          hears all ranks' lengths
    a process                                                   plans n+1

A plan that was made ahead is used if it is of exactly what the step is to be planned of. One that
is late, failed, or is of something else is made in line, and is the same. So no rank needs to know
how another came by its plan, and nothing that is done ahead is part of an agreement.
"""

from __future__ import annotations

import collections
import datetime
import queue
import threading
import time
import weakref
from array import array
from collections.abc import Sequence
from concurrent.futures import Future

import torch.distributed as dist

# As in `job.consensus`: slime puts another in the place of `dist.new_group`.
from torch.distributed.distributed_c10d import new_group

from mcore_batching.batch.agreement.rank_messages import RankMessages
from mcore_batching.megatron.job.job import Job
from mcore_batching.megatron.rollout.settings import Settings
from mcore_batching.planning import PlanningError, StepPlan
from mcore_batching.planning.planning_process import PlanningProcess, PlanRequest

JOIN_SECONDS = 2.0
"""Time that the thread has to end with the job. It takes as long only where another rank has failed
and it waits for that one's lengths: doubled, such a job ends 2 s later."""

_NO_DATA = -1
"""In place of the number of samples, of a rank that has not read any."""

_Ahead = Future[tuple[PlanRequest, StepPlan]]


class PlansAhead:
    """The plans of a job that are made ahead, one at a time."""

    def __init__(self) -> None:
        self._ahead: _Ahead | None = None
        self._maker: _Maker | None = None
        self._seconds_in_line = 0.0
        self._times: collections.Counter[type[Exception]] = collections.Counter()

    def connect(self, job: Job) -> None:
        """Be ready to plan ahead. A collective over all ranks at the first call.

        Raises:
            CollectiveError: on every rank, as `Job.consensus`.
        """
        if self._maker is None:
            self._maker = _Maker(job)
            # With the job, which a new one replaces where Megatron's groups are made anew, or with
            # the interpreter.
            weakref.finalize(self, self._maker.end)

    def begin(self, lengths: Sequence[int] | None, settings: Settings) -> None:
        """Let the next step be planned. All ranks call it equally often; not a collective.

        Args:
            lengths: of this rank's samples of that step; None where it has read none.
            settings: by which the step will be planned.
        """
        assert self._maker is not None
        self._ahead = Future()
        self._maker.requests.put((lengths, settings, self._ahead))

    def plan(self, request: PlanRequest) -> StepPlan:
        """The plan of a step: made ahead, or in line.

        Raises:
            As `plan_step`.
        """
        if self._ahead is not None:
            try:
                # It is waited for as long as planning takes in line, in which it may be late twice.
                planned_of, plan = self._ahead.result(timeout=self._seconds_in_line)
                if planned_of == request:
                    return plan
            except PlanningError:
                pass  # nothing to plan, or an error that is raised in line with all that it says
            except TimeoutError:
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


class _Maker:
    """The thread that gathers lengths, and the process that plans.

    Nothing here refers to `PlansAhead`, so that it can be collected while the thread runs.
    """

    def __init__(self, job: Job) -> None:
        self._replicas = job.consensus.replicas
        # Of its own: messages of the thread and of the main one would meet in another, and a rank
        # that this thread gives up waiting for would be lost for agreements.
        timeout = datetime.timedelta(seconds=job.options.checked_timeout_seconds())
        self._messages = RankMessages(new_group(backend="gloo", timeout=timeout))
        self.requests: queue.SimpleQueue[tuple[Sequence[int] | None, Settings, _Ahead] | None]
        self.requests = queue.SimpleQueue()
        self._planning = threading.Lock()
        self._process: PlanningProcess | None = None
        self._failure: Exception | None = None
        try:
            self._process = PlanningProcess()
        except OSError as exception:
            self._failure = RuntimeError(f"no planning process: {exception}")
        self._thread = threading.Thread(target=self._run, name="plans ahead", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        lost: Exception | None = None
        for number, (own, settings, ahead) in enumerate(iter(self.requests.get, None)):
            try:
                if lost is not None:
                    raise lost
                lengths = self._gathered(number, own)
            except Exception as exception:
                # Ranks may now be at different steps: this one waits for no other again.
                lost = exception
                ahead.set_exception(ConnectionError(f"lengths were not gathered: {lost}"))
                continue
            request = PlanRequest(lengths, settings.dims, settings.config, settings.cost_model)
            if not self._planning.acquire(blocking=False):
                ahead.set_exception(TimeoutError())
            else:
                # Not here: a process that is stopped must not keep this thread from its messages.
                threading.Thread(target=self._plan, args=(request, ahead), daemon=True).start()

    def _gathered(self, number: int, own: Sequence[int] | None) -> tuple[int, ...]:
        """The lengths of all data-parallel ranks, one after the other; empty if some have none."""

        def combined(a: bytes, b: bytes) -> bytes:
            return array("q", map(max, array("q", a), array("q", b))).tobytes()

        count = _NO_DATA if own is None else len(own)
        head = array("q", [number, -number, count]).tobytes()
        newest, oldest, most = array("q", self._messages.reduce(head, combined))
        if newest != -oldest:
            raise RuntimeError(f"ranks are at steps {-oldest} to {newest} since the start")
        padded = array("q", [count, *(own or ()), *[0] * (most - max(count, 0))])
        of_ranks = [array("q", each) for each in self._messages.gather(padded.tobytes())]
        lengths: list[int] = []
        for ranks in self._replicas:
            has = [of_ranks[rank] for rank in ranks if of_ranks[rank][0] != _NO_DATA]
            if not has:
                return ()
            lengths += has[0][1 : 1 + has[0][0]]
        return tuple(lengths)

    def _plan(self, request: PlanRequest, ahead: _Ahead) -> None:
        try:
            if self._failure is not None:
                raise self._failure
            assert self._process is not None
            ahead.set_result((request, self._process.plan(request)))
        except PlanningError as exception:
            ahead.set_exception(exception)
        except Exception as exception:
            if self._failure is None:
                pid = self._process.pid if self._process else None
                self._failure = RuntimeError(f"planning process {pid} failed: {exception}")
            ahead.set_exception(self._failure)
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
