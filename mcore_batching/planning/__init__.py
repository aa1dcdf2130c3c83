"""Lengths to plans: which samples share a micro-batch, on which rank, in which order.

Standard library only, so a plan can be made and checked with neither PyTorch nor a GPU.

Reading order: `parallel_dims`, `config` and `cost` (what a plan depends on), `problem` (all of it
together), `plan` (the result), `planner` (from one to the other), `shard` (the part of one rank),
`search` (the step that ends first), `validation` and `statistics` (functions of a plan).
"""

from mcore_batching.planning.batch_plan import Plan
from mcore_batching.planning.bounds import (
    bin_lower_bound,
    micro_batch_lower_bound,
)
from mcore_batching.planning.config import CHOICES, PlannerConfig
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
from mcore_batching.planning.groups import LastStep, group_key, group_steps
from mcore_batching.planning.integers import at_least
from mcore_batching.planning.packing import first_fit, first_fit_decreasing
from mcore_batching.planning.parallel_dims import ParallelDims
from mcore_batching.planning.plan import MicroBatches, StepPlan
from mcore_batching.planning.planner import plan_batch, plan_step
from mcore_batching.planning.problem import MAX_LENGTH_TOKENS, Problem
from mcore_batching.planning.shard import (
    ShardOutlook,
    fill_shard,
    pack_shard,
    shard_ends,
    shard_outlook,
    soonest_counts,
    soonest_filling,
)
from mcore_batching.planning.statistics import (
    StepStatistics,
    predicted_step_time,
    step_problem,
    step_statistics,
)
from mcore_batching.planning.tokens import (
    row_multiple_tokens,
    sample_multiple_tokens,
)
from mcore_batching.planning.validation import validate_plan

__all__ = [
    "CHOICES",
    "MAX_LENGTH_TOKENS",
    "Argument",
    "ConfigError",
    "CostModel",
    "InflightBoundError",
    "InvariantError",
    "ItemTooLargeError",
    "LastStep",
    "LengthError",
    "MCoreBatchingError",
    "MicroBatches",
    "OversizeSampleError",
    "ParallelDims",
    "ParallelDimsError",
    "Plan",
    "PlanFormatError",
    "PlannerConfig",
    "PlanningError",
    "Problem",
    "ShardOutlook",
    "StepPlan",
    "StepStatistics",
    "at_least",
    "bin_lower_bound",
    "fill_shard",
    "first_fit",
    "first_fit_decreasing",
    "group_key",
    "group_steps",
    "micro_batch_lower_bound",
    "pack_shard",
    "plan_batch",
    "plan_step",
    "predicted_step_time",
    "row_multiple_tokens",
    "sample_multiple_tokens",
    "shard_ends",
    "shard_outlook",
    "soonest_counts",
    "soonest_filling",
    "step_problem",
    "step_statistics",
    "validate_plan",
]
