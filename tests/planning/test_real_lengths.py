"""Whole traces of real request lengths (serving traces, not RL rollouts)."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
from planning_cases import broken_invariants

from mcore_batching.planning import (
    ParallelDims,
    PlannerConfig,
    plan_batch,
    plan_step,
    step_statistics,
)
from mcore_batching.planning.validation import validate_plan
from mcore_batching.tools.lengths_file import read_lengths

DATA = Path(
    os.environ.get(
        "MCORE_BATCHING_TEST_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"
    )
)

TRACES = [
    ("azure_conv_lengths.txt", 19_366, 16_384),
    ("mooncake_conv_lengths.txt", 12_031, 131_072),
]


def trace(name: str, count: int) -> list[int]:
    path = DATA / name
    if not path.exists():
        pytest.skip(f"{name} is not in {DATA}; set MCORE_BATCHING_TEST_DATA to its folder")
    lengths = read_lengths(str(path))
    assert len(lengths) == count
    return lengths


@pytest.mark.parametrize("samples", [2_500, pytest.param(20_000, marks=pytest.mark.long)])
@pytest.mark.parametrize(("name", "count", "cap"), TRACES)
def test_every_step_of_a_trace_keeps_the_invariants(
    name: str, count: int, cap: int, samples: int
) -> None:
    lengths = trace(name, count)[:samples]
    dims = ParallelDims(data_parallel=8, pipeline_parallel=4, virtual_pipeline=2)
    config = PlannerConfig(max_tokens_per_gpu=cap, plan_effort=10)
    plan = plan_batch(lengths, dims, config, samples_per_step=512)
    validate_plan(plan, lengths)
    assert len(plan.steps) == -(-len(lengths) // 512)
    for step in plan.steps:
        assert step.num_microbatches % 4 == 0
        # The split leaves no placeholder: every step has far more samples than micro-batches.
        assert step_statistics(step, lengths).num_placeholders == 0
        own = {sample: number for number, sample in enumerate(step.sample_indices)}
        renumbered = dataclasses.replace(
            step,
            micro_batches=tuple(
                tuple(tuple(own[i] for i in samples) for samples in rank)
                for rank in step.micro_batches
            ),
            sample_indices=tuple(range(len(own))),
        )
        assert broken_invariants(renumbered, [lengths[i] for i in own]) == set()


@pytest.mark.parametrize(("name", "count", "cap"), TRACES)
def test_local_shards_of_a_trace(name: str, count: int, cap: int) -> None:
    lengths = trace(name, count)[:1024]
    dims = ParallelDims(data_parallel=8, context_parallel=2, pipeline_parallel=2)
    config = PlannerConfig(max_tokens_per_gpu=cap // 2, pad_total_to=128)
    # A quarter of the ranks holds three quarters of the samples, and one rank none.
    owners = [index % 2 if index % 4 else 2 + index // 4 % 5 for index in range(1024)]
    step = plan_step(lengths, dims, config, owners=owners)
    validate_plan(step, lengths)
    assert broken_invariants(step, lengths) == set()
    assert set(owners) == set(range(7))
    assert set(step.micro_batches[7]) == {()}
