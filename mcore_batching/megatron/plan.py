"""From samples to schedules: one plan of each step, made once, and samples that move by it.

    all ranks        lengths ─┐                      ┌─ plan, checked where it arrives
    rank 0                    └─ planned, in line or ─┘
    its worker                   by a process ahead of the step

    rank 0 brings samples 0 1 2, rank 1 brings 3 4
    plan: rank 0 runs ((1, 4),), rank 1 ((0, 3), (2,))
    moved: 4 to rank 0, 0 and 2 to rank 1

Samples that share tokens move together; the plan has the trees that it put into a micro-batch, and
the rank that runs them finds the nodes. Samples that stay on their rank are not planned together:
`plan_locally` applies one rule on each.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

from megatron.core import parallel_state

from mcore_batching.batch.columns import Columns
from mcore_batching.megatron.exchange import SampleMoves, leaving, receive_columns
from mcore_batching.megatron.job import Job, say
from mcore_batching.megatron.samples import Samples
from mcore_batching.megatron.schedule import (
    GlobalPlan,
    MicroBatchSchedule,
)
from mcore_batching.megatron.serialize import digest_of
from mcore_batching.megatron.topology import make_row_groups
from mcore_batching.megatron.watch import POLL_SECONDS
from mcore_batching.planning import (
    Problem,
    StepPlan,
    validate_plan,
)
from mcore_batching.planning.local import fill_local, least_count, pack_local
from mcore_batching.planning.plans.statistics import shared_tokens, sharing
from mcore_batching.planning.prefix_trees import PrefixTree, most_tokens_of_part, parts_of
from mcore_batching.planning.worker import PlanningWorker, PlanRequest, PlanTicket

_STAGE = "exchanging samples"
_SHARED = "prefixes are shared"  # a line that is printed once a job

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

    def plan(self, job: Job, request: PlanRequest, ticket: PlanTicket | None) -> bytes:
        """The plan of a request, in JSON: the worker's if `ticket` is of the same one."""
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

    def _awaited(self, job: Job, ticket: PlanTicket) -> bytes:
        seconds = SECONDS_LATE + 2 * self._seconds_in_line
        ends = time.monotonic() + seconds
        while not ticket.is_ready and time.monotonic() < ends:
            job.watch.raise_reported()
            ticket.wait(POLL_SECONDS)
        return ticket.result(seconds)


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
        staying, parts = leaving(moves, batch.data)
    columns = receive_columns(job, moves, staying, parts, _STAGE)
    return _scheduled(samples, (plan,), moves, columns)


def _scheduled(
    samples: Samples, plans: tuple[GlobalPlan, ...], moves: SampleMoves, columns: Columns
) -> MicroBatchSchedule:
    """The schedule of planned steps of samples that are here. A collective."""
    job, batch, place = samples.job, samples.batch, moves.places
    forest = None
    if samples.beginnings is not None:
        with job.agreement("finding samples that begin alike"):
            trees = [tree for plan in plans for tree in plan.trees_among(place)]
            forest = samples.beginnings.forest_here(columns, trees)
        # Once a job: it goes through all samples of the step.
        if _SHARED not in job.memory.said:
            saved = (sharing(*shared_tokens(each.plan, each.lengths)) for each in plans)
            if text := next(filter(None, saved), ""):
                job.say_once(_SHARED, text)
    return MicroBatchSchedule(
        rollout_data=columns,
        template=batch.template,
        steps=tuple(
            tuple(tuple(place[n] for n in row) for row in plan.rows_on(moves.own)) for plan in plans
        ),
        plans=plans,
        moves=moves,
        forest=forest,
        plan_digest=digest_of([each.plan.digest() for each in plans]),
        settings=samples.settings,
        spare=0 if samples.beginnings is None else samples.beginnings.spare,
        pad_token_id=job.options.checked_pad_token_id(),
        vocabulary_size=batch.vocabulary_size,
        samples_per_step=batch.global_batch_size,
    )


def _plan_together(samples: Samples, step: int, ticket: PlanTicket | None) -> bytes:
    """The plan of a step of all ranks' samples, as JSON. A collective."""
    job = samples.job
    with job.agreement("planning") as agree:
        agree.same("step to plan", step)
        samples.compare(agree)
        data = b""
        if is_planning_rank(job):
            with samples.naming(samples.steps[step]):
                data = job.memory.only(Planner).plan(job, samples.request(step), ticket)
        size = agree.max("bytes of the plan", len(data))
    return job.consensus.broadcast_bytes("broadcasting the plan", data, size.value)


def _checked_plan(samples: Samples, step: int, data: bytes) -> GlobalPlan:
    numbers = samples.steps[step]
    lengths = [samples.lengths[number] for number in numbers]
    plan = samples.request(step, plans=False).read(data)
    validate_plan(plan, lengths)
    return GlobalPlan(plan, list(numbers), lengths)


def _moves(samples: Samples, made: GlobalPlan) -> SampleMoves:
    # Under dynamic CP the context-parallel ranks run rows of their own, of samples they all
    # brought.
    plan: StepPlan = made.plan
    num_ranks = len(plan.micro_batches)
    sharing = num_ranks // plan.dims.data_parallel
    own = parallel_state.get_data_parallel_rank(with_context_parallel=sharing > 1)
    runs_on = [
        sorted(number for row in made.rows_on(rank) for number in row) for rank in range(num_ranks)
    ]
    lengths = samples.batch.total_lengths, samples.batch.data.response_lengths
    return SampleMoves(own, samples.first, runs_on, lengths, sharing, samples.before)


def plan_locally(samples: Samples) -> MicroBatchSchedule:
    """The schedule of samples that stay on their rank. A collective: each rank packs its own, and
    all take the largest count of micro-batches."""
    job, settings = samples.job, samples.settings
    with job.agreement("packing") as agree:
        samples.compare(agree)
        own = [_local_problem(samples, step) for step in range(len(samples.steps))]
        packed = [pack_local(problem) for _, problem in own]
        needed = [
            least_count(problem, bins) for (_, problem), bins in zip(own, packed, strict=True)
        ]
        counts = agree.max("micro-batches", needed)

    with job.agreement("filling") as agree:
        rows = []
        for (units, problem), bins, count in zip(own, packed, counts.value, strict=True):
            filled = fill_local(problem, bins, count)
            rows.append(tuple(_samples_of([units[place] for place in row]) for row in filled))
        trees = [[each for each in units if isinstance(each, PrefixTree)] for units, _ in own]
        # Stages and tensor-parallel ranks that ran other rows would send tensors of other shapes.
        agree.same("plan (sha256)", digest_of(rows), within="replica")
        ranks = agree.gather("micro-batches", (rows, trees))

    plans = []
    for step, numbers in enumerate(samples.steps):
        plan = StepPlan(
            micro_batches=tuple(rows[step] for rows, _ in ranks.values),
            num_microbatches=counts.value[step],
            sample_indices=tuple(range(len(numbers))),
            dims=settings.dims,
            config=settings.config,
            scope="local",
            cost_model=settings.cost_model,
            forward_only=samples.forward_only,
            trees=tuple(tree for _, trees in ranks.values for tree in trees[step]),
        )
        plans.append(GlobalPlan(plan, list(numbers), [samples.lengths[n] for n in numbers]))
    own_rank = parallel_state.get_data_parallel_rank()
    stay = [range(*each) for each in itertools.pairwise(samples.first)]
    lengths = samples.batch.total_lengths, samples.batch.data.response_lengths
    moves = SampleMoves(own_rank, samples.first, stay, lengths, before=samples.before)
    return _scheduled(samples, tuple(plans), moves, samples.batch.data)


def _local_problem(samples: Samples, step: int) -> tuple[list[PrefixTree | int], Problem]:
    """This rank's part of a step: samples, by their places in the step, and parts of prefix trees
    as large as the cap lets them be; what they are to the planner."""
    settings, numbers, own = samples.settings, samples.steps[step], samples.own
    given = settings.dims, settings.config, settings.cost_model
    places = [place for place, number in enumerate(numbers) if number in own]
    lengths = [samples.lengths[numbers[place]] for place in places]
    with samples.naming([numbers[place] - own.start for place in places]):
        problem = Problem.of(lengths, *given, forward_only=samples.forward_only)
    if samples.beginnings is None:
        return [*places], problem
    forest = samples.beginnings.forest(samples.lengths, [numbers[place] for place in places])
    most = most_tokens_of_part(settings.dims, settings.config)
    units = list[PrefixTree | int]()
    for part in parts_of(forest, settings.cost_model, most):
        is_shared = len(part) > 1
        units.append(forest.tree(part).renumbered(places) if is_shared else places[part[0]])
    units += [places[at] for at, leaf in enumerate(forest.last) if leaf < 0]
    units.sort(key=lambda each: each if isinstance(each, int) else each.samples[0])
    trees = [each if isinstance(each, PrefixTree) else None for each in units]
    sizes = [
        samples.lengths[numbers[each]] if isinstance(each, int) else each.size for each in units
    ]
    return units, Problem.of(sizes, *given, forward_only=samples.forward_only, trees=trees)


def _samples_of(units: Sequence[PrefixTree | int]) -> tuple[int, ...]:
    found = ((each,) if isinstance(each, int) else each.samples for each in units)
    return tuple(sorted(itertools.chain.from_iterable(found)))
