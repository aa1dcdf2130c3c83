"""Dynamic micro-batches for Megatron-LM.

    from mcore_batching import Layout, PlannerConfig, plan_step

    step = plan_step(lengths, Layout(data_parallel=8), PlannerConfig(max_tokens_per_gpu=16384))
    step.micro_batches[rank][slot]  # sample indices of that rank's micro-batch; () is a placeholder

Guarantees: importing this package imports the planner and nothing else: no PyTorch, no Megatron.
What needs those is imported from `mcore_batching.batch` and `mcore_batching.megatron`.
"""

from mcore_batching._version import __version__
from mcore_batching.planning import (
    ConfigError,
    CostModel,
    InvariantError,
    ItemTooLargeError,
    Layout,
    LayoutError,
    LengthError,
    OversizeSampleError,
    Plan,
    PlanFormatError,
    PlannerConfig,
    PlanningError,
    StepPlan,
    StepStatistics,
    bin_lower_bound,
    fill_shard,
    first_fit,
    first_fit_decreasing,
    group_steps,
    pack_shard,
    padded_row_tokens,
    padded_sample_tokens,
    placeholder_tokens,
    plan_batch,
    plan_step,
    row_capacity_tokens,
    row_multiple_tokens,
    sample_multiple_tokens,
    step_statistics,
)

__all__ = [
    "ConfigError",
    "CostModel",
    "InvariantError",
    "ItemTooLargeError",
    "Layout",
    "LayoutError",
    "LengthError",
    "OversizeSampleError",
    "Plan",
    "PlanFormatError",
    "PlannerConfig",
    "PlanningError",
    "StepPlan",
    "StepStatistics",
    "__version__",
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
    "step_statistics",
]
