"""Planning of all data-parallel ranks' samples as one, and the exchange that it asks for.

Samples are numbered through, data-parallel rank after data-parallel rank:

    rank 0 holds samples 0 1 2, rank 1 holds 3 4
    plan: rank 0 runs ((1, 4),), rank 1 ((0, 3), (2,))
    moved: 4 to rank 0, 0 and 2 to rank 1

Lengths are gathered first, and every rank makes the same plan of them; only then do samples move,
each once, to the rank that runs it, or to the ranks that share its row. Samples that share a
segment move together, and the plan is of their hosts alone. They are found on the rank that brings
them: turns of a trajectory that several ranks bring are in as many segments.

A rank holds the samples of one step behind those of another, planned at once or in a thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron.core import parallel_state
from torch import Tensor

from mcore_batching.batch.agreement.consensus import Statement
from mcore_batching.batch.rows.prefixes import samples_of_hosts
from mcore_batching.megatron.job.flat_values import digest_of, flat, unflat
from mcore_batching.megatron.job.row_groups import make_row_groups
from mcore_batching.megatron.rollout.cut_steps import CutSteps, say_saving
from mcore_batching.megatron.rollout.planned_rollout import PlannedRollout, with_later_steps
from mcore_batching.megatron.rollout.rollout import Rollout, RolloutRequest
from mcore_batching.megatron.rows.sample_moves import SampleMoves
from mcore_batching.megatron.rows.schedule import GlobalPlan, MicroBatchSchedule, digest_of_plans
from mcore_batching.megatron.rows.shards import Shard, with_hosted
from mcore_batching.planning import Problem, StepPlan
from mcore_batching.planning.planning_process import PlanRequest


@dataclasses.dataclass(frozen=True)
class _AllSamples:
    """The samples of all data-parallel ranks, numbered through."""

    lengths: list[int]  # of each, in tokens
    hosts: list[int]  # for each the sample in whose segment it lies, itself if it has a segment
    first: list[int]  # number of each rank's first sample, and the number of all samples
    # For each step the samples that are computed, and those that lie in their segments.
    steps: list[tuple[list[int], list[int]]]

    @classmethod
    def of(cls, shards: Sequence[Shard]) -> _AllSamples:
        """Of the shards of all data-parallel ranks."""
        counts = [len(shard.lengths) for shard in shards]
        first = list(itertools.accumulate(counts, initial=0))
        placed = list(zip(first, shards, strict=False))
        hosts = [
            start + host
            for start, shard in placed
            for host in shard.hosts or range(len(shard.lengths))
        ]
        steps = []
        for step in range(len(shards[0].steps)):
            numbers = [start + i for start, shard in placed for i in shard.steps[step][0]]
            # Who lies in a host's segment costs nothing: the plan must not see it.
            computed = [number for number in numbers if hosts[number] == number]
            steps.append((computed, [number for number in numbers if hosts[number] != number]))
        lengths = [length for shard in shards for length in shard.lengths]
        return cls(lengths, hosts, first, steps)

    def computed_lengths(self) -> list[list[int]]:
        """For each step of the samples that are computed."""
        return [[self.lengths[number] for number in computed] for computed, _ in self.steps]

    def of_steps(self, steps: slice) -> _AllSamples:
        """The same samples, of which some steps are looked at."""
        return dataclasses.replace(self, steps=self.steps[steps])


def plan_all_samples(rollout: Rollout) -> PlannedRollout:
    """Plan all ranks' samples and move them, of several steps perhaps the first's. A collective."""
    request, settings = rollout.request, rollout.settings
    most = settings.config.max_context_parallel
    if most is not None:
        # All sizes that a row may have, before the plan: making a group is a collective over all
        # ranks, and a plan may give some size to rows of some ranks alone.
        make_row_groups(request.job, settings.dims.row_sizes(most))
    cut, samples = _gathered(rollout)
    unplanned, num_steps = cut.unplanned(), len(samples.steps)
    if num_steps < 2 or not request.may_plan_ahead:
        return PlannedRollout(_moved(request, unplanned, samples))
    later, kept = samples.of_steps(slice(1, None)), list[Tensor]()

    def keep() -> None:
        # While all ranks can be told what is wrong with later steps, and before the caller can
        # change its values.
        for (computed, _), lengths in zip(later.steps, later.computed_lengths(), strict=True):
            with _naming(request, computed):
                Problem.of(lengths, settings.dims, settings.config)
        kept.append(flat(cut.batch.data))

    made = _moved(request, unplanned, samples.of_steps(slice(1)), keep)
    without_data = dataclasses.replace(unplanned, rollout_data={})

    def plan_later(request: RolloutRequest) -> MicroBatchSchedule:
        unplanned = dataclasses.replace(without_data, rollout_data=unflat(kept[0]))
        return _moved(request, unplanned, later)

    return with_later_steps(request, made, num_steps, plan_later)


def _gathered(rollout: Rollout) -> tuple[CutSteps, _AllSamples]:
    """This rank's samples of every step, and those of all ranks by their lengths."""

    def work() -> tuple[CutSteps, Shard]:
        cut = CutSteps.of(rollout)
        rows = tuple((tuple(step),) for step in cut.steps)
        return cut, Shard(cut.batch.total_lengths, rows, cut.hosts)

    job = rollout.request.job
    agreed, shards = job.consensus.gather("gathering lengths", work, lambda cut: cut.statement())
    say_saving(job, agreed)
    return agreed.result, _AllSamples.of(shards)


def _moved(
    request: RolloutRequest,
    unplanned: MicroBatchSchedule,
    samples: _AllSamples,
    also: Callable[[], None] = lambda: None,
) -> MicroBatchSchedule:
    """Plan steps, and exchange the samples that each rank brought, in the rollout data. A
    collective over all ranks, in which what `also` does may fail on one, too."""
    together = _planned_together(request, unplanned, samples.computed_lengths())
    # Under dynamic CP the context-parallel ranks run rows of their own, of samples they all
    # brought.
    num_ranks = unplanned.config.num_ranks(unplanned.dims)
    sharing = num_ranks // unplanned.dims.data_parallel
    own = parallel_state.get_data_parallel_rank(with_context_parallel=sharing > 1)

    def work() -> tuple[MicroBatchSchedule, list[Any]]:
        plans = _global_plans(request, unplanned, samples, together)
        also()
        members = samples_of_hosts(samples.hosts)
        runs_on = [_run_on(rank, plans, members) for rank in range(num_ranks)]
        moves = SampleMoves(own, samples.first, runs_on, sharing)
        planned = _scheduled(unplanned, samples.hosts, plans, moves)
        return planned, moves.outgoing(unplanned.rollout_data)

    def says(planned: MicroBatchSchedule) -> Statement:
        return Statement(
            equal={
                "plan (sha256)": planned.plan_digest,
                # The ranks of a replica each heard of their own counterparts' lengths.
                "lengths of all samples (sha256)": digest_of(samples.lengths),
                "hosts of all samples (sha256)": digest_of(samples.hosts),
            }
        )

    def received(planned: MicroBatchSchedule, incoming: list[Any]) -> MicroBatchSchedule:
        assert planned.moves is not None
        arranged = planned.moves.arranged(incoming)
        # A rank that runs no samples got none, and still needs the fields for placeholders.
        data = {name: arranged.get(name, []) for name in unplanned.template}
        return dataclasses.replace(planned, rollout_data=data)

    return request.job.consensus.exchange("planning all samples", work, says, received)


def _scheduled(
    unplanned: MicroBatchSchedule,
    hosts: Sequence[int],
    plans: tuple[GlobalPlan, ...],
    moves: SampleMoves,
) -> MicroBatchSchedule:
    """Of the samples that will be here, by their places among these, but for their values."""
    place, own_hosts = moves.places, None
    if unplanned.hosts is not None:
        # A host is always here as well: `_run_on` moves the samples of a segment together.
        own_hosts = [place[hosts[number]] for number in moves.held]
    steps = tuple(
        tuple(tuple(place[number] for number in row) for row in made.rows_on(moves.own))
        for made in plans
    )
    return dataclasses.replace(
        unplanned,
        steps=with_hosted(steps, own_hosts),
        hosts=own_hosts,
        plan_digest=digest_of_plans(plans),
        moves=moves,
        plans=plans,
    )


def _global_plans(
    request: RolloutRequest,
    unplanned: MicroBatchSchedule,
    samples: _AllSamples,
    together: Sequence[StepPlan] | None,
) -> tuple[GlobalPlan, ...]:
    """The plans of all steps, made here unless they were made `together`."""
    plans = []
    for step, lengths in enumerate(samples.computed_lengths()):
        computed, hosted = samples.steps[step]
        # A sample over the cap is found inside the agreement, so that all ranks raise.
        with _naming(request, computed):
            planned = together[step] if together else _planned(request, unplanned, lengths)
        hosted_lengths = tuple(samples.lengths[number] for number in hosted)
        planned = dataclasses.replace(planned, hosted_lengths=hosted_lengths)
        plans.append(GlobalPlan(planned, computed, lengths))
    return tuple(plans)


def _naming(
    request: RolloutRequest, computed: Sequence[int]
) -> contextlib.AbstractContextManager[None]:
    """Let the planner's errors name samples by their number over all ranks."""
    return request.job.options.naming_the_cap(forward_only=request.forward_only, samples=computed)


def _planned(
    request: RolloutRequest, unplanned: MicroBatchSchedule, lengths: Sequence[int]
) -> StepPlan:
    of = unplanned.dims, unplanned.config, unplanned.cost_model
    plan: StepPlan = request.plan(PlanRequest(tuple(lengths), *of, request.forward_only))
    return plan


def _planned_together(
    request: RolloutRequest, unplanned: MicroBatchSchedule, of_steps: Sequence[Sequence[int]]
) -> list[StepPlan] | None:
    """The plans of all steps, each made by one rank of a block. A collective.

    None where that is no gain, and where a plan cannot be made: whoever then makes them all says
    why, as all do.
    """
    consensus, count = request.job.consensus, len(of_steps)
    if count < 2:
        return None
    ranks = consensus.ranks
    # Blocks of neighbours, with a rank for every step where there are as many ranks.
    blocks = max(1, len(ranks) // count)
    bounds = [len(ranks) * number // blocks for number in range(blocks + 1)]
    of_block = [ranks[start:end] for start, end in itertools.pairwise(bounds)]
    [block] = [each for each in of_block if consensus.rank in each]
    place = block.index(consensus.rank)

    def work() -> tuple[None, list[StepPlan] | None]:
        # Not raised: on the other ranks of the block another step may be planned.
        with contextlib.suppress(Exception):
            own = of_steps[place :: len(block)]
            return None, [_planned(request, unplanned, lengths) for lengths in own]
        return None, None

    equal = {"lengths of all samples (sha256)": digest_of(of_steps)}
    _, by_rank = consensus.gather(
        "planning steps", work, lambda _: Statement(equal=equal), among=block
    )
    if None in by_rank:
        return None
    return [by_rank[step % len(block)][step // len(block)] for step in range(count)]


def _run_on(
    rank: int, plans: Sequence[GlobalPlan], members: Mapping[int, Sequence[int]]
) -> list[int]:
    """The samples that a rank runs, step by step: by plan those that are computed, and all that
    they host."""
    # By their host: the plan names hosts alone, and what they host has to follow them.
    return [
        number
        for made in plans
        for number in sorted(n for row in made.rows_on(rank) for host in row for n in members[host])
    ]
