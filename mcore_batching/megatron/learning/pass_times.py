"""When the passes of a step began and ended, on the device that runs them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mcore_batching.megatron import cpu_emulation
from mcore_batching.megatron.learning.shared_times import Rivals, SharedTimes
from mcore_batching.megatron.rows.schedule import MicroBatchSchedule
from mcore_batching.planning.cost_fit import Timing
from mcore_batching.planning.pipeline import Kind, Pass


@dataclass(frozen=True)
class TimedStep:
    """A step's passes as they were marked.

    Attributes:
        rows: lengths of the samples of each micro-batch.
        sizes: of each, the ranks that share it, under dynamic CP; else 1.
        order: of the passes.
        began: before all of them.
        marks: before and after each pass.
        predicted_seconds: of the whole step; 0 where nothing was known.
        shared: the rows that several ranks share, under dynamic CP alone.
        rivals: for what ranks wait in every slot, where they do and all rows are known.
    """

    rows: list[tuple[int, ...]]
    sizes: list[int]
    order: list[Pass]
    began: Any
    marks: list[Any]
    predicted_seconds: float
    shared: SharedTimes | None
    rivals: Rivals | None = None

    def seconds(self) -> dict[Pass, float]:
        """The time of each pass."""
        starts_and_ends = zip(self.marks[::2], self.marks[1::2], strict=True)
        return {
            which: seconds_between(*marks)
            for which, marks in zip(self.order, starts_and_ends, strict=True)
        }

    def timings(self, passes: Mapping[Pass, float]) -> dict[int, Timing]:
        """The times on this stage of each row, by its slot, its model chunks' together."""
        seconds: dict[Kind, list[float]] = {kind: [0.0] * len(self.rows) for kind in ("F", "B")}
        for (kind, _, slot), took in passes.items():
            seconds[kind][slot] += took
        return {
            slot: Timing(
                lengths=lengths,
                forward_seconds=seconds["F"][slot],
                backward_seconds=seconds["B"][slot],
                context_parallel=size,
            )
            for slot, (lengths, size) in enumerate(zip(self.rows, self.sizes, strict=True))
        }


def rows_of(schedule: MicroBatchSchedule, step: int) -> list[tuple[int, ...]]:
    """Lengths of the samples of each of this rank's micro-batches."""
    lengths = schedule.rollout_data["total_lengths"]
    return [tuple(int(lengths[i]) for i in indices) for indices in schedule.steps[step]]


def mark() -> Any:
    """Now: on a GPU, when its current stream gets here."""
    if cpu_emulation.is_enabled():
        return time.perf_counter()
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
    return float(start.elapsed_time(end)) / 1e3
