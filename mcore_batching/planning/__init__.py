"""Which samples share a micro-batch, on which rank, in which order. Standard library only.

Guarantees: importing this imports nothing outside Python's own library, so a plan can be made,
checked and explained on a machine that has neither PyTorch nor a GPU.
"""

from mcore_batching.planning.bounds import bin_lower_bound
from mcore_batching.planning.config import PlannerConfig
from mcore_batching.planning.cost import CostModel
from mcore_batching.planning.errors import (
    Argument,
    ConfigError,
    InflightBoundError,
    InvariantError,
    ItemTooLargeError,
    LengthError,
    MCoreBatchingError,
    OversizeSampleError,
    ParallelDimsError,
    PlanFormatError,
    PlanningError,
)
from mcore_batching.planning.groups import group_steps
from mcore_batching.planning.packing import first_fit, first_fit_decreasing
from mcore_batching.planning.parallel_dims import ParallelDims
from mcore_batching.planning.plan import Plan, StepPlan
from mcore_batching.planning.planner import plan_batch, plan_step
from mcore_batching.planning.shard import (
    ShardOutlook,
    fill_shard,
    pack_shard,
    shard_outlook,
    shard_packings,
    soonest_packing,
)
from mcore_batching.planning.statistics import StepStatistics, step_statistics
from mcore_batching.planning.tokens import (
    padded_row_tokens,
    padded_sample_tokens,
    placeholder_tokens,
    row_capacity_tokens,
    row_multiple_tokens,
    sample_multiple_tokens,
)

__all__ = [
    "Argument",
    "ConfigError",
    "CostModel",
    "InflightBoundError",
    "InvariantError",
    "ItemTooLargeError",
    "LengthError",
    "MCoreBatchingError",
    "OversizeSampleError",
    "ParallelDims",
    "ParallelDimsError",
    "Plan",
    "PlanFormatError",
    "PlannerConfig",
    "PlanningError",
    "ShardOutlook",
    "StepPlan",
    "StepStatistics",
    "bin_lower_bound",
    "fill_shard",
    "first_fit",
    "first_fit_decreasing",
    "group_steps",
    "pack_shard",
    "padded_row_tokens",
    "padded_sample_tokens",
    "placeholder_tokens",
    "plan_batch",
    "plan_step",
    "row_capacity_tokens",
    "row_multiple_tokens",
    "sample_multiple_tokens",
    "shard_outlook",
    "shard_packings",
    "soonest_packing",
    "step_statistics",
]
