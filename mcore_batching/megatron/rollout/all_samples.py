"""The samples of all data-parallel ranks, by their lengths."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import accumulate

from mcore_batching.megatron.rows.shards import Shard

Step = tuple[list[int], list[int]]
"""Numbers of the samples that are computed, and of those that lie in their segments."""


@dataclasses.dataclass(frozen=True)
class AllSamples:
    """The samples of all data-parallel ranks, numbered through.

    Attributes:
        lengths: of each, in tokens.
        hosts: for each the sample in whose segment it lies, itself if it has a segment.
        first: number of each rank's first sample, and the number of all samples.
        steps: for each step the samples that are computed, and those that lie in their segments.
    """

    lengths: list[int]
    hosts: list[int]
    first: list[int]
    steps: list[Step]

    @classmethod
    def of(cls, shards: Sequence[Shard]) -> AllSamples:
        """Those of the shards of all data-parallel ranks."""
        first = list(accumulate((len(shard.lengths) for shard in shards), initial=0))
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

    def lengths_of(self, step: Step) -> list[int]:
        """Of the samples of a step that are computed."""
        return [self.lengths[number] for number in step[0]]
