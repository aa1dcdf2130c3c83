"""Pipeline schedules as data, and the one clock that tells when their passes end.

passes       what each stage runs, in which order, and what of a micro-batch's cost it takes
program      the passes of all stages, each after those that it waits for
clock        when they end, and end after changes; of one pipeline, or of ranks that share rows
operations   a step's passes with their times, and what a stage holds at a time
"""

from __future__ import annotations

from mcore_batching.planning.pipeline.clock import (
    Blocks,
    Clock,
    CoupledClock,
    Operation,
    blocks_of,
    clocks_of,
)
from mcore_batching.planning.pipeline.operations import (
    inflight_tokens,
    pipeline_operations,
    pipeline_time,
)
from mcore_batching.planning.pipeline.passes import Kind, Pass, Schedule

__all__ = [
    "Blocks",
    "Clock",
    "CoupledClock",
    "Kind",
    "Operation",
    "Pass",
    "Schedule",
    "blocks_of",
    "clocks_of",
    "inflight_tokens",
    "pipeline_operations",
    "pipeline_time",
]
