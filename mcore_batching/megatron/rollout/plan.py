"""One plan of each step, made once: the job's first rank plans, all others receive the plan.

    all ranks        lengths ─┐                      ┌─ plan, checked where it arrives
    rank 0                    └─ planned, in line or ─┘
    its worker                   by a process ahead of the step

Samples that stay on their rank are not planned together: `plan_locally` applies one rule on each.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from mcore_batching.megatron.job.failure_watch import POLL_SECONDS
from mcore_batching.megatron.job.flat_values import digest_of
from mcore_batching.megatron.job.job import Job, say
from mcore_batching.megatron.rollout.samples import Samples
from mcore_batching.megatron.rows.schedule import MicroBatchSchedule
from mcore_batching.megatron.rows.shards import computed_alone, with_hosted
from mcore_batching.planning import Problem, StepPlan
from mcore_batching.planning.local import fill_local, least_count, pack_local
from mcore_batching.planning.plans.compact import plan_to_bytes
from mcore_batching.planning.worker import PlanningWorker, PlanRequest, PlanTicket

SECONDS_LATE = 3.0
"""Time that the worker has for a plan when it is due, beside twice what the slowest plan took in
line. At a tenth of it a worker that has yet to start is given up on a busy core; the device waits
ten times as long for one that is stopped if it is ten times as much."""


class Planner:
    """The planning rank's worker, and how long plans take there."""

    def __init__(self) -> None:
        self._worker = PlanningWorker()
        self._seconds_in_line = 0.0

    def begin(self, request: PlanRequest) -> PlanTicket:
        """Let the worker plan."""
        return self._worker.submit(request)

    def plan(self, job: Job, request: PlanRequest, ticket: PlanTicket | None) -> StepPlan:
        """The plan of a request, by the worker if `ticket` is of the same one, or in line."""
        if ticket is not None and ticket.request == request:
            plan = self._awaited(job, ticket)
            complaint = self._worker.complaint()
            if complaint is not None:
                say(f"{complaint}; the planning rank plans in line")
            return plan
        started = time.monotonic()
        plan = request.plan()
        self._seconds_in_line = max(self._seconds_in_line, time.monotonic() - started)
        return plan

    def _awaited(self, job: Job, ticket: PlanTicket) -> StepPlan:
        seconds = SECONDS_LATE + 2 * self._seconds_in_line
        ends = time.monotonic() + seconds
        while not ticket.is_ready and time.monotonic() < ends:
            job.watch.raise_reported()
            ticket.wait(POLL_SECONDS)
        return ticket.result(0.0, waited=seconds)


def is_planning_rank(job: Job) -> bool:
    """True on the rank that plans for all."""
    return job.consensus.rank == job.consensus.ranks[0]


def begin_plan(job: Job, request: PlanRequest) -> PlanTicket | None:
    """Let the planning rank's worker plan a step that is due later; None on other ranks."""
    return job.memory.only(Planner).begin(request) if is_planning_rank(job) else None


def plan_together(samples: Samples, step: int, ticket: PlanTicket | None = None) -> bytes:
    """The plan of a step of all ranks' samples, in its compact form. A collective.

    `ticket` is of a plan that was begun, if one was; of another request's it is not taken.

    Raises:
        PlanningFailedError: on every rank, if the planning rank could not plan.
        PlanMismatchError: on every rank, if they have other lengths.
    """
    job = samples.job
    with job.agreement("planning") as agree:
        agree.same("step to plan", step)
        samples.compare(agree)
        data = b""
        if is_planning_rank(job):
            with samples.naming(samples.computed(step)):
                plan = job.memory.only(Planner).plan(job, samples.request(step), ticket)
            data = plan_to_bytes(plan)
        size = agree.max("bytes of the plan", len(data))
    return job.consensus.broadcast_bytes("broadcasting the plan", data, size.value)


def plan_locally(samples: Samples) -> MicroBatchSchedule:
    """The schedule of samples that stay on their rank. A collective: all ranks take the largest
    count of micro-batches."""
    job, settings = samples.job, samples.settings
    with job.agreement("packing") as agree:
        samples.compare(agree)
        hosts, lengths = samples.own_hosts, samples.batch.total_lengths
        # Samples in a host's segment take no room in a row, and come back below.
        steps = computed_alone(tuple(map(tuple, samples.own_steps)), hosts)
        problems = list[Problem]()
        for indices in steps:
            with samples.naming(indices):
                of_step = [lengths[i] for i in indices]
                dims, config, costs = settings.dims, settings.config, settings.cost_model
                problems.append(
                    Problem.of(of_step, dims, config, costs, forward_only=samples.forward_only)
                )
        packed = [pack_local(problem) for problem in problems]
        counts = agree.max("micro-batches", [*map(least_count, problems, packed)])

    def filled() -> Iterator[tuple[tuple[int, ...], ...]]:
        for indices, problem, bins, count in zip(
            steps, problems, packed, counts.value, strict=True
        ):
            rows = fill_local(problem, bins, count)
            yield tuple(tuple(indices[place] for place in row) for row in rows)

    with job.agreement("filling") as agree:
        rows = with_hosted(tuple(filled()), hosts)
        # Stages and tensor-parallel ranks that ran other rows would send tensors of other shapes.
        agree.same("samples and plan (sha256)", digest_of([lengths, rows]), within="replica")
    digest = digest_of([*samples.digests.values(), counts.value])
    return samples.scheduled(samples.batch.data, rows, hosts, digest)
