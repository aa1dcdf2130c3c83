"""A rollout's samples cut into optimizer steps, and who is computed in whose segment.

Both scopes begin so, in an agreement of their own: samples that stay are packed in it, of those
that are exchanged lengths are gathered.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

from megatron.core import parallel_state

from mcore_batching.batch.agreement.consensus import Statement
from mcore_batching.batch.agreement.figures import Figure
from mcore_batching.batch.rows.prefixes import Hosts
from mcore_batching.megatron.job.consensus import JobConsensus
from mcore_batching.megatron.job.job import Job
from mcore_batching.megatron.rollout.maker import Plan
from mcore_batching.megatron.rollout.rollout import Rollout, RolloutRequest
from mcore_batching.megatron.rollout.rollout_batch import RolloutBatch
from mcore_batching.megatron.rollout.sharing import figures_of, look_for_hosts, reasons_to_say
from mcore_batching.megatron.rows.schedule import MicroBatchSchedule
from mcore_batching.megatron.rows.shards import GatheredShards
from mcore_batching.megatron.topology import model_chunks


class Planned(NamedTuple):
    """What planning gives.

    Attributes:
        schedule: of all steps, or of the first alone.
        num_steps: of the rollout.
        plan_later: gives the schedule of the other steps, where the first alone is planned; a
            collective by messages of its own.
    """

    schedule: MicroBatchSchedule
    num_steps: int
    plan_later: Callable[[JobConsensus, Plan], MicroBatchSchedule] | None = None

    def make_all(self, job: Job, operation: str, plan: Plan) -> MicroBatchSchedule:
        """The schedule of all steps. A collective, in the thread that plans ahead."""
        del operation
        assert self.plan_later is not None
        return self.schedule.followed_by(self.plan_later(job.consensus, plan))


@dataclasses.dataclass(frozen=True)
class CutSteps:
    """This rank's samples of every step.

    Attributes:
        batch: of which all fields are known.
        steps: local sample indices of each.
        found: samples that begin others, if it was looked for them.
        hosts: as `MicroBatchSchedule.hosts`.
    """

    batch: RolloutBatch
    steps: list[list[int]]
    found: Hosts | None
    hosts: Sequence[int] | None

    @classmethod
    def of(cls, request: RolloutRequest, rollout: Rollout) -> CutSteps:
        """Of a rollout that was read.

        Raises:
            SchemaError: a field's kind is unknown, or a value does not fit it.
        """
        batch = rollout.batch.resolved()
        if request.one_step:  # of a stock script's samples none share
            return cls(batch, [list(range(len(batch.total_lengths)))], None, None)
        place, shares = request.job.consensus.data_parallel_rank, list(rollout.shares)
        # Ranks of a replica that read other samples are told so once all have packed.
        shares[place] = len(batch.total_lengths)
        steps = batch.steps_of(shares, place)
        if request.training is not None:  # forward passes take what was found then
            return cls(batch, steps, None, request.training.hosts)
        if request.forward_only:
            return cls(batch, steps, None, None)
        found = look_for_hosts(request.job, model_chunks(request.model), batch, steps)
        shares_them = found is not None and request.job.options.share_prefixes
        return cls(batch, steps, found, found.host if found and shares_them else None)

    def statement(self, request: RolloutRequest, rollout: Rollout, **figures: Figure) -> Statement:
        """What all ranks must have alike, and what sharing saves on this one.

        Args:
            request: what the call asked for.
            rollout: that was cut.
            **figures: more of them.
        """
        batch = self.batch
        # Pipelines run step by step: ranks with fewer steps would leave the others waiting.
        equal = {"number of steps": len(self.steps), **batch.comparable()}
        # A rank without samples may not have been told one, and steps of its own need none.
        if batch.total_lengths and batch.steps is None:
            equal["global_batch_size"] = batch.global_batch_size
        saved = figures_of(self.found, batch.total_lengths, rollout.settings.cost_model)
        reasons = reasons_to_say(request.job, self.found)
        return Statement(equal=equal, figures={**figures, **saved}, tell=reasons)

    def unplanned(self, request: RolloutRequest, rollout: Rollout) -> MicroBatchSchedule:
        """The schedule before any step of it is planned; later batches know its fields."""
        job, batch, settings = request.job, self.batch, rollout.settings
        # Their samples may be too few or too empty to tell.
        job.memory.told_fields |= batch.inferred()
        return MicroBatchSchedule(
            rollout_data=batch.data,
            schema=batch.schema,
            template=batch.template,
            steps=(),
            hosts=self.hosts,
            dims=settings.dims,
            config=settings.config,
            context_parallel_rank=parallel_state.get_context_parallel_rank(),
            pad_token_id=job.options.checked_pad_token_id(),
            vocabulary_size=rollout.vocabulary_size,
            plan_digest="",
            samples_per_step=batch.global_batch_size,
            # Others' plans are for statistics and records: nobody waits for them in training.
            gather_shards=GatheredShards(job.consensus),
            scope="global" if request.exchanges else "local",
            cost_model=settings.cost_model,
            learnt=rollout.learnt,
        )
