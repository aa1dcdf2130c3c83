"""Each invariant of a plan over random lengths, layouts, policies.

Also of samples that stay on their rank, and under dynamic CP.

The seventh invariant, order, concerns outputs and is tested with `restore_order`.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from kit.patience import patience
from planning_cases import (
    Case,
    Integer,
    broken_invariants,
    cases,
    examples,
    least_count,
    planned,
    row_tokens,
)

from mcore_batching.planning import (
    CostModel,
    OversizeSampleError,
    ParallelDims,
    Plan,
    PlannerConfig,
    PlanningError,
    Problem,
    pack_local,
    plan_batch,
    plan_step,
)
from mcore_batching.planning.config import (
    padded_sample_tokens,
)
from mcore_batching.planning.plans.validation import validate_plan
from mcore_batching.tools.explain import explain

REPOSITORY = Path(__file__).resolve().parents[2]

SIX_IN_A_GROUP = ParallelDims(
    data_parallel=4, pipeline_parallel=4, virtual_pipeline=2, microbatch_group_size=6
)
INTERLEAVED = ParallelDims(data_parallel=3, pipeline_parallel=2, virtual_pipeline=2)
SPREAD = ParallelDims(data_parallel=8, pipeline_parallel=2, virtual_pipeline=4)
CAP_8 = PlannerConfig(max_tokens_per_gpu=8)
BY_TWO = PlannerConfig(max_tokens_per_gpu=10001, max_context_parallel=2)
BY_EIGHT = PlannerConfig(max_tokens_per_gpu=5001, max_context_parallel=8, plan_effort=10)


@examples(1000)
@given(cases(dynamic=True))
@example(Case([], ParallelDims(data_parallel=3), CAP_8, None))
@example(Case([], ParallelDims(data_parallel=3), CAP_8, []))
@example(Case([5, 1], SIX_IN_A_GROUP, CAP_8, None))  # fewer than ranks times groups
@example(Case([5, 1, 8, 30], INTERLEAVED, CAP_8, [0, 0, 0, 2]))  # one rank has none
# Ranks beside shared rows end with a row of their own.
@example(Case([0, 9000], replace(SPREAD, data_parallel=4), BY_TWO, None))
@example(Case([0, 2000, 300], SPREAD, BY_TWO, None))
@example(Case([300], SPREAD, BY_EIGHT, None))
def test_plans_keep_every_invariant_and_repeat_themselves(case: Case) -> None:
    step = planned(case)
    assert broken_invariants(step, case.lengths) == set()
    validate_plan(step, case.lengths)
    for rank in step.micro_batches:
        assert all(list(samples) == sorted(samples) for samples in rank)
        assert rank[-1] or not any(rank)  # a placeholder is last only where there is no sample
    assert step.num_microbatches >= least_count(fewest(case), case.dims)
    if case.owners is not None:  # none moves
        ranks = [sorted(i for row in rank for i in row) for rank in step.micro_batches]
        assert [rank for rank, own in enumerate(ranks) for _ in own] == sorted(case.owners)
        assert all(case.owners[i] == rank for rank, own in enumerate(ranks) for i in own)
    elif not case.config.searches and case.config.max_context_parallel is None:
        packed = pack_local(Problem.of(case.lengths, case.dims, case.config))
        each = -(-len(packed) // case.dims.data_parallel)
        assert step.num_microbatches == least_count(each, case.dims)
        if case.config.fill == "placeholder":  # never splits
            real = sorted(samples for rank in step.micro_batches for samples in rank if samples)
            assert real == sorted(map(tuple, packed))
    lengths: Any = tuple(map(Integer, case.lengths))
    again = planned(replace(case, lengths=lengths))
    assert again == step
    assert again.digest() == step.digest()
    assert step.digest()[:12] in str(step)
    whole = Plan(steps=(step,), num_samples=step.num_samples)
    assert Plan.from_json(whole.to_json()) == whole
    assert str(len(case.lengths)) in explain(step, case.lengths)


def fewest(case: Case) -> int:
    """Micro-batches of a rank that can hold all tokens, were they to fit without gaps."""
    cap, ranks = case.config.max_tokens_per_gpu, case.dims.data_context_parallel
    # A sample over the cap may be alone in a row, of one rank under dynamic CP.
    of_row = cap if case.config.max_context_parallel else cap * case.dims.context_parallel
    return -(-sum(min(length, of_row) for length in case.lengths) // (cap * ranks))


@examples(100)
@given(cases(dynamic=True))
def test_steps_of_a_batch_are_the_plans_of_their_samples(case: Case) -> None:
    plan = plan_batch(case.lengths, case.dims, case.config, samples_per_step=4)
    validate_plan(plan, case.lengths)
    assert type(plan).from_json(plan.to_json()) == plan
    assert len(plan.steps) == max(1, -(-len(case.lengths) // 4))
    for index, step in enumerate(plan.steps):
        first = 4 * index
        lengths = case.lengths[first : first + 4]
        alone = plan_step(lengths, case.dims, case.config)
        samples = range(first, first + len(lengths))
        assert step.micro_batches == tuple(
            tuple(tuple(samples[i] for i in held) for held in rank) for rank in alone.micro_batches
        )
        assert step.context_parallel == alone.context_parallel
        assert step.sample_indices == tuple(samples)
        validate_plan(step, case.lengths)


@examples(150)
@given(cases())
def test_oversize_samples_are_refused_by_name(case: Case) -> None:
    strict = replace(case.config, on_oversize="error")
    step = plan_step(case.lengths, case.dims, case.config)
    cap = case.config.max_tokens_per_gpu * case.dims.context_parallel
    oversize = [
        sample
        for sample in range(len(case.lengths))
        if row_tokens([sample], case.lengths, step) > cap
    ]
    if not oversize:
        validate_plan(plan_step(case.lengths, case.dims, strict), case.lengths)
        return
    with pytest.raises(OversizeSampleError) as caught:
        plan_batch(case.lengths, case.dims, strict, samples_per_step=4)
    error = caught.value
    assert error.index in oversize
    assert error.length == case.lengths[error.index] == max(case.lengths)
    others = f" (and {len(oversize) - 1} more samples)" if len(oversize) > 1 else ""
    assert str(error) == (
        f"sample {error.index} has {error.length} tokens, {error.padded_length} after padding, the "
        f"cap is {cap}{others}; set max_tokens_per_gpu (--max-tokens-per-gpu) to "
        f"{error.needed_max_tokens_per_gpu} or more, or on_oversize='own-bin' "
        "(--dynamic-batch-on-oversize own-bin)"
    )
    assert padded_sample_tokens(error.length, case.dims, strict) == error.padded_length
    enough = replace(strict, max_tokens_per_gpu=error.needed_max_tokens_per_gpu)
    validate_plan(plan_step(case.lengths, case.dims, enough), case.lengths)
    with pytest.raises(PlanningError):
        plan_step(
            case.lengths,
            case.dims,
            replace(enough, max_tokens_per_gpu=enough.max_tokens_per_gpu - 1),
        )


DIGESTS = """
import random
from mcore_batching.planning import CostModel, ParallelDims, PlannerConfig, Problem, plan_batch
from mcore_batching.planning.local import fill_local, least_count, pack_local

generator = random.Random(7)
lengths = [generator.randrange(2 ** generator.randrange(1, 15)) for _ in range(300)]
for layout in (
    ParallelDims(data_parallel=4),
    ParallelDims(data_parallel=4, pipeline_parallel=4),
    ParallelDims(data_parallel=4, pipeline_parallel=2, virtual_pipeline=2, context_parallel=2),
    ParallelDims(data_parallel=4, expert_parallel=4, tensor_parallel=2, sequence_parallel=True),
):
    for balance in ("auto", "cost", "tokens", "none"):
        config = PlannerConfig(max_tokens_per_gpu=8192, balance=balance, plan_effort=200)
        model = CostModel(linear=0.1, quadratic=1 / 7000.1, per_micro_batch=0.3)
        print(plan_batch(lengths, layout, config, model, samples_per_step=128).digest())
        problem = Problem.of(lengths, layout, config, model)
        packed = pack_local(problem)
        print(layout, balance, fill_local(problem, packed, 2 + least_count(problem, packed)))
for count, cap, stages, chunks, experts, forward_only in (
    (60, 2000, 2, 1, 1, False),
    (150, 9000, 4, 1, 1, False),
    (100, 2000, 2, 2, 1, False),
    (80, 4000, 1, 1, 1, False),
    (80, 4000, 4, 1, 1, True),
    (80, 2000, 3, 1, 4, False),
):
    layout = ParallelDims(
        data_parallel=4, pipeline_parallel=stages, virtual_pipeline=chunks, expert_parallel=experts
    )
    config = PlannerConfig(max_tokens_per_gpu=cap, max_context_parallel=4, plan_effort=100)
    print(plan_batch(lengths[:count], layout, config, forward_only=forward_only).digest())
"""


def digests(python: str, hash_seed: str) -> list[str]:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONHASHSEED": hash_seed}
    run = subprocess.run(
        [python, "-c", DIGESTS],
        env=environment,
        capture_output=True,
        text=True,
        timeout=patience(60),
        check=True,
    )
    return run.stdout.splitlines()


def runs(python: str) -> bool:
    """Whether there is such an interpreter; a version manager's shim may stand for none."""
    return bool(shutil.which(python)) and subprocess.call([python, "-c", ""]) == 0


def test_deterministic_over_hash_seeds_and_python_versions() -> None:
    expected = digests(sys.executable, "0")
    assert len(set(expected)) == len(expected) == 38
    assert digests(sys.executable, "4242") == expected
    for minor in {11, 12, 13, 14} - {sys.version_info.minor}:
        if runs(python := f"python3.{minor}"):
            assert digests(python, "1") == expected, python
    # The same everywhere means the same as here. A planner that plans better changes this value.
    combined = hashlib.sha256("".join(expected).encode()).hexdigest()
    assert combined == "2c89a8cd29c2bfe1094e9471aa178fd5ac0a3f513571075bd31e8ec6ba5bc59f"


def test_sums_do_not_depend_on_the_python_version() -> None:
    """0.1 ten times is 0.9999999999999999 term by term, and 1.0 with 3.12's compensated `sum`."""
    model = CostModel(linear=0.1, quadratic=0, per_micro_batch=0)
    assert model.micro_batch([1] * 10) == 0.9999999999999999
