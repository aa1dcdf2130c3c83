"""Pipeline schedules as data, and the one clock that tells when their passes end.

passes          what each stage runs, in which order, and its share of a micro-batch's cost
program         the passes of all stages, numbered, and which wait for which
clock           when the passes of one pipeline end, also after changes of costs
coupled_clock   the same for ranks that share rows; which clocks a step has
split_backward  when passes end some of which leave weight gradients for later (split_kernel)
inflight        the tokens in flight on a stage
compiled        loops that numba compiles where it is installed
"""

from __future__ import annotations

from mcore_batching.planning.pipeline.clock import Clock, Operation
from mcore_batching.planning.pipeline.coupled_clock import (
    Blocks,
    CoupledClock,
    blocks_of,
    clocks_of,
)
from mcore_batching.planning.pipeline.inflight import (
    inflight_tokens,
    slots_in_flight,
    split_inflight_tokens,
)
from mcore_batching.planning.pipeline.passes import PARTS, Kind, Pass, Schedule, SplitStage
from mcore_batching.planning.pipeline.split_backward import SplitClock, clock_of_rank

__all__ = [
    "PARTS",
    "Blocks",
    "Clock",
    "CoupledClock",
    "Kind",
    "Operation",
    "Pass",
    "Schedule",
    "SplitClock",
    "SplitStage",
    "blocks_of",
    "clock_of_rank",
    "clocks_of",
    "inflight_tokens",
    "slots_in_flight",
    "split_inflight_tokens",
]
