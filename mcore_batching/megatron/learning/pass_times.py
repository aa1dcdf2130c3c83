"""Starts and ends of a step's passes, and how long ranks waited for each other inside of them.

Under dynamic CP ranks wait in the attention of rows that they share:

    rank 0   [begins.....waits......computes]     took 9 s
    rank 1                     [computes]         took 4 s: what the row costs

Whoever begins last waits for nobody, so a pass costs the least time of all ranks, which travels as
a figure with an agreement that there is anyway. With expert parallelism they wait in every layer
for the rank with most work, so only the costliest row of a slot counts. Which one it is, by the
costs known then, the largest cost of each slot tells, which travels likewise.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mcore_batching.megatron import cpu_emulation
from mcore_batching.megatron.rows.schedule import MicroBatchSchedule
from mcore_batching.megatron.rows.shards import computed_alone
from mcore_batching.planning.costs.cost import ordered_sum
from mcore_batching.planning.learning.learnt_costs import Timing
from mcore_batching.planning.pipeline import Kind, Pass
from mcore_batching.planning.plans.plan import Row

_KINDS: tuple[Kind, ...] = "F", "B"
"""Passes that are timed."""
MAX_SHARED_PASSES = 32
"""Passes of shared rows per step whose least time travels. With `MAX_SLOTS` and the evidence it
fits the first message of an agreement, a hundred numbers; doubled, it would need a second one."""
MAX_SLOTS = 24
"""Slots per step whose largest cost travels; of more slots, as many evenly apart. Halved or
doubled, fewer or more rows of a step are learnt from."""


def places_of_slots(num_slots: int) -> dict[int, int]:
    """The slots whose largest cost travels, with the place of its number."""
    count = min(num_slots, MAX_SLOTS)
    return {number * num_slots // count: number for number in range(count)}


def costs_of_slots(costs: Sequence[float]) -> list[float]:
    """This rank's numbers, of which all ranks are to know the largest, from costs [slots]."""
    numbers = [0.0] * MAX_SLOTS
    for slot, place in places_of_slots(len(costs)).items():
        numbers[place] = costs[slot]
    return numbers


@dataclass(frozen=True)
class SharedTimes:
    """Some of a step's rows that several ranks share; the same on every rank but for `own`."""

    rows: list[Row]
    lengths: list[tuple[int, ...]]  # of the samples of each
    chunks: int  # of a stage
    own: int  # this rank, as the plan numbers them

    @classmethod
    def of(cls, schedule: MicroBatchSchedule, step: int) -> SharedTimes:
        """Of a step under dynamic CP: of all sizes as many as there are numbers for."""
        plan, lengths = schedule.step_plan(step)
        assert schedule.moves is not None

        def lengths_of(row: Row) -> tuple[int, ...]:
            return tuple(int(lengths[i]) for i in row.samples)

        chunks = schedule.dims.virtual_pipeline
        # Evenly from the smallest to the largest, size by size: both tell fixed costs from tokens'.
        shared = [row for row in plan.rows() if row.size > 1 and row.samples]
        shared.sort(key=lambda row: (row.size, sum(lengths_of(row)), row))
        count = min(len(shared), MAX_SHARED_PASSES // (len(_KINDS) * chunks))
        rows = [shared[number * len(shared) // count] for number in range(count)]
        lengths_of_rows = [lengths_of(row) for row in rows]
        return cls(rows, lengths_of_rows, chunks, schedule.moves.own)

    def seconds(self, passes: Mapping[Pass, float], factor: float) -> list[float]:
        """This rank's numbers, of which all ranks are to know the least.

        They are the seconds of each pass on a mean stage, of whose time this one's passes take
        `factor`; inf where it has no part in a row, 0, which is no time, where it could not be
        told.
        """
        numbers = []
        for row in self.rows:
            has_part = row.rank <= self.own < row.rank + row.size
            for chunk, kind in itertools.product(range(self.chunks), _KINDS):
                took = passes[Pass(kind, chunk, row.slot)] / factor if has_part else math.inf
                numbers.append(took if took > 0 else 0.0)  # 0 for NaN, too
        return numbers + [0.0] * (MAX_SHARED_PASSES - len(numbers))

    def timings(self, least: Sequence[float]) -> list[tuple[int, Timing]]:
        """Slot and times of each row that could be told, given the least of all ranks' numbers."""
        timings, numbers = [], iter(least)
        for row, lengths in zip(self.rows, self.lengths, strict=True):
            of_row = list(itertools.islice(numbers, self.chunks * len(_KINDS)))
            # Forward and backward passes take turns, as in `seconds`.
            timing = Timing(
                lengths=lengths,
                forward_seconds=ordered_sum(of_row[::2]),
                backward_seconds=ordered_sum(of_row[1::2]),
                context_parallel=row.size,
            )
            if min(of_row) > 0 and timing.is_usable:
                timings.append((row.slot, timing))
        return timings


@dataclass(frozen=True)
class TimedStep:
    """A step's passes as they were marked."""

    rows: list[tuple[int, ...]]  # lengths of the samples of each micro-batch
    sizes: Sequence[int]  # of each, the ranks that share it, under dynamic CP; else 1
    order: list[Pass]
    marks: list[Any]  # before and after each pass
    shared: SharedTimes | None  # under dynamic CP alone

    @property
    def is_over(self) -> bool:
        """True if the device has got to its end."""
        return all(map(is_over, self.marks))

    def seconds(self) -> dict[Pass, float]:
        """The time of each pass."""
        starts_and_ends = zip(self.marks[::2], self.marks[1::2], strict=True)
        return {
            which: seconds_between(*marks)
            for which, marks in zip(self.order, starts_and_ends, strict=True)
        }

    def timings(self, passes: Mapping[Pass, float]) -> list[Timing]:
        """The times on this stage of each slot's row, its model chunks' together."""
        # Chunks added up: costs are a stage's, whatever chunks it has.
        of_chunks = defaultdict[tuple[Kind, int], list[float]](list)
        for (kind, _, slot), took in passes.items():
            of_chunks[kind, slot].append(took)
        timings = []
        for slot, (lengths, size) in enumerate(zip(self.rows, self.sizes, strict=True)):
            timing = Timing(
                lengths=lengths,
                forward_seconds=ordered_sum(of_chunks["F", slot]),
                backward_seconds=ordered_sum(of_chunks["B", slot]),
                context_parallel=size,
            )
            timings.append(timing)
        return timings


def rows_of(schedule: MicroBatchSchedule, step: int) -> list[tuple[int, ...]]:
    """Lengths of the samples of each of this rank's micro-batches, which have segments."""
    rows = computed_alone(schedule.steps[step], schedule.hosts)
    return [tuple(schedule.own_lengths[i] for i in indices) for indices in rows]


def mark() -> Any:
    """Now: on a GPU, when its current stream gets here."""
    if cpu_emulation.is_enabled():
        return time.perf_counter()
    # Not the host's clock: it only launches kernels, far ahead of the device.
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def is_over(mark: Any) -> bool:
    """True if the device has got to a mark."""
    return isinstance(mark, float) or bool(mark.query())


def seconds_between(start: Any, end: Any) -> float:
    """Between two marks that the device has got to."""
    if isinstance(start, float):
        return float(end - start)
    return float(start.elapsed_time(end)) / 1e3  # CUDA counts milliseconds
