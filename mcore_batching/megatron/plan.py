"""From samples to schedules: one plan of each step, made once, and samples that move by it.

    all ranks        lengths ─┐                      ┌─ plan, checked where it arrives
    rank 0                    └─ planned, in line or ─┘
    its worker                   by a process ahead of the step

    rank 0 brings samples 0 1 2, rank 1 brings 3 4
    plan: rank 0 runs ((1, 4),), rank 1 ((0, 3), (2,))
    moved: 4 to rank 0, 0 and 2 to rank 1

Samples that share a segment move together, and the plan is of their hosts alone. Hosts are found on
the rank that brings the samples: turns of a trajectory that several ranks bring are in as many
segments. Samples that stay on their rank are not planned together: `plan_locally` applies one rule
on each.
"""

from __future__ import annotations

import dataclasses
import time

from megatron.core import parallel_state

from mcore_batching.batch.prefix_tree import samples_of_hosts
from mcore_batching.megatron.exchange import SampleMoves, leaving, receive_columns
from mcore_batching.megatron.job import Job, say
from mcore_batching.megatron.samples import Samples
from mcore_batching.megatron.schedule import (
    GlobalPlan,
    MicroBatchSchedule,
    computed_alone,
    with_hosted,
)
from mcore_batching.megatron.serialize import digest_of
from mcore_batching.megatron.topology import make_row_groups
from mcore_batching.megatron.watch import POLL_SECONDS
from mcore_batching.planning import Problem, StepPlan, validate_plan
from mcore_batching.planning.local import fill_local, least_count, pack_local
from mcore_batching.planning.worker import PlanningWorker, PlanRequest, PlanTicket

_STAGE = "exchanging samples"

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


def planned_step(
    samples: Samples, step: int, ticket: PlanTicket | None = None
) -> MicroBatchSchedule:
    """The schedule of one step of all ranks' samples, those that run here. A collective.

    `ticket` is of a plan that was begun, if one was; of another request's it is not taken.

    Raises:
        PlanningFailedError: on every rank, if the planning rank could not plan, the plan is broken,
            or values cannot move.
        PlanMismatchError: on every rank, if they have other lengths.
    """
    job, batch, settings = samples.job, samples.batch, samples.settings
    if settings.config.max_context_parallel is not None:
        # All sizes that a row may have, before the plan: making a group is a collective over all
        # ranks, and a plan may give some size to rows of some ranks alone.
        make_row_groups(job, settings.dims.row_sizes(settings.config.max_context_parallel))
    data = _plan_together(samples, step, ticket)
    with job.agreement(_STAGE):
        plan = _checked_plan(samples, step, data)
        moves = _moves(samples, plan)
        place, hosts = moves.places, None
        if samples.hosts is not None:
            # A host is always here as well: the samples of a segment move together.
            hosts = [place[samples.hosts[number]] for number in moves.held]
        rows = tuple(tuple(place[n] for n in row) for row in plan.rows_on(moves.own))
        staying, parts = leaving(moves, batch.data)
    columns = receive_columns(job, moves, staying, parts, _STAGE)
    steps, digest = with_hosted((rows,), hosts), digest_of(plan.plan.digest())
    return samples.scheduled(columns, steps, hosts, digest, moves=moves, plans=(plan,))


def _plan_together(samples: Samples, step: int, ticket: PlanTicket | None) -> bytes:
    """The plan of a step of all ranks' samples, as JSON. A collective."""
    job = samples.job
    with job.agreement("planning") as agree:
        agree.same("step to plan", step)
        samples.compare(agree)
        data = b""
        if is_planning_rank(job):
            with samples.naming(samples.computed(step)):
                plan = job.memory.only(Planner).plan(job, samples.request(step), ticket)
            data = plan.to_json().encode()
        size = agree.max("bytes of the plan", len(data))
    return job.consensus.broadcast_bytes("broadcasting the plan", data, size.value)


def _checked_plan(samples: Samples, step: int, data: bytes) -> GlobalPlan:
    computed = samples.computed(step)
    lengths = [samples.lengths[number] for number in computed]
    plan = samples.request(step).read(data)
    validate_plan(plan, lengths)
    hosted = tuple(samples.lengths[number] for number in samples.hosted(step))
    plan = dataclasses.replace(plan, hosted_lengths=hosted)
    return GlobalPlan(plan, computed, lengths)


def _moves(samples: Samples, made: GlobalPlan) -> SampleMoves:
    # Under dynamic CP the context-parallel ranks run rows of their own, of samples they all
    # brought.
    plan: StepPlan = made.plan
    num_ranks = len(plan.micro_batches)
    sharing = num_ranks // plan.dims.data_parallel
    own = parallel_state.get_data_parallel_rank(with_context_parallel=sharing > 1)
    hosts = samples.hosts
    members = None if hosts is None else samples_of_hosts(hosts)
    runs_on = []
    for rank in range(num_ranks):
        planned = [number for row in made.rows_on(rank) for number in row]
        # By their host: the plan names hosts alone, and what they host has to follow them.
        runs = planned if members is None else [n for host in planned for n in members[host]]
        runs_on.append(sorted(runs))
    lengths = samples.batch.total_lengths, samples.batch.data.response_lengths
    return SampleMoves(own, samples.first, runs_on, lengths, sharing, samples.before)


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

    with job.agreement("filling") as agree:
        filled = []
        for indices, problem, bins, count in zip(
            steps, problems, packed, counts.value, strict=True
        ):
            rows = fill_local(problem, bins, count)
            filled.append(tuple(tuple(indices[place] for place in row) for row in rows))
        all_rows = with_hosted(tuple(filled), hosts)
        # Stages and tensor-parallel ranks that ran other rows would send tensors of other shapes.
        agree.same("samples and plan (sha256)", digest_of([lengths, all_rows]), within="replica")
    digest = digest_of([*samples.digests.values(), counts.value])
    return samples.scheduled(samples.batch.data, all_rows, hosts, digest)
