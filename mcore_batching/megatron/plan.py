"""From samples to schedules: one plan of each step, made once, and samples that move by it.

    all ranks        lengths ─┐                      ┌─ plan, checked where it arrives
    rank 0                    └─ planned, in line or ─┘
    its worker                   by a process ahead of the step

    rank 0 brings samples 0 1 2, rank 1 brings 3 4
    plan: rank 0 runs ((1,), (4,)), rank 1 ((0, 3), (2,))
    moved: 4 to rank 0, 0 and 2 to rank 1

Samples that share tokens move together; the plan has the trees that it put into a micro-batch, and
the rank that runs them finds the nodes. Samples that stay on their rank
(``--no-dynamic-batch-exchange``), and forward passes under a cap of their own, are not planned
together: each rank packs the samples that are there by one rule.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state

from mcore_batching.batch.columns import Columns
from mcore_batching.batch.prefix_tree import find_forest_of, require_shared
from mcore_batching.megatron.checks.settings import prepare_model
from mcore_batching.megatron.exchange import SampleMoves, digest_of, leaving, receive_columns
from mcore_batching.megatron.job import Job, say
from mcore_batching.megatron.samples import Samples
from mcore_batching.megatron.schedule import MicroBatchSchedule
from mcore_batching.megatron.topology import make_row_groups, model_chunks
from mcore_batching.megatron.watch import POLL_SECONDS
from mcore_batching.planning import Problem, StepPlan, validate_plan
from mcore_batching.planning.forest import Forest, PrefixTree, most_tokens_of_part, parts_of
from mcore_batching.planning.integers import as_integer
from mcore_batching.planning.local import fill_local, least_count, pack_local
from mcore_batching.planning.plans.statistics import shared_tokens, sharing
from mcore_batching.planning.worker import PlanningWorker, PlanRequest, PlanTicket

_EXCHANGING = "exchanging samples"
_SHARED = "prefixes are shared"  # a line that is printed once a job

SECONDS_LATE = 3.0
"""Time that the worker has for a plan when it is due, beside twice what the slowest plan took in
line. At a tenth of it a worker that has yet to start is given up on a busy core; the device waits
ten times as long for one that is stopped if it is ten times as much."""


class Planner:
    """The planning rank's worker, and how long plans take there."""

    def __init__(self) -> None:
        self.worker = PlanningWorker()
        self._seconds_in_line = 0.0

    def plan(self, job: Job, request: PlanRequest, ticket: PlanTicket | None) -> bytes:
        """The plan of a request, in bytes: the worker's if `ticket` is of the same one."""
        if ticket is not None and ticket.request == request:
            seconds = SECONDS_LATE + 2 * self._seconds_in_line
            ends = time.monotonic() + seconds
            while time.monotonic() < ends and not ticket.wait(POLL_SECONDS):
                job.watch.raise_reported()
            plan = ticket.result(seconds)
            complaint = self.worker.complaint()
            if complaint is not None:
                say(f"{complaint}; the planning rank plans in line")
            return plan
        started = time.monotonic()
        plan = request.plan()
        self._seconds_in_line = max(self._seconds_in_line, time.monotonic() - started)
        return plan


def is_planning_rank(job: Job) -> bool:
    """True on the rank that plans for all."""
    return job.consensus.rank == job.consensus.ranks[0]


def begin_plan(job: Job, request: PlanRequest) -> PlanTicket | None:
    """Let the planning rank's worker plan a step that is due later; None on other ranks."""
    return _planner(job).worker.submit(request) if is_planning_rank(job) else None


def _planner(job: Job) -> Planner:
    """The job's, made at the first call."""
    planner: Planner = job.memory.planner or Planner()
    job.memory.planner = planner
    return planner


def plan_rollout(samples: Samples, ticket: PlanTicket | None = None) -> MicroBatchSchedule:
    """The schedule of samples that were read, of its first step at least. A collective.

    `ticket` is of the first step's plan, on the planning rank where it was begun.

    Raises:
        PlanningFailedError: on every rank, if planning or the exchange failed on any.
        PlanMismatchError: on every rank, if they disagree on samples or plan.
    """
    job, dims, exchanges = samples.job, samples.settings.dims, samples.job.options.exchanges_samples
    # Under dynamic CP the context-parallel ranks run rows of their own, of samples they all
    # brought.
    is_shared = samples.settings.config.max_context_parallel is not None
    ranks_alike = dims.context_parallel if is_shared else 1
    own = parallel_state.get_data_parallel_rank(with_context_parallel=is_shared)
    ranks: list[Sequence[int]] = [[] for _ in range(dims.data_parallel * ranks_alike)]
    if not exchanges:
        ranks = [range(*each) for each in itertools.pairwise(samples.first)]
    schedule = MicroBatchSchedule(
        samples=samples,
        moves=SampleMoves(own, samples.first, ranks, ranks_alike),
        parts=[samples.data.taken([]) if exchanges else samples.data],
        template=samples.template,
    )
    if not exchanges:
        _pack_here(schedule)
        return schedule
    # First: the worker plans while the first step is planned in line.
    if is_planning_rank(job):
        for step in range(1, len(samples.steps)):
            schedule.tickets[step] = _planner(job).worker.submit(samples.request(step))
    plan_next_step(schedule, ticket)
    return schedule


def planned(schedule: MicroBatchSchedule, step: Any = None) -> MicroBatchSchedule:
    """The schedule, with its steps planned up to this one at least, by default all.

    A collective over all ranks if some of them is not planned yet; raises as `plan_rollout`.
    """
    last = schedule.num_steps - 1 if step is None else as_integer(step)
    if last is not None and last in range(schedule.num_steps):  # else `check_step` refuses it
        while len(schedule.steps) <= last:
            plan_next_step(schedule, schedule.tickets.pop(len(schedule.steps), None))
    return schedule


def plan_forward_passes(schedule: MicroBatchSchedule, job: Job, model: Any) -> MicroBatchSchedule:
    """The schedule, or that of the same batch under the cap of forward passes: each rank packs the
    samples that it runs in training. A collective over all ranks where it has to be made, at the
    first call under such a cap."""
    # `forward_only` has compared this among the ranks.
    if not job.options.has_own_forward_cap or planned(schedule).for_forward_passes is not None:
        return schedule.for_forward_passes or schedule
    samples, chunks = schedule.samples, model_chunks(model)
    with job.agreement("reading settings of forward passes") as agree:
        config = job.options.forward_only_config(schedule.config, schedule.dims)
        settings = dataclasses.replace(schedule.settings, config=config, forward_only=True)
        # Perhaps another model than was trained, such as a reference model.
        prepare_model(chunks, settings.dims, settings.config)
        for name, value in settings.comparable().items():
            agree.same(name, value)
    again = MicroBatchSchedule(
        samples=dataclasses.replace(samples, settings=settings),
        moves=schedule.moves,
        parts=[schedule.rollout_data],
        template=schedule.template,
    )
    _pack_here(again)
    schedule.for_forward_passes = again
    return again


def plan_next_step(schedule: MicroBatchSchedule, ticket: PlanTicket | None) -> None:
    """Plan a step of all ranks' samples, and exchange these. A collective; raises as
    `plan_rollout`. `ticket` is of a plan that was begun; of another request it is not taken."""
    samples, step = schedule.samples, len(schedule.steps)
    job, settings, numbers = samples.job, samples.settings, samples.steps[step]
    if settings.config.max_context_parallel is not None:
        # All sizes that a row may have, before the plan: making a group is a collective over all
        # ranks, and a plan may give some size to rows of some ranks alone.
        make_row_groups(job, settings.dims.row_sizes(settings.config.max_context_parallel))
    made, first = b"\0", job.consensus.ranks[0]
    with job.agreement("planning") as agree:
        agree.same("step to plan", step)
        samples.compare(agree)
        if is_planning_rank(job):
            # Later steps were begun with these samples: their request, forest included, is there.
            request = ticket.request if ticket is not None and step else samples.request(step)
            with settings.naming(numbers):
                made = _planner(job).plan(job, request, ticket)
        size = agree.max("bytes of the plan", len(made))
    data = torch.frombuffer(bytearray(made), dtype=torch.uint8)
    data = job.consensus.broadcast("broadcasting the plan", data, size.value, first)
    with job.agreement(_EXCHANGING):
        lengths = samples.step_lengths(step)
        plan = settings.request(tuple(lengths)).read(data.numpy().tobytes())
        validate_plan(plan, lengths)
        runs_on = [sorted(numbers[i] for row in rows for i in row) for rows in plan.micro_batches]
        moves = dataclasses.replace(schedule.moves, runs_on=runs_on)
        staying, parts = leaving(moves, samples.data)
    columns = receive_columns(job, moves, staying, parts, _EXCHANGING)
    trees = [tree.renumbered(numbers) for tree in plan.trees]
    forest = _forest_here(samples, moves, columns, trees)
    schedule.add_samples(moves, columns, forest)
    schedule.add_plan(plan)
    if schedule.is_planned:  # the fields of the samples that left are not needed any more
        lengths_alone = samples.data.replaced({})
        schedule.samples = dataclasses.replace(samples, data=lengths_alone)
    _say_shared(schedule)


def _forest_here(
    samples: Samples, moves: SampleMoves, columns: Columns, trees: Sequence[PrefixTree]
) -> Forest | None:
    """The nodes that samples which run here share; ``trees`` of all ranks, by number. A collective
    where samples share tokens."""
    if samples.beginnings is None:
        return None
    spare, branches = samples.beginnings.spare, samples.beginnings.branches
    with samples.job.agreement("finding samples that begin alike"):
        # Samples that are in no tree of several are units by themselves.
        units = [*range(len(trees), len(trees) + len(columns.total_lengths))]
        for number, tree in enumerate(trees):
            for sample in tree.samples if tree.samples[0] in moves.places else ():
                units[moves.places[sample]] = number
        found = find_forest_of(columns, units, spare=spare, branches=branches)
        require_shared(found, columns)  # value by value
        return found


def _say_shared(schedule: MicroBatchSchedule) -> None:
    """Print once a job what sharing tokens saves."""
    job = schedule.samples.job
    # Once a job: it goes through all samples of the step.
    if schedule.forest is not None and _SHARED not in job.memory.said:
        steps = range(len(schedule.plans))
        saved = (sharing(*shared_tokens(*schedule.step_plan(step))) for step in steps)
        if text := next(filter(None, saved), ""):
            job.say_once(_SHARED, text)


def _pack_here(schedule: MicroBatchSchedule) -> None:
    """Pack the samples that run here. A collective: all ranks take the largest count of
    micro-batches."""
    samples, moves = schedule.samples, schedule.moves
    job, settings = samples.job, samples.settings
    with job.agreement("packing") as agree:
        samples.compare(agree)
        own = [_local_units(samples, moves, step) for step in range(len(samples.steps))]
        packed = [pack_local(problem) for _, problem in own]
        needed = [
            least_count(problem, bins) for (_, problem), bins in zip(own, packed, strict=True)
        ]
        counts = agree.max("micro-batches", needed)

    with job.agreement("filling") as agree:
        rows = []
        for (units, problem), bins, count in zip(own, packed, counts.value, strict=True):
            filled = fill_local(problem, bins, count)
            rows.append(
                tuple(tuple(sorted(i for at in row for i in units[at].samples)) for row in filled)
            )
        trees = [[unit for unit in units if len(unit.samples) > 1] for units, _ in own]
        # Stages and tensor-parallel ranks that ran other rows would send tensors of other shapes.
        agree.same("plan (sha256)", digest_of(rows), within="replica")
        ranks = agree.gather("micro-batches", (rows, trees))

    numbered_trees = [
        tree.renumbered(numbers)
        for of_steps, numbers in zip(trees, samples.steps, strict=True)
        for tree in of_steps
    ]
    schedule.forest = _forest_here(samples, moves, schedule.rollout_data, numbered_trees)
    for step, numbers in enumerate(samples.steps):
        plan = StepPlan(
            micro_batches=tuple(rows[step] for rows, _ in ranks.values),
            num_microbatches=counts.value[step],
            sample_indices=tuple(range(len(numbers))),
            dims=settings.dims,
            config=settings.config,
            scope="local",
            cost_model=settings.cost_model,
            forward_only=settings.forward_only,
            trees=tuple(tree for _, trees in ranks.values for tree in trees[step]),
        )
        schedule.add_plan(plan)
    _say_shared(schedule)


def _local_units(
    samples: Samples, moves: SampleMoves, step: int
) -> tuple[list[PrefixTree], Problem]:
    """This rank's part of a step, in units numbered by places in the step: single samples, and
    parts of prefix trees as large as the cap lets them be; what they are to the planner."""
    settings, numbers = samples.settings, samples.steps[step]
    given = settings.dims, settings.config, settings.cost_model
    places = [place for place, number in enumerate(numbers) if number in moves.places]
    lengths = [samples.lengths[numbers[place]] for place in places]
    with samples.settings.naming([moves.origin(numbers[place])[1] for place in places]):
        problem = Problem.of(lengths, *given, forward_only=settings.forward_only)
    if samples.beginnings is None:
        single = zip(places, lengths, strict=True)
        return [PrefixTree((place,), ((0, length),)) for place, length in single], problem
    forest = samples.beginnings.forest(samples.lengths, [numbers[place] for place in places])
    most = most_tokens_of_part(settings.dims, settings.config)
    parts = parts_of(forest, settings.cost_model, most)
    parts += [(at,) for at, leaf in enumerate(forest.last) if leaf < 0]
    units = [forest.tree(part).renumbered(places) for part in sorted(map(sorted, parts))]
    sizes = [unit.size for unit in units]
    return units, Problem.of(sizes, *given, forward_only=settings.forward_only, trees=units)
