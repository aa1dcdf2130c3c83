"""Times of rows that several ranks share, in whose attention they wait for each other.

    rank 0   [begins.....waits......computes]     took 9 s
    rank 1                     [computes]         took 4 s: what the row costs

Whoever begins last waits for nobody, so a pass costs what the rank that took least time says, and
the least time of all ranks travels as a maximum with an agreement that there is anyway.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from mcore_batching.megatron.schedule import MicroBatchSchedule
from mcore_batching.planning.cost import ordered_sum
from mcore_batching.planning.cost_fit import Timing, is_usable
from mcore_batching.planning.pipeline import Pass
from mcore_batching.planning.plan import Row

NUM_LEAST = 32
"""Times that travel of a step: an agreement has a hundred numbers in its first message."""


@dataclasses.dataclass(frozen=True)
class SharedTimes:
    """Some of a step's rows that several ranks share; the same on every rank but for its own.

    Attributes:
        rows: of the plan.
        lengths: of the samples of each.
        chunks: model chunks of a stage.
        own: this rank, as the plan numbers them.
    """

    rows: list[Row]
    lengths: list[tuple[int, ...]]
    chunks: int
    own: int

    @classmethod
    def of(cls, schedule: MicroBatchSchedule, step: int) -> SharedTimes:
        """Of a step under dynamic CP: of all sizes as many as there are numbers for."""
        plan, lengths = schedule.step_plan(step)
        assert schedule.moves is not None

        def lengths_of(row: Row) -> tuple[int, ...]:
            return tuple(int(lengths[i]) for i in row.samples)

        chunks = schedule.dims.virtual_pipeline
        shared = [row for row in plan.rows() if row.size > 1 and row.samples]
        shared.sort(key=lambda row: (row.size, sum(lengths_of(row)), row))
        count = min(len(shared), NUM_LEAST // (2 * chunks))
        rows = [shared[number * len(shared) // count] for number in range(count)]
        return cls(rows, [lengths_of(row) for row in rows], chunks, schedule.moves.own)

    def least(self, seconds: Mapping[Pass, float], factor: float) -> list[float]:
        """This rank's numbers, of which all ranks are to know the largest.

        Args:
            seconds: of each of its passes.
            factor: time of its stage over that of a mean one.

        Returns:
            minus the seconds of each pass on a mean stage; -inf where it has no part in a row, 0,
            which is no time, where it could not be told.
        """
        numbers = [0.0] * NUM_LEAST
        for place, row in enumerate(self.rows):
            has_part = row.rank <= self.own < row.rank + row.size
            for chunk in range(self.chunks):
                for backward in (False, True):
                    took = seconds[backward, chunk, row.slot] / factor if has_part else math.inf
                    is_time = took > 0  # nor NaN
                    numbers[self._index(place, chunk, backward)] = -took if is_time else 0.0
        return numbers

    def timings(self, largest: Sequence[float]) -> list[Timing]:
        """The rows' times, where all could be told, given the largest of all ranks' numbers."""
        timings = []
        for place, (row, lengths) in enumerate(zip(self.rows, self.lengths, strict=True)):
            forward, backward = (
                [-largest[self._index(place, chunk, kind)] for chunk in range(self.chunks)]
                for kind in (False, True)
            )
            if min(forward + backward) > 0:
                timings.append(
                    Timing(
                        lengths=lengths,
                        forward_seconds=ordered_sum(forward),
                        backward_seconds=ordered_sum(backward),
                        context_parallel=row.size,
                    )
                )
        return [timing for timing in timings if is_usable(timing)]

    def _index(self, place: int, chunk: int, backward: bool) -> int:
        return (place * self.chunks + chunk) * 2 + backward
