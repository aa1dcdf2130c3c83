"""The samples and micro-batches of every data-parallel rank, for statistics and records.

Training needs its own rank's alone, so the others' are gathered only where somebody reads them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from mcore_batching.batch.consensus import Statement
from mcore_batching.batch.figures import largest
from mcore_batching.megatron.job.consensus import JobConsensus

MicroBatches = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class Shard:
    """The lengths and micro-batches of one data-parallel rank, for statistics and records.

    Attributes:
        lengths: total length of each of its samples, in tokens.
        steps: as `MicroBatchSchedule.steps`.
    """

    lengths: list[int]
    steps: tuple[MicroBatches, ...]

    def integers(self) -> list[int]:
        """Itself as counts, each with what it counts behind it."""
        flat = [len(self.lengths), *self.lengths, len(self.steps)]
        for step in self.steps:
            flat.append(len(step))
            for indices in step:
                flat += [len(indices), *indices]
        return flat

    @classmethod
    def of_integers(cls, integers: Sequence[int]) -> Shard:
        """The inverse of `integers`."""
        rest = iter(integers)

        def several() -> list[int]:
            return [next(rest) for _ in range(next(rest))]

        lengths = several()
        return cls(
            lengths,
            tuple(tuple(tuple(several()) for _ in range(next(rest))) for _ in range(next(rest))),
        )


class GatheredShards:
    """The shards of all data-parallel ranks, gathered when they are first called for.

    Args:
        consensus: between the ranks.
        own: this rank's.
    """

    def __init__(self, consensus: JobConsensus, own: Shard) -> None:
        self._consensus = consensus
        self._own = own
        self._all: tuple[Shard, ...] | None = None

    def __call__(self) -> tuple[Shard, ...]:
        """In the order of data-parallel ranks. A collective over all ranks the first time."""
        if self._all is None:
            agreed = self._consensus.agree(
                "gathering the plans of all ranks",
                self._own.integers,
                lambda integers: Statement(figures={"integers": largest(len(integers))}),
            )
            gathered = self._consensus.gather_integers(agreed.result, agreed.figures["integers"])
            self._all = tuple(map(Shard.of_integers, gathered))
        return self._all
