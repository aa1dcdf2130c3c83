"""Steps that are planned, exchanged and collated while the device runs those before.

    main thread   step n: first pass, reads samples of n+1, other passes ...   step n+1 is ready
    a thread                          lengths     samples move, rows are laid out
    a process                                plan

The thread takes all steps of the planning protocol, by messages of its own. What it made is taken
if all ranks have it, of exactly the samples and settings of the step; that is one agreement. If
not, the step is planned in line, with the same result: each rank by the plan that its process has
made, or else by its own. The later steps of a rollout are waited for, and planned by the thread
where the process is late or has failed.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import time
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError, wait
from typing import Any

import torch.distributed as dist

from mcore_batching.batch.agreement.consensus import Statement
from mcore_batching.batch.agreement.figures import least, rank_total
from mcore_batching.megatron.job.consensus import JobConsensus
from mcore_batching.megatron.job.failure_watch import POLL_SECONDS
from mcore_batching.megatron.job.job import Job, say
from mcore_batching.megatron.rollout.maker import Ahead, Make, Maker, RolloutAhead
from mcore_batching.megatron.rollout.settings import Settings
from mcore_batching.megatron.rows.prepared_step import PreparedStep
from mcore_batching.megatron.rows.schedule import MicroBatchSchedule
from mcore_batching.megatron.timing import learners_of
from mcore_batching.planning import CostModel, PlanningError
from mcore_batching.planning.planning_process import Request


class PlansAhead:
    """The steps of a job that are made ahead: the next one, or the later ones of rollouts."""

    def __init__(self) -> None:
        self._ahead: Ahead | None = None
        self._maker: Maker | None = None
        self._made_for: JobConsensus | None = None
        self._seconds_in_line = 0.0
        self._times: collections.Counter[type[Exception]] = collections.Counter()

    def connect(self, job: Job) -> None:
        """Be ready to make steps. A collective at the first call, and where the job has connected
        anew."""
        if self._made_for is not job.consensus:
            if self._maker is not None:
                self._maker.end()
            consensus = job.consensus.for_thread()
            with job.watch.reporting("starting the thread that plans ahead"):
                self._maker = Maker(consensus)
            self._made_for = job.consensus  # last: whoever calls again after a failure starts anew
            # With the job, which a new one replaces where Megatron's groups are made anew, or with
            # the interpreter.
            weakref.finalize(self, self._maker.end)

    def begin(self, job: Job, make: Make) -> None:
        """Let the next step be made, in a thread; what `make` raises is found out in line.

        All ranks call it equally often; not a collective.
        """
        ahead = Ahead(job, make)
        self._request(ahead)
        self._ahead = ahead

    def begin_rollout(self, job: Job, make: Make) -> Callable[[], MicroBatchSchedule]:
        """Let the schedule of all steps of a rollout be made. A collective as `connect`, no other.

        Returns:
            waits for the schedule; raises what `make` raised, and `PipelineFailedError` as soon as
            a rank has failed.
        """
        self.connect(job)
        ahead = RolloutAhead(job, make, functools.partial(self._say, waits="its next steps wait"))
        self._request(ahead)
        made, watch = ahead.made, ahead.watch  # not what it is made of, which may be large

        def schedule() -> MicroBatchSchedule:
            while not wait([made], POLL_SECONDS).done:
                watch.raise_reported()
            found: MicroBatchSchedule = made.result()
            return found

        return schedule

    def _request(self, ahead: Ahead) -> None:
        assert self._maker is not None
        if self._ahead is not None:
            self._ahead.plan.cancel()  # its thread would go on waiting for a plan that is late
        self._maker.requests.put(ahead)

    def take(
        self, job: Job, chunks: list[Any], given: CostModel | None, *, is_of_these: bool
    ) -> tuple[PreparedStep | None, Settings | None]:
        """The step that was begun last, if all ranks have made it. A collective if any was begun.

        Args:
            job: the present one.
            chunks: this rank's model chunks.
            given: costs to plan by; None: by the arguments.
            is_of_these: it is of the samples that are due.

        Returns:
            the step, and the settings to plan it by otherwise, with costs as known when it began.
        """
        if self._ahead is None:  # as on every rank
            return None, None
        learns = given is None and job.options.learns_cost_model
        learner = learners_of(job).of(chunks) if learns else None

        def work() -> tuple[Settings, PreparedStep | None]:
            settings = Settings.of(job, chunks, given)
            made = self._made() if is_of_these else None
            if made is not None:
                # Costs may have been learnt, and arguments changed, since it began.
                planned = made.schedule
                if settings != Settings(planned.dims, planned.config, planned.cost_model):
                    made = None
            return settings, made

        def says(found: tuple[Settings, PreparedStep | None]) -> Statement:
            settings, made = found
            figures = {"made ahead": least(int(made is not None))}
            if learner is None:
                return Statement(figures=figures)
            figures["pass times"] = rank_total(learner.evidence(settings.dims))
            return Statement(figures=figures)

        agreed = job.consensus.agree("next step", work, says)
        settings, made = agreed.result
        if learner is not None:
            learner.learn(agreed.figures["pass times"])
        if made is None or not agreed.figures["made ahead"]:
            return None, settings
        schedule = dataclasses.replace(made.schedule, learnt=settings.learnt)
        return dataclasses.replace(made, schedule=schedule), settings

    def _made(self) -> PreparedStep | None:
        assert self._ahead is not None
        try:
            # It is waited for as long as planning takes in line, in which it may be late twice.
            made: PreparedStep = self._ahead.made.result(timeout=self._seconds_in_line)
            return made
        except Exception:
            self._ahead.plan.cancel()  # other ranks need not wait for it
            return None

    def plan(self, request: Request) -> Any:
        """The plan of a step that was not made ahead on all ranks, if on this one, or in line."""
        if self._ahead is not None and self._ahead.plan.done():
            try:
                planned_of, made = self._ahead.plan.result()
                if planned_of == request:
                    return made
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

    def _say(self, why: Exception, waits: str = "its device waits") -> None:
        """Once a job and kind, on the rank that it is about."""
        self._times[type(why)] += 1
        # The first plan may be late for the start of the process alone.
        if self._times[type(why)] == 1 + isinstance(why, TimeoutError):
            say(f"rank {dist.get_rank()} plans in line, for which {waits}: {why}")
