"""The planning protocol: from rollout data on every rank to this rank's micro-batches.

All ranks take its steps together, and agree (`batch.agreement.consensus`) where one needs what
others know:

1. take stock (`rollout`): settings and rollout data are read; settings must be the same everywhere;
   what one rank's samples leave open of undeclared fields, others tell;
2. share data: ranks without data get their replica's, replicas without samples learn the fields;
   nothing where every rank has samples. All know every replica's number of samples by then, of
   which the steps are cut (`cut_steps`);
3. pack: each replica packs its own samples of every optimizer step, of those that
   share segments the hosts alone, and says how soon it would end with how many micro-batches;
4. fill: samples are brought to the count with which the latest rank ends soonest; the ranks of a
   replica must have made the same.

So planning takes three collectives of one small message a round, and an optimizer step
(`prepare`, `Job.agree_after_pipeline`) two. Where all samples are one step, as in a stock script, 1
and 3 are one agreement unless a rank lacks data or samples, and 4 goes into the step's first. What
the last step's passes took travels with 1, and tells the costs by which the next 3 packs. Under the
exchange one plan of all samples (`exchange`) replaces 3 and 4: three agreements, a gather of all
lengths, and two exchanges (sizes, samples), the last three of which grow with the ranks.

Of several steps the first alone is planned so where planning takes long: the others follow in a
thread, by 3 and 4 again; under the exchange ranks share out the plans, by one more agreement and
a gather.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from mcore_batching.batch.agreement.consensus import Statement
from mcore_batching.batch.agreement.figures import Figure, largest, total
from mcore_batching.megatron.checks.validation import prepare_model
from mcore_batching.megatron.job.consensus import JobConsensus
from mcore_batching.megatron.job.flat_values import digest_of
from mcore_batching.megatron.job.job import Job
from mcore_batching.megatron.job.options import Options
from mcore_batching.megatron.rollout.cut_steps import CutSteps, say_saving
from mcore_batching.megatron.rollout.exchange import plan_all_samples
from mcore_batching.megatron.rollout.maker import IN_LINE
from mcore_batching.megatron.rollout.planned_rollout import PlannedRollout, with_later_steps
from mcore_batching.megatron.rollout.rollout import Rollout, RolloutRequest, read_rollout
from mcore_batching.megatron.rollout.settings import Settings, check_forward_plan
from mcore_batching.megatron.rollout.step_shard import PackedShard, StepShard
from mcore_batching.megatron.rows.schedule import MicroBatchSchedule
from mcore_batching.megatron.rows.shards import MicroBatches, computed_alone, with_hosted
from mcore_batching.megatron.topology import model_chunks
from mcore_batching.planning.shard import shapes_slots


def plan_rollout(request: RolloutRequest) -> PlannedRollout:
    """All steps of the protocol. A collective.

    Raises:
        PlanningFailedError: on every rank, if a step failed on any.
        PlanMismatchError: on every rank, if they disagree on settings, fields or plan.
    """
    return _planned(read_rollout(request))


def begin_step(request: RolloutRequest) -> Callable[[], MicroBatchSchedule]:
    """The same under `one_step`, but for an agreement that can be left to the one before the
    pipeline.

    Returns:
        gives the schedule, once. It may fail on one rank alone: call it in the work of the
        agreement before the pipeline, and compare the schedule's `own_digest` there.
    """
    rollout = read_rollout(request)
    if rollout.packed is not None:
        return functools.partial(_filled_alone, rollout, rollout.packed)
    schedule = _planned(rollout).schedule
    return lambda: schedule


def plan_forward_passes(rollout: PlannedRollout, job: Job, model: Any) -> PlannedRollout:
    """The rollout, or the same batch as planned for forward passes alone, by 3 and 4 of the above.

    A collective over all ranks where it has to be made, at the first call under
    ``--dynamic-batch-forward-only-plan own`` or a cap of forward passes.
    """
    # Planning is a collective; `forward_only` has compared this among the ranks.
    if not job.options.has_own_forward_plan:
        return rollout
    if rollout.for_forward_passes is None:
        made = _planned_again(rollout.schedule, job, model_chunks(model))
        rollout.for_forward_passes = PlannedRollout(made)
    return rollout.for_forward_passes


def _planned_again(shared: MicroBatchSchedule, job: Job, chunks: list[Any]) -> MicroBatchSchedule:
    """Training's steps, packed and filled for forward passes of a model, where its samples are."""

    def work() -> tuple[Settings, list[PackedShard]]:
        check_forward_plan(job.options, shared.config)
        settings = Settings.of(
            job, chunks, shared.cost_model, training=shared.config, forward_only=True
        )
        # Perhaps another model than was trained, such as a reference model.
        prepare_model(chunks, settings.dims, settings.config)
        # In the order of the rollout data: packing again must not depend on training's plan.
        steps = [sorted(i for indices in step for i in indices) for step in shared.steps]
        lengths, hosts = shared.own_lengths, shared.hosts
        shards = _shards(job.options, settings, lengths, steps, hosts, forward_only=True)
        return settings, [shard.packed(IN_LINE) for shard in shards]

    def says(made: tuple[Settings, list[PackedShard]]) -> Statement:
        settings, packed = made
        return Statement(equal=settings.comparable(), figures={"ends": _latest(packed)})

    agreed = job.consensus.agree("packing", work, says)
    settings, packed = agreed.result
    # A framework's layout pads samples less than the settings' dims ask for: dims stay.
    unplanned = dataclasses.replace(
        shared, config=settings.config, consensus=job.consensus, learnt=None, plans=()
    )
    return _filled(job.consensus, unplanned, packed, agreed.figures["ends"])


def _planned(rollout: Rollout) -> PlannedRollout:
    if rollout.request.job.options.exchanges_samples:
        return plan_all_samples(rollout)
    return _plan_own_samples(rollout)


def _plan_own_samples(rollout: Rollout) -> PlannedRollout:
    """Pack and fill; of several steps perhaps the first alone. A collective."""
    request, settings, consensus = rollout.request, rollout.settings, rollout.request.job.consensus
    if rollout.packed is not None:
        unplanned = CutSteps.of(rollout).unplanned()
        return PlannedRollout(_filled(consensus, unplanned, [rollout.packed], rollout.latest))
    # Where nothing is searched for, packing takes less time than to start a process for it.
    searches = shapes_slots(settings.dims, settings.config)
    now = 1 if searches and request.may_plan_ahead else None

    def work() -> tuple[CutSteps, list[PackedShard], list[StepShard]]:
        cut = CutSteps.of(rollout)
        samples = cut.batch.total_lengths, cut.steps, cut.hosts
        # All of them, while all ranks can be told what is wrong with later steps.
        shards = _shards(request.job.options, settings, *samples, forward_only=request.forward_only)
        later = [] if now is None else shards[now:]
        return cut, [shard.packed(request.plan) for shard in shards[:now]], later

    agreed = consensus.agree("packing", work, lambda made: made[0].statement(ends=_latest(made[1])))
    cut, packed, later = agreed.result
    say_saving(request.job, agreed)
    unplanned = cut.unplanned()
    made = _filled(consensus, unplanned, packed, agreed.figures["ends"])
    if not later:
        return PlannedRollout(made)
    plan_later = functools.partial(_packed_later, unplanned, later)
    return with_later_steps(request, made, len(cut.steps), plan_later)


def _packed_later(
    unplanned: MicroBatchSchedule, later: Sequence[StepShard], request: RolloutRequest
) -> MicroBatchSchedule:
    """The schedule of later steps. A collective."""
    agreed = request.job.consensus.agree(
        "packing",
        lambda: [shard.packed(request.plan) for shard in later],
        lambda packed: Statement(figures={"ends": _latest(packed)}),
    )
    return _filled(request.job.consensus, unplanned, agreed.result, agreed.figures["ends"])


def _filled_alone(rollout: Rollout, packed: PackedShard) -> MicroBatchSchedule:
    """The only step, packed at once and filled to the count that is agreed on. Not a collective."""
    micro_batches = packed.filled(rollout.latest)
    unplanned = CutSteps.of(rollout).unplanned()
    return dataclasses.replace(
        unplanned,
        steps=with_hosted((micro_batches,), unplanned.hosts),
        # Of what all ranks know: each one's own plan is compared within its replica.
        plan_digest=digest_of([rollout.shares, rollout.latest]),
        own_digest=digest_of([rollout.batch.total_lengths, micro_batches]),
    )


def _shards(
    options: Options,
    settings: Settings,
    lengths: Sequence[int],
    steps: Sequence[Sequence[int]],
    hosts: Sequence[int] | None,
    *,
    forward_only: bool,
) -> list[StepShard]:
    return [
        StepShard.of(options, settings, indices, [lengths[i] for i in indices], forward_only)
        # Who lies in a host's segment takes no room in a row, and comes back in `_with_steps`.
        for indices in computed_alone(tuple(map(tuple, steps)), hosts)
    ]


def _latest(packed: Sequence[PackedShard]) -> Figure:
    return largest([end for each in packed for end in each.ends])


def _filled(
    consensus: JobConsensus,
    unplanned: MicroBatchSchedule,
    packed: Sequence[PackedShard],
    latest: Sequence[float],
) -> MicroBatchSchedule:
    """The schedule of packed steps, filled. A collective over all ranks.

    `latest` has of all their ends the largest over all ranks.
    """

    def work() -> list[MicroBatches]:
        ends = iter(latest)
        return [each.filled([next(ends) for _ in each.ends]) for each in packed]

    def says(rows: list[MicroBatches]) -> Statement:
        digest = digest_of([unplanned.own_lengths, unplanned.hosts, rows])
        return Statement(
            # Stages and tensor-parallel ranks that ran other rows would send tensors of other
            # shapes.
            equal_in_replica={"samples and plan (sha256)": digest},
            figures={
                # 32 bits at a time, whose sum over replicas travels as one integer.
                "plans": total([int(digest[i : i + 8], 16) for i in range(0, len(digest), 8)]),
            },
        )

    agreed = consensus.agree("filling", work, says)
    return dataclasses.replace(
        unplanned,
        steps=with_hosted(tuple(agreed.result), unplanned.hosts),
        plan_digest=digest_of(agreed.figures),
    )
