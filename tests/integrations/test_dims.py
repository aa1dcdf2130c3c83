"""The parallel dims of a framework's job: of arguments, of Megatron's groups, or of neither."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from mcore_batching.integrations.dims import job_dims
from mcore_batching.planning import ParallelDims

SIZES = {
    "data_parallel": 6,
    "pipeline_model_parallel": 2,
    "virtual_pipeline_model_parallel": 3,
    "context_parallel": 4,
    "tensor_model_parallel": 5,
    "expert_model_parallel": 8,
}


def test_of_arguments() -> None:
    args = SimpleNamespace(**{f"{name}_size": size for name, size in SIZES.items()})
    expected = ParallelDims(
        data_parallel=6,
        pipeline_parallel=2,
        virtual_pipeline=3,
        context_parallel=4,
        tensor_parallel=5,
        expert_parallel=8,
        microbatch_group_size=7,
    )
    assert job_dims(args, microbatch_group_size=7) == expected
    args.virtual_pipeline_model_parallel_size = None  # Megatron sets a group size all the same
    assert job_dims(args, microbatch_group_size=7, data_parallel=8) == ParallelDims(
        data_parallel=8,
        pipeline_parallel=2,
        context_parallel=4,
        tensor_parallel=5,
        expert_parallel=8,
    )


def test_of_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = SimpleNamespace(
        model_parallel_is_initialized=lambda: True,
        **{f"get_{name}_world_size": lambda size=size: size for name, size in SIZES.items()},
    )
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", groups)
    assert job_dims(expert_parallel=1, data_parallel=3) == ParallelDims(
        data_parallel=3,
        pipeline_parallel=2,
        virtual_pipeline=3,
        context_parallel=4,
        tensor_parallel=5,
    )
    groups.model_parallel_is_initialized = lambda: False
    assert job_dims(data_parallel=3) == ParallelDims(data_parallel=3)
    monkeypatch.delitem(sys.modules, "megatron.core.parallel_state")
    assert job_dims(data_parallel=3) == ParallelDims(data_parallel=3)
