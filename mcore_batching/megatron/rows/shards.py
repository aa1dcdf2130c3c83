"""Micro-batches of samples and of their hosts; those of all ranks as one plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from mcore_batching.batch.rows.prefixes import samples_of_hosts

MicroBatches = tuple[tuple[int, ...], ...]


def computed_alone(micro_batches: MicroBatches, hosts: Sequence[int] | None) -> MicroBatches:
    """Of micro-batches the samples that have segments of their own."""
    if hosts is None:
        return micro_batches
    return tuple(tuple(i for i in indices if hosts[i] == i) for indices in micro_batches)


def with_hosted(
    steps: tuple[MicroBatches, ...], hosts: Sequence[int] | None
) -> tuple[MicroBatches, ...]:
    """Steps of hosts with the samples that are computed in their segments, ascending."""
    if hosts is None:
        return steps
    members = samples_of_hosts(hosts)
    return tuple(
        tuple(tuple(i for h in indices for i in members[h]) for indices in micro_batches)
        for micro_batches in steps
    )


@dataclasses.dataclass(frozen=True)
class Shard:
    """Lengths in tokens, and fields of `MicroBatchSchedule`, of one data-parallel rank."""

    lengths: list[int]
    steps: tuple[MicroBatches, ...]
    hosts: Sequence[int] | None = None


def joined_step(
    shards: Sequence[Shard], step: int
) -> tuple[tuple[MicroBatches, ...], list[int], tuple[int, ...]]:
    """One step of all ranks as one plan counts it, samples rank after rank.

    Returns:
        micro-batches of each rank, of samples that have segments of their own; total length of each
        of these, and of those that lie in their segments.
    """
    lengths: list[int] = []
    hosted: list[int] = []
    ranks = []
    for shard in shards:
        rows = computed_alone(shard.steps[step], shard.hosts)
        # In the order of the rollout data, so that a plan of the same samples reads the same.
        held = sorted(i for micro_batch in rows for i in micro_batch)
        number = {local: len(lengths) + place for place, local in enumerate(held)}
        lengths += [shard.lengths[local] for local in held]
        # Of the step's tokens, for figures of what sharing saved; they take no part in costs.
        everyone = [i for micro_batch in shard.steps[step] for i in micro_batch]
        hosted += [shard.lengths[local] for local in everyone if local not in number]
        ranks.append(tuple(tuple(number[i] for i in ids) for ids in rows))
    return tuple(ranks), lengths, tuple(hosted)
