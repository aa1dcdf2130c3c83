"""Faults of other systems' planners, each on an input that shows it, absent here."""

from __future__ import annotations

import pytest

from mcore_batching.planning import ParallelDims, PlannerConfig, StepPlan, plan_step
from mcore_batching.planning.validation import validate_plan

CONFIG = PlannerConfig(max_tokens_per_gpu=10)
LAYOUT = ParallelDims(data_parallel=2, pipeline_parallel=4, virtual_pipeline=2)


def fullest(step: StepPlan, lengths: list[int]) -> int:
    return max(sum(lengths[s] for s in samples) for rank in step.micro_batches for samples in rank)


@pytest.mark.parametrize("local", [False, True])
def test_the_count_is_not_rounded_down_under_virtual_pipeline(local: bool) -> None:
    """7 full micro-batches a rank, groups of 4: rounded down to 4, one gets 20 tokens of 10."""
    lengths = [10] * 14
    owners = [index % 2 for index in range(14)] if local else None
    rounded_down = 7 // 4 * 4
    assert -(-7 // rounded_down) * 10 > CONFIG.cap_tokens(LAYOUT)
    step = plan_step(lengths, LAYOUT, CONFIG, owners=owners)
    assert step.num_microbatches == 8
    assert fullest(step, lengths) == 10
    validate_plan(step, lengths)


def karmarkar_karp(sizes: list[int], count: int) -> list[list[int]]:
    """Partition by the largest differencing method, with no regard to a cap."""
    states = [[(size, [i])] + [(0, [])] * (count - 1) for i, size in enumerate(sizes)]
    while len(states) > 1:
        states.sort(key=lambda state: state[0][0] - state[-1][0], reverse=True)
        first, second = states[0], states[1]
        merged = [(a + b, x + y) for (a, x), (b, y) in zip(first, reversed(second), strict=True)]
        states = [*states[2:], sorted(merged, reverse=True)]
    return [members for _, members in states[0]]


@pytest.mark.parametrize("local", [False, True])
def test_balancing_does_not_repartition_past_the_cap(local: bool) -> None:
    """First-fit counts 2 micro-batches; differencing into 2 makes one of 11 under a cap of 10."""
    lengths = [5, 5, 4, 3, 3]
    parts = karmarkar_karp(lengths, 2)
    assert max(sum(lengths[i] for i in part) for part in parts) == 11
    step = plan_step(lengths, ParallelDims(), CONFIG, owners=[0] * 5 if local else None)
    assert step.num_microbatches == 2
    assert fullest(step, lengths) == 10
    validate_plan(step, lengths)


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("num_samples", [0, 1, 3, 7])
def test_fewer_samples_than_ranks_times_group_is_no_error(num_samples: int, local: bool) -> None:
    lengths = [5] * num_samples
    assert num_samples < LAYOUT.data_parallel * LAYOUT.group_size
    step = plan_step(lengths, LAYOUT, CONFIG, owners=[0] * num_samples if local else None)
    validate_plan(step, lengths)
    placed = sorted(s for rank in step.micro_batches for samples in rank for s in samples)
    assert placed == list(range(num_samples))
    assert step.num_microbatches == 4
