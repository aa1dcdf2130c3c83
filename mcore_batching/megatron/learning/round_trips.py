"""Times of transfers between pipeline stages, of which each stage tells its half.

For some rows of a step both stages of a link tell a difference on their own clock, the second one
minus its own: added up, with an agreement that there is anyway, they are the time of the row's
forward transfer and its backward one (`mcore_batching.planning.transfers`). How long the receivers
stood idle travels as a maximum, of minus the time. Only the stages of one data-parallel replica
tell any, in each step those of the next.

An interleaved row's forward transfer is that of its first chunk and its backward one that of its
last: those come first in a step, when the stages that receive them wait for nothing else.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from mcore_batching.megatron.learning.pass_times import TimedStep, seconds_between
from mcore_batching.planning import ParallelDims
from mcore_batching.planning.damping import WINDOW_STEPS
from mcore_batching.planning.pipeline import Pass
from mcore_batching.planning.transfers import TimedTransfer, time_of_transfer

NUM_TRIPS = 12
"""Round trips that travel of a step, by three numbers each."""


class RoundTrips:
    """Transfers timed in the last steps; the same on every rank.

    Args:
        dims: gives replicas, stages and chunks.
        stage: pipeline rank.
        replica: data-parallel rank.
        speaks: True on one rank of each stage of a replica, of the same pipeline on all stages.

    Attributes:
        count: of the round trips of a step; 0 without pipeline stages.
    """

    def __init__(self, dims: ParallelDims, *, stage: int, replica: int, speaks: bool) -> None:
        self.count = NUM_TRIPS if dims.pipeline_parallel > 1 else 0
        self._dims, self._stage, self._replica, self._speaks = dims, stage, replica, speaks
        self._turn = 0
        self._steps: deque[list[TimedTransfer]] = deque(maxlen=WINDOW_STEPS)

    def told(self, step: TimedStep | None) -> tuple[list[float], list[float]]:
        """This rank's numbers: to be added up over ranks, and to be maximised.

        Args:
            step: the newest one; None where its passes are not known.

        Returns:
            for each round trip this rank's part of it and its share of the row's tokens; for each
            minus the time that this rank stood idle before the row came: -inf where it has no part
            in it, inf where the time is not known.
        """
        sums, idle = [0.0] * (2 * self.count), [-math.inf] * self.count
        if not self._speaks or self._replica != self._turn % self._dims.data_parallel:
            return sums, idle
        for number in range(self.count):
            link = self._link(number)
            if self._stage in (link, link + 1):
                part, stood, tokens = (
                    (math.nan, math.nan, 0.0) if step is None else self._half(step, number)
                )
                known = math.isfinite(part) and math.isfinite(stood)
                idle[number] = -stood if known else math.inf
                if known:
                    sums[2 * number : 2 * number + 2] = part, tokens / 2
        return sums, idle

    def learn(self, sums: Sequence[float], idle: Sequence[float]) -> list[list[TimedTransfer]]:
        """The transfers of the last steps, the newest step last.

        Args:
            sums: of all ranks, of the first numbers of `told`.
            idle: the largest of all ranks, of its second numbers.
        """
        timed = []
        for number in range(self.count):
            round_trip, tokens = sums[2 * number : 2 * number + 2]
            seconds = time_of_transfer(
                round_trip, -idle[number], overlapped=self._dims.virtual_pipeline > 1
            )
            if seconds is not None and tokens > 0:
                timed.append(TimedTransfer(self._link(number), tokens, seconds))
        self._steps.append(timed)
        self._turn += 1
        return list(self._steps)

    def _link(self, number: int) -> int:
        """The stage before the link of a round trip."""
        return (self._turn * self.count + number) % (self._dims.pipeline_parallel - 1)

    def _half(self, step: TimedStep, number: int) -> tuple[float, float, float]:
        """Part of this rank in a round trip, the time that it stood idle, and the row's tokens."""
        links = self._dims.pipeline_parallel - 1
        slot = number // links * len(step.rows) // -(-self.count // links)
        forward = step.order.index(Pass("F", 0, slot))
        backward = step.order.index(Pass("B", self._dims.virtual_pipeline - 1, slot))
        begins, ends = step.marks[::2], step.marks[1::2]
        if self._link(number) == self._stage:
            part = seconds_between(ends[forward], begins[backward])
            received = backward
        else:
            part = -seconds_between(begins[forward], ends[backward])
            received = forward
        free = ends[received - 1] if received else step.began
        tokens = [sum(row) / size for row, size in zip(step.rows, step.sizes, strict=True)]
        # Under 1F1B a row goes out while this one comes in, and the longer one of them counts.
        before = step.order[received - 1]
        exchanged = self._dims.virtual_pipeline == 1 and before.kind != step.order[received].kind
        longer = max(tokens[slot], tokens[before.slot] if received and exchanged else 0.0)
        stood = seconds_between(free, begins[received])
        if self._dims.virtual_pipeline > 1 and received:
            stood /= 2  # it may have waited for what it sent before, as long as for this one
        return part, stood, longer
