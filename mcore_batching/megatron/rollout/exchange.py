"""Samples move once, to the rank that runs them.

    rank 0 brings samples 0 1 2, rank 1 brings 3 4
    plan: rank 0 runs ((1, 4),), rank 1 ((0, 3), (2,))
    moved: 4 to rank 0, 0 and 2 to rank 1

Samples that share a segment move together, and the plan is of their hosts alone. They are found on
the rank that brings them: turns of a trajectory that several ranks bring are in as many segments.
Fields that are added later move the same way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.core import parallel_state
from torch import Tensor

from mcore_batching.batch.rows.prefixes import samples_of_hosts
from mcore_batching.megatron.job.flat_values import digest_of, exchanged, flat, unflat
from mcore_batching.megatron.job.job import Job
from mcore_batching.megatron.rollout.samples import Samples
from mcore_batching.megatron.rows.sample_moves import SampleMoves
from mcore_batching.megatron.rows.schedule import GlobalPlan, MicroBatchSchedule
from mcore_batching.megatron.rows.shards import with_hosted
from mcore_batching.planning import StepPlan, validate_plan
from mcore_batching.planning.plans.compact import plan_from_bytes

_STAGE = "exchanging samples"


def exchange_step(samples: Samples, step: int, data: bytes) -> MicroBatchSchedule:
    """The schedule of a step whose plan has arrived, of the samples that run here. A collective.

    Raises:
        PlanningFailedError: on every rank, if the plan is broken, or values cannot move.
    """
    job, batch = samples.job, samples.batch
    with job.agreement(_STAGE):
        plan = _checked_plan(samples, step, data)
        moves = _moves(samples, plan)
        place, hosts = moves.places, None
        if samples.hosts is not None:
            # A host is always here as well: the samples of a segment move together.
            hosts = [place[samples.hosts[number]] for number in moves.held]
        rows = tuple(tuple(place[n] for n in row) for row in plan.rows_on(moves.own))
        leaving = [flat(each) for each in moves.outgoing(batch.data)]
    arrived = _swapped(job, _STAGE, leaving)
    with job.agreement(f"{_STAGE}, received"):
        arranged = moves.arranged([*map(unflat, arrived)])
        # A rank that runs no samples received none, and still needs the fields for placeholders.
        values = {name: arranged.get(name, []) for name in batch.template}
        return samples.scheduled(
            values,
            with_hosted((rows,), hosts),
            hosts,
            digest_of(plan.plan.digest()),
            moves=moves,
            plans=(plan,),
        )


def exchange_fields(
    job: Job, moves: SampleMoves, fields: Mapping[str, Sequence[Any]], stage: str
) -> dict[str, list[Any]]:
    """Values of the samples that run here, of fields in the order in which samples were brought. A
    collective."""
    with job.agreement(stage):
        leaving = [flat(each) for each in moves.outgoing(fields)]
    arrived = _swapped(job, stage, leaving)
    with job.agreement(f"{stage}, received"):
        return moves.arranged([*map(unflat, arrived)])


def _swapped(job: Job, stage: str, leaving: Sequence[Tensor]) -> list[Tensor]:
    """What each data-parallel rank had for this one. A collective among the ranks that hold the
    same place in their replicas, so that all ranks of a replica receive the same."""
    with job.watch.reporting(stage):
        return exchanged(leaving, job.consensus.counterpart_group)


def _checked_plan(samples: Samples, step: int, data: bytes) -> GlobalPlan:
    settings, computed = samples.settings, samples.computed(step)
    lengths = [samples.lengths[number] for number in computed]
    plan = plan_from_bytes(
        data,
        len(lengths),
        settings.dims,
        settings.config,
        settings.cost_model,
        forward_only=samples.forward_only,
    )
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
    return SampleMoves(own, samples.first, runs_on, sharing, samples.before)
