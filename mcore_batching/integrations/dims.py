"""A framework's parallel dims, from Megatron's arguments or from its process groups.

Needs neither PyTorch nor Megatron: rollout managers plan without either.
"""

from __future__ import annotations

import sys
from typing import Any

from mcore_batching.planning import ParallelDims

# Fields of `ParallelDims`, by Megatron's names of them.
_SIZES = {
    "data_parallel": "data_parallel",
    "pipeline_parallel": "pipeline_model_parallel",
    "virtual_pipeline": "virtual_pipeline_model_parallel",
    "context_parallel": "context_parallel",
    "tensor_parallel": "tensor_model_parallel",
    "expert_parallel": "expert_model_parallel",
}


def job_dims(args: Any = None, **known: Any) -> ParallelDims:
    """The parallel dims of a framework's job.

        job_dims(args)                      of arguments: before groups are made, or without them
        job_dims(data_parallel=8)           of Megatron's groups; one stage where there are none

    Fields that are ``known`` are not read there.
    """
    # Looked up, not imported: other engines' processes have no Megatron.
    groups = sys.modules.get("megatron.core.parallel_state")
    has_groups = groups is not None and groups.model_parallel_is_initialized()
    sizes = dict(known)
    for field, name in _SIZES.items():
        if field in sizes:
            continue
        if args is not None:
            sizes[field] = getattr(args, f"{name}_size", None) or 1
        elif has_groups:
            sizes[field] = getattr(groups, f"get_{name}_world_size")() or 1
    if sizes.get("virtual_pipeline", 1) == 1:  # Megatron's default group is set there, too
        sizes["microbatch_group_size"] = None
    return ParallelDims(**sizes)
