"""A rollout's samples cut into optimizer steps, and who is computed in whose segment.

Both scopes begin so, in an agreement of their own: samples that stay are packed in it, of those
that are exchanged lengths are gathered. What sharing segments saves is said once a job, and so is
each reason why samples that begin others are alone. Without ``--dynamic-batch-share-prefixes`` they
are looked for all the same, until it is said that the flag would save a good part of a step.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

from mcore_batching.batch.agreement.consensus import Agreement, Statement
from mcore_batching.batch.agreement.figures import Figure, total
from mcore_batching.batch.fields.fields import Kind
from mcore_batching.batch.rows.prefixes import Hosts, find_hosts
from mcore_batching.flags import FLAGS
from mcore_batching.megatron.checks.shared_prefixes import sharing_problems
from mcore_batching.megatron.job.job import Job
from mcore_batching.megatron.rollout.rollout import Rollout
from mcore_batching.megatron.rollout.rollout_batch import RolloutBatch
from mcore_batching.megatron.rows.schedule import MicroBatchSchedule
from mcore_batching.megatron.topology import model_chunks

WORTH_SAYING = 0.2
"""Share of a step's tokens that the flag would save: at half of it a log line would name a gain
that runs of the same job differ by."""
_SAVED, _ADVICE = "prefixes are shared", "prefixes could be"
"""In `JobMemory.said`, as are reasons why samples are alone."""


@dataclasses.dataclass(frozen=True)
class CutSteps:
    """This rank's samples of every step."""

    rollout: Rollout
    batch: RolloutBatch  # the rollout's, of which all fields are known
    steps: list[list[int]]  # local sample indices of each
    found: Hosts | None = None  # samples that begin others, if it was looked for them
    hosts: Sequence[int] | None = None  # as `MicroBatchSchedule.hosts`

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
        found = look_for_hosts(request.job, model_chunks(request.model), batch, steps)
        hosts = found.host if found is not None and request.job.options.share_prefixes else None
        return cls(rollout, batch, steps, found, hosts)

    def statement(self, **figures: Figure) -> Statement:
        """The values that all ranks must have alike, and this one's savings by sharing."""
        batch, rollout = self.batch, self.rollout
        # Pipelines run step by step: ranks with fewer steps would leave the others waiting.
        steps = {"number of steps (given too few, add [])": len(self.steps)}
        equal = {**steps, **batch.comparable()}
        # A rank without samples may not have been told one, and steps of its own need none.
        if batch.total_lengths and batch.steps is None:
            equal["global_batch_size"] = batch.global_batch_size
        job, reasons = rollout.request.job, None
        if self.found is not None and job.options.share_prefixes:
            alone, said = self.found.alone, job.memory.said
            # None asks for nothing: else all ranks gather what each tells.
            reasons = {reason: alone[reason] for reason in alone if reason not in said} or None
        return Statement(equal=equal, figures={**figures, **_saved(self.found)}, tell=reasons)

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
            pad_token_id=job.options.checked_pad_token_id(),
            vocabulary_size=batch.vocabulary_size,
            plan_digest="",
            samples_per_step=batch.global_batch_size,
            consensus=job.consensus,
            cost_model=settings.cost_model,
            learnt=settings.learnt,
        )


def look_for_hosts(
    job: Job, chunks: list[Any], batch: RolloutBatch, steps: Sequence[Sequence[int]]
) -> Hosts | None:
    """Who of a resolved batch is computed in whose segment; None where nobody needs to know."""
    flag, columns, memory = job.options.share_prefixes, batch.data, job.memory
    if flag is None:
        return None  # it cannot be set here
    if not flag:
        memory.batches_apart += 1
        # The 1st, 2nd, 4th, 8th, ... batch, as turns may come late: comparing a million tokens
        # takes 0.01 s, and a copy where a device has them, too much for every batch.
        is_power_of_two = memory.batches_apart.bit_count() == 1
        # For nothing, too, once the advice was given or where this model could not follow it.
        is_said = _ADVICE in memory.said
        if not is_power_of_two or is_said or any(sharing_problems(chunks)):
            return None
        # Recorded experts are the largest field by far: whoever sets the flag is told of them.
        is_small = {name: batch.schema[name].kind is not Kind.ROUTED_EXPERTS for name in columns}
        columns = {name: values for name, values in columns.items() if is_small[name]}
    return find_hosts(
        columns,
        batch.schema,
        batch.data["response_lengths"],
        steps=steps,
        is_padding=batch.data.get("is_padding"),
    )


def _saved(hosts: Hosts | None) -> dict[str, Figure]:
    """The savings by sharing, made or possible."""
    # The same figures on every rank, whether it looked or not: they are joined over all.
    host = hosts.host if hosts is not None else ()
    return {
        "prefixes: samples": total(len(host)),
        "prefixes: hosts": total(sum(each == i for i, each in enumerate(host))),
        "prefixes: tokens": total(hosts.tokens if hosts is not None else 0),
        "prefixes: hosts' tokens": total(hosts.computed if hosts is not None else 0),
    }


def say_saving(job: Job, agreed: Agreement[Any]) -> None:
    """Print what sharing saves, or would save, and why samples are alone, each once a job, by the
    `statement` of every rank."""
    figures = agreed.figures
    samples, own = figures["prefixes: samples"], figures["prefixes: hosts"]
    tokens, computed = figures["prefixes: tokens"], figures["prefixes: hosts' tokens"]
    fewer = f"{tokens / max(computed, 1):.1f}x fewer"
    if own < samples and job.options.share_prefixes:
        text = f"{samples:,} samples in {own:,} rows' worth of tokens: {computed:,}, {fewer}"
        job.say_once(_SAVED, text)
    elif own < samples and computed <= (1 - WORTH_SAYING) * tokens:
        text = (
            f"{tokens:,} tokens, {computed:,} of them distinct, {fewer}: samples begin others, as "
            f"turns of a trajectory do; set {FLAGS['share_prefixes']} to compute those tokens once"
        )
        job.say_once(_ADVICE, text)
    alone = Counter[str]()
    # One rank of each replica: the others tell of the same samples.
    for replica in job.consensus.replicas:
        alone.update(agreed.told.get(replica[0]) or {})
    for reason, count in sorted(alone.items()):
        job.say_once(
            reason, f"{count:,} samples that begin others are computed by themselves: {reason}"
        )
