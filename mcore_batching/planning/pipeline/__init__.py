"""Pipeline schedules as data, and the one clock that tells when their passes end.

passes         what each stage runs, in which order, and its share of a micro-batch's cost
program        the passes of all stages, numbered, and which wait for which
clock          when the passes of one pipeline end, also after changes of costs
coupled_clock  the same for ranks that share rows; which clocks a step has
"""

from __future__ import annotations

from mcore_batching.planning.pipeline.clock import Clock, Operation
from mcore_batching.planning.pipeline.coupled_clock import (
    Blocks,
    CoupledClock,
    blocks_of,
    clocks_of,
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
]
