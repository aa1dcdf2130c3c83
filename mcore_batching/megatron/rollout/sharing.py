"""Samples that begin others: who is computed in whose segment; what it saves, said once a job.

So is each reason why some are computed alone. Without ``--dynamic-batch-share-prefixes`` they are
looked for all the same, until it is said that the flag would save a good part of a step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mcore_batching.batch.agreement.figures import Figure, total
from mcore_batching.batch.fields.fields import Kind
from mcore_batching.batch.rows.prefixes import Hosts, find_hosts
from mcore_batching.flags import FLAGS
from mcore_batching.megatron.checks.shared_prefixes import sharing_problems
from mcore_batching.megatron.job.job import Job
from mcore_batching.megatron.rollout.rollout_batch import RolloutBatch
from mcore_batching.planning import CostModel

WORTH_SAYING = 0.2
"""Share of a step's work that the flag would save: at half of it a log line would name a gain that
runs of the same job differ by."""
_SAVED, _ADVICE = "prefixes are shared", "prefixes could be"
"""In `JobMemory.said`, as are reasons why samples are alone."""


@dataclass
class _Seen:
    """Batches of a job without the flag."""

    batches: int = 0


def look_for_hosts(
    job: Job, chunks: list[Any], batch: RolloutBatch, steps: Sequence[Sequence[int]]
) -> Hosts | None:
    """Who of a resolved batch is computed in whose segment; None where nobody needs to know."""
    flag, columns = job.options.share_prefixes, batch.data
    if flag is None:
        return None  # it cannot be set here
    if not flag:
        seen = job.memory.only(_Seen)
        seen.batches += 1
        # The 1st, 2nd, 4th, 8th, ... batch, as turns may come late: comparing a million tokens
        # takes 0.01 s, and a copy where a device has them, too much for every batch.
        is_power_of_two = seen.batches & (seen.batches - 1) == 0
        # For nothing, too, once the advice was given or where this model could not follow it.
        is_said = _ADVICE in job.memory.said
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


def figures_of(hosts: Hosts | None, lengths: Sequence[int], costs: CostModel) -> dict[str, Figure]:
    """Figures for an agreement: the work that sharing saves, or would save, of samples by their
    total lengths, in tokens."""
    # The same figures on every rank, whether it looked or not: they are joined over all.
    host = hosts.host if hosts is not None else ()
    work = [costs.sample(length) for length in lengths[: len(host)]]
    own = [work[i] for i, each in enumerate(host) if each == i]
    return {
        "prefixes: samples": total(len(host)),
        "prefixes: hosts": total(len(own)),
        "prefixes: tokens": total(hosts.tokens if hosts is not None else 0),
        "prefixes: hosts' tokens": total(hosts.computed if hosts is not None else 0),
        "prefixes: work": total(float(sum(work))),
        "prefixes: hosts' work": total(float(sum(own))),
    }


def reasons_to_say(job: Job, hosts: Hosts | None) -> Mapping[str, int] | None:
    """Why samples of this rank are alone, if they could have been with others, and not said yet."""
    if hosts is None or not job.options.share_prefixes:
        return None
    said = job.memory.said
    return {reason: count for reason, count in hosts.alone.items() if reason not in said} or None


def say_saving(
    job: Job, figures: Mapping[str, Any], told: Mapping[int, Mapping[str, int] | None]
) -> None:
    """Print what sharing saves, or would save, and why samples are alone, each once a job.

    Args:
        job: the present one.
        figures: of all ranks, `figures_of` among them.
        told: `reasons_to_say` of each rank, if any asked.
    """
    samples, own = figures["prefixes: samples"], figures["prefixes: hosts"]
    tokens, computed = figures["prefixes: tokens"], figures["prefixes: hosts' tokens"]
    kept = (1 - WORTH_SAYING) * figures["prefixes: work"]
    fewer = f"{tokens / max(computed, 1):.1f}x fewer"
    if own < samples and job.options.share_prefixes:
        text = f"{samples:,} samples in {own:,} rows' worth of tokens: {computed:,}, {fewer}"
        job.say_once(_SAVED, text)
    elif own < samples and figures["prefixes: hosts' work"] <= kept:
        text = (
            f"{tokens:,} tokens, {computed:,} of them distinct, {fewer}: samples begin others, as "
            f"turns of a trajectory do; set {FLAGS['share_prefixes']} to compute those tokens once"
        )
        job.say_once(_ADVICE, text)
    alone = Counter[str]()
    # One rank of each replica: the others tell of the same samples.
    for replica in job.consensus.replicas:
        alone.update(told.get(replica[0]) or {})
    for reason, count in sorted(alone.items()):
        job.say_once(
            reason, f"{count:,} samples that begin others are computed by themselves: {reason}"
        )
