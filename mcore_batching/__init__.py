"""Dynamic micro-batches for Megatron-LM.

    from mcore_batching import ParallelDims, PlannerConfig, plan_step

    config = PlannerConfig(max_tokens_per_gpu=16384)
    step = plan_step(lengths, ParallelDims(data_parallel=8), config)
    step.micro_batches[rank][slot]  # sample indices of that rank's micro-batch; () is a placeholder

Importing this package imports the planner alone, neither PyTorch nor Megatron. `hook` and `install`
import those when they are called; the rest of the engine is in `mcore_batching.batch`,
`mcore_batching.rl` and `mcore_batching.megatron`.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING

from mcore_batching._version import __version__
from mcore_batching.planning import (
    ConfigError,
    CostModel,
    InvariantError,
    LengthError,
    MCoreBatchingError,
    OversizeSampleError,
    ParallelDims,
    ParallelDimsError,
    Plan,
    PlanFormatError,
    PlannerConfig,
    PlanningError,
    StepPlan,
    StepStatistics,
    group_steps,
    plan_batch,
    plan_step,
    step_statistics,
    validate_plan,
)

if TYPE_CHECKING:
    from mcore_batching.batch import Schema
    from mcore_batching.integrations.replacements import Hook

__all__ = [
    "ConfigError",
    "CostModel",
    "InvariantError",
    "LengthError",
    "MCoreBatchingError",
    "OversizeSampleError",
    "ParallelDims",
    "ParallelDimsError",
    "Plan",
    "PlanFormatError",
    "PlannerConfig",
    "PlanningError",
    "StepPlan",
    "StepStatistics",
    "__version__",
    "group_steps",
    "hook",
    "install",
    "plan_batch",
    "plan_step",
    "step_statistics",
    "validate_plan",
]


def hook(*modules: ModuleType, schema: Schema | None = None) -> Hook:
    """Replace ``get_data_iterator`` and ``forward_only`` in a framework's modules.

    For slime, and for frameworks that have these functions with slime's signatures. Imports
    PyTorch and Megatron. Arguments and errors: `mcore_batching.integrations.slime.hook`.
    """
    from mcore_batching.integrations.slime import hook as hook_modules

    return hook_modules(*modules, schema=schema)


def install(arguments: Sequence[str] | None = None) -> Hook:
    """Hook the plugin into ``megatron.training``, for the first lines of a stock training script.

    Imports PyTorch and Megatron. Arguments and errors:
    `mcore_batching.integrations.megatron_lm.install`.
    """
    from mcore_batching.integrations.megatron_lm import install as install_stock

    return install_stock(arguments)
