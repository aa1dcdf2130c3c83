"""Lengths to plans: which samples share a micro-batch, on which rank, in which order.

Standard library only. Reading order: `parallel_dims`, `config` and `costs/` (what a plan depends
on), `forest` (samples that begin alike), `problem` (all of it together), `plans/` (the result),
`planner` (from one to the other), `local` (samples that stay on their rank), `search/` (the step
that ends first), `clock` (when passes end).
"""

from mcore_batching.planning.config import (
    CHOICES,
    PlannerConfig,
    row_multiple_tokens,
    sample_multiple_tokens,
)
from mcore_batching.planning.costs.cost import CostModel
from mcore_batching.planning.errors import (
    ConfigError,
    InvariantError,
    LengthError,
    MCoreBatchingError,
    OversizeSampleError,
    ParallelDimsError,
    PlanFormatError,
    PlanningError,
)
from mcore_batching.planning.groups import LastStep, group_steps
from mcore_batching.planning.integers import MAX_LENGTH_TOKENS, at_least
from mcore_batching.planning.local import fill_local, least_count, pack_local
from mcore_batching.planning.packing.bounds import micro_batch_lower_bound
from mcore_batching.planning.parallel_dims import ParallelDims
from mcore_batching.planning.planner import plan_batch, plan_step
from mcore_batching.planning.plans.plan import MicroBatches, Plan, StepPlan
from mcore_batching.planning.plans.statistics import (
    StepStatistics,
    WeighedStep,
    predicted_step_time,
    step_statistics,
)
from mcore_batching.planning.plans.validation import validate_plan
from mcore_batching.planning.problem import Problem

__all__ = [
    "CHOICES",
    "MAX_LENGTH_TOKENS",
    "ConfigError",
    "CostModel",
    "InvariantError",
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
    "StepPlan",
    "StepStatistics",
    "WeighedStep",
    "at_least",
    "fill_local",
    "group_steps",
    "least_count",
    "micro_batch_lower_bound",
    "pack_local",
    "plan_batch",
    "plan_step",
    "predicted_step_time",
    "row_multiple_tokens",
    "sample_multiple_tokens",
    "step_statistics",
    "validate_plan",
]
