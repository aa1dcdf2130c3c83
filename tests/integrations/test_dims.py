"""The parallel dims of a framework's job, of its arguments; Megatron's groups: verl's tests."""

from __future__ import annotations

from types import SimpleNamespace

from mcore_batching.integrations.dims import job_dims
from mcore_batching.planning import ParallelDims


def test_of_arguments() -> None:
    args = SimpleNamespace(
        data_parallel_size=6,
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=3,
        context_parallel_size=4,
        tensor_model_parallel_size=5,
        expert_model_parallel_size=8,
    )
    rest = {"pipeline_parallel": 2, "context_parallel": 4, "tensor_parallel": 5}
    chunks = {"virtual_pipeline": 3, "microbatch_group_size": 7}
    assert job_dims(args, microbatch_group_size=7) == ParallelDims(
        data_parallel=6, expert_parallel=8, **rest, **chunks
    )
    args.virtual_pipeline_model_parallel_size = None  # Megatron sets a group size all the same
    assert job_dims(args, microbatch_group_size=7, data_parallel=8) == ParallelDims(
        data_parallel=8, expert_parallel=8, **rest
    )
