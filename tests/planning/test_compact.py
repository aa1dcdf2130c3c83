"""The compact form of a plan: its inverse, its size, and bytes that are refused."""

from __future__ import annotations

import dataclasses
import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_batching.planning import (
    CostModel,
    ParallelDims,
    PlanFormatError,
    PlannerConfig,
    StepPlan,
    plan_batch,
    plan_step,
)
from mcore_batching.planning.plans.compact import plan_from_bytes, plan_to_bytes

COSTS = CostModel(quadratic=0.5)


def read(data: bytes, plan: StepPlan) -> StepPlan:
    settings = plan.dims, plan.config, plan.cost_model
    return plan_from_bytes(data, plan.num_samples, *settings, forward_only=plan.forward_only)


@given(
    lengths=st.lists(st.integers(0, 90), max_size=40),
    data_parallel=st.sampled_from([1, 2, 4]),
    pipeline_parallel=st.sampled_from([1, 2]),
    is_dynamic=st.booleans(),
    forward_only=st.booleans(),
)
def test_reading_is_the_inverse_of_writing(
    lengths: list[int],
    data_parallel: int,
    pipeline_parallel: int,
    is_dynamic: bool,
    forward_only: bool,
) -> None:
    dims = ParallelDims(data_parallel=data_parallel, pipeline_parallel=pipeline_parallel)
    largest = data_parallel if is_dynamic else None
    config = PlannerConfig(max_tokens_per_gpu=64, plan_effort=2, max_context_parallel=largest)
    plan = plan_step(lengths, dims, config, COSTS, forward_only=forward_only)
    data = plan_to_bytes(plan)
    again = read(data, plan)
    assert (again, again.digest()) == (plan, plan.digest())
    assert (again.cost_model, again.forward_only) == (COSTS, forward_only)
    rows = [samples for rank in plan.micro_batches for samples in rank]
    numbers = 3 + sum(map(len, rows)) + len(rows) * (1 + is_dynamic)
    assert len(data) == 8 + 4 * numbers


CONFIG = PlannerConfig(max_tokens_per_gpu=64, plan_effort=2)
PLAN = plan_step([5, 40, 3, 9, 17, 60, 2], ParallelDims(data_parallel=2), CONFIG, COSTS)
DATA = plan_to_bytes(PLAN)


@given(st.binary(max_size=200))
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(PlanFormatError):
        read(data, PLAN)


@given(st.integers(0, 8 * len(DATA) - 1))
def test_one_wrong_bit_is_found(bit: int) -> None:
    damaged = bytearray(DATA)
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(PlanFormatError, match="damaged"):
        read(bytes(damaged), PLAN)


def forged(numbers: list[int], rest: bytes = b"") -> bytes:
    body = struct.pack(f"<{len(numbers)}I", *numbers) + rest
    return struct.pack("<4sI", b"mcbp", zlib.crc32(body)) + body


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (DATA[:-1], "damaged"),
        (DATA + b"\0" * 4, "damaged"),
        (forged([2, 1]), "cannot have 16 bytes"),
        (forged([2, 1, 0, 1, 1, 0, 1], b"\0"), "cannot have 37 bytes"),
        (forged([1, 1, 0, 2, 0, 1]), "for 1 ranks"),
        (forged([2, 1, 1, 1, 1, 1, 1, 0, 1]), "for 2 ranks"),
        (forged([2, 2**31, 0, 1, 1, 0, 1]), "2147483648 micro-batches"),
        (forged([2, 1, 0, 1, 2**32 - 1, 0, 1]), "lists 2"),
        (forged([2, 1, 0, 1, 1, 0, 1, 2]), "lists 3"),
    ],
)
def test_what_is_forged_is_refused_by_name(data: bytes, fault: str) -> None:
    with pytest.raises(PlanFormatError, match=fault):
        read(data, PLAN)


def test_plans_that_it_cannot_hold_are_refused() -> None:
    later = plan_batch([5, 6, 7], PLAN.dims, CONFIG, samples_per_step=2).steps[1]
    uneven = dataclasses.replace(PLAN, micro_batches=(((0,), (1,)), ((2,),)))
    for plan in (later, uneven):
        with pytest.raises(PlanFormatError):
            plan_to_bytes(plan)
