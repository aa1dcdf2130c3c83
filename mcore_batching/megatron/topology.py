"""The parallel dims of the running job, read from Megatron."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.core import parallel_state
from megatron.core.utils import get_model_config

from mcore_batching.planning import ParallelDims


def current_dims(model: list[Any]) -> ParallelDims:
    """The `ParallelDims` of the process groups that are set up, and of this model.

    Args:
        model: this rank's model chunks, one per virtual pipeline stage.
    """
    config = get_model_config(model[0])
    virtual = parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
    return ParallelDims(
        data_parallel=parallel_state.get_data_parallel_world_size(),
        pipeline_parallel=parallel_state.get_pipeline_model_parallel_world_size(),
        virtual_pipeline=virtual,
        context_parallel=parallel_state.get_context_parallel_world_size(),
        tensor_parallel=parallel_state.get_tensor_model_parallel_world_size(),
        expert_parallel=parallel_state.get_expert_model_parallel_world_size(),
        sequence_parallel=bool(config.sequence_parallel),
        microbatch_group_size=config.microbatch_group_size_per_vp_stage if virtual > 1 else None,
    )


def model_chunks(model: Any) -> list[Any]:
    """The model as a list of chunks: a module alone counts as one."""
    return list(model) if isinstance(model, Sequence) else [model]


def is_last_stage() -> bool:
    """True on ranks of the last pipeline stage, whose last chunk makes the logits."""
    return bool(parallel_state.is_pipeline_last_stage(ignore_virtual=True))
