"""A rollout's samples cut into optimizer steps, and who is computed in whose segment.

Both scopes begin so, in an agreement of their own: samples that stay are packed in it, of those
that are exchanged lengths are gathered.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from megatron.core import parallel_state

from mcore_batching.batch.agreement.consensus import Statement
from mcore_batching.batch.agreement.figures import Figure
from mcore_batching.batch.rows.prefixes import Hosts
from mcore_batching.megatron.rollout.rollout import Rollout
from mcore_batching.megatron.rollout.rollout_batch import RolloutBatch
from mcore_batching.megatron.rollout.sharing import figures_of, look_for_hosts, reasons_to_say
from mcore_batching.megatron.rows.schedule import MicroBatchSchedule
from mcore_batching.megatron.topology import model_chunks


@dataclasses.dataclass(frozen=True)
class CutSteps:
    """This rank's samples of every step.

    Attributes:
        rollout: whose samples they are.
        batch: the same, of which all fields are known.
        steps: local sample indices of each.
        found: samples that begin others, if it was looked for them.
        hosts: as `MicroBatchSchedule.hosts`.
    """

    rollout: Rollout
    batch: RolloutBatch
    steps: list[list[int]]
    found: Hosts | None = None
    hosts: Sequence[int] | None = None

    @classmethod
    def of(cls, rollout: Rollout) -> CutSteps:
        """Of a rollout that was read; its fields are checked now where other ranks had to tell."""
        request, batch = rollout.request, rollout.batch.resolved()
        if request.one_step:  # of a stock script's samples none share
            return cls(rollout, batch, [list(range(len(batch.total_lengths)))])
        place, shares = request.job.consensus.data_parallel_rank, list(rollout.shares)
        # Ranks of a replica that read other samples are told so once all have packed.
        shares[place] = len(batch.total_lengths)
        steps = batch.steps_of(shares, place)
        if request.training is not None:  # forward passes take what was found then
            return cls(rollout, batch, steps, hosts=request.training.hosts)
        if request.forward_only:
            return cls(rollout, batch, steps)
        found = look_for_hosts(request.job, model_chunks(request.model), batch, steps)
        shares_them = found is not None and request.job.options.share_prefixes
        return cls(rollout, batch, steps, found, found.host if found and shares_them else None)

    def statement(self, **figures: Figure) -> Statement:
        """What all ranks must have alike, and what sharing saves on this one."""
        batch, rollout = self.batch, self.rollout
        # Pipelines run step by step: ranks with fewer steps would leave the others waiting.
        equal = {"number of steps": len(self.steps), **batch.comparable()}
        # A rank without samples may not have been told one, and steps of its own need none.
        if batch.total_lengths and batch.steps is None:
            equal["global_batch_size"] = batch.global_batch_size
        saved = figures_of(self.found, batch.total_lengths, rollout.settings.cost_model)
        reasons = reasons_to_say(rollout.request.job, self.found)
        return Statement(equal=equal, figures={**figures, **saved}, tell=reasons)

    def unplanned(self) -> MicroBatchSchedule:
        """The schedule before any step of it is planned; later batches know its fields."""
        rollout, batch = self.rollout, self.batch
        job, settings = rollout.request.job, rollout.settings
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
            vocabulary_size=batch.vocabulary_size,
            plan_digest="",
            samples_per_step=batch.global_batch_size,
            consensus=job.consensus,
            scope="global" if rollout.request.exchanges else "local",
            cost_model=settings.cost_model,
            learnt=rollout.learnt,
        )
