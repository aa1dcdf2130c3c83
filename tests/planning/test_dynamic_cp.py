"""Plans under dynamic CP: every row has a context-parallel size of its own; ranks share rows."""

from __future__ import annotations

import json
import pickle
import random
from dataclasses import replace

import pytest

from mcore_batching.planning import (
    InvariantError,
    OversizeSampleError,
    ParallelDims,
    Plan,
    PlanFormatError,
    PlannerConfig,
    StepPlan,
    plan_batch,
    plan_step,
    predicted_step_time,
    validate_plan,
)

LENGTHS = [100, 60, 7, 3]
DIMS = ParallelDims(data_parallel=4)
CONFIG = PlannerConfig(max_tokens_per_gpu=32, max_context_parallel=4)
STEP = StepPlan(
    micro_batches=(((2,), (1,), (0,)), ((3,), (1,), (0,)), ((), (), (0,)), ((), (), (0,))),
    num_microbatches=3,
    sample_indices=(0, 1, 2, 3),
    dims=DIMS,
    config=CONFIG,
    context_parallel=((1, 2, 4), (1, 2, 4), (1, 1, 4), (1, 1, 4)),
)
PLAN = Plan(steps=(STEP,), num_samples=4)


def test_a_row_is_counted_once_and_has_a_size() -> None:
    validate_plan(STEP, LENGTHS)
    validate_plan(PLAN, LENGTHS)
    assert (STEP.row_size(3, 2), STEP.row_size(3, 1)) == (4, 1)
    assert [row for row in STEP.rows() if row.size > 1] == [(0, 1, 2, (1,)), (0, 2, 4, (0,))]
    fixed = plan_step([9, 9], ParallelDims(context_parallel=2), PlannerConfig(max_tokens_per_gpu=8))
    assert {row.size for row in fixed.rows()} == {2}


def test_the_document_lists_sizes_only_under_dynamic_cp() -> None:
    document = json.loads(PLAN.to_json())
    assert document["config"]["max_context_parallel"] == 4
    assert document["steps"][0]["context_parallel"] == [[1, 2, 4], [1, 2, 4], [1, 1, 4], [1, 1, 4]]
    assert Plan.from_json(PLAN.to_json()) == PLAN == pickle.loads(pickle.dumps(PLAN))
    assert "[0]×4" in str(STEP)
    assert "on 4 ranks" in str(STEP)
    other = replace(STEP, context_parallel=((1, 1, 4),) * 4)
    assert other != STEP
    assert other.digest() != STEP.digest()
    without = plan_batch(LENGTHS, DIMS, replace(CONFIG, max_context_parallel=None))
    assert "context_parallel" not in json.loads(without.to_json())["steps"][0]
    assert "max_context_parallel" not in without.to_json()


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            None,
            'of step 0 and "max_context_parallel" of "config" need each other',
        ),
        ([[1, 2, 4]] * 3, 'must hold a size of 1 or more for each micro-batch of "ranks"'),
        ([[1, 2, 0]] * 4, 'must hold a size of 1 or more for each micro-batch of "ranks"'),
        ([[1, 2, "4"]] * 4, '"context_parallel" of step 0, rank 0, slot 2 must be an integer'),
        (4, '"context_parallel" of step 0 must be a JSON array, got 4'),
    ],
)
def test_a_document_with_wrong_sizes_is_refused(sizes: object, message: str) -> None:
    document = json.loads(PLAN.to_json())
    document["steps"][0]["context_parallel"] = sizes
    with pytest.raises(PlanFormatError, match=message):
        Plan.from_json(json.dumps(document))


@pytest.mark.parametrize(
    ("sizes", "fault"),
    [
        (((1, 2, 4), (1, 2, 4), (1, 2, 4), (1, 2, 4)), "a placeholder has the context-parallel si"),
        (((1, 3, 4), (1, 3, 4), (1, 3, 4), (1, 1, 4)), "the context-parallel size 3 is none of 1,"),
        (((1, 2, 4), (1, 1, 4), (1, 1, 4), (1, 1, 4)), "ranks 0 to 1 must share its micro-batch"),
        (((1, 1, 4), (1, 2, 4), (1, 1, 4), (1, 1, 4)), "must share what rank 0 has there, 2 ranks"),
        (((1, 2, 4),) * 3, "there must be a size for each micro-batch"),
        (None, "but context-parallel sizes are left out"),
    ],
)
def test_blocks_that_do_not_agree_are_refused(sizes: object, fault: str) -> None:
    with pytest.raises(InvariantError, match=fault) as caught:
        validate_plan(replace(STEP, context_parallel=sizes), LENGTHS)  # type: ignore[arg-type]
    assert caught.value.invariant == "blocks"


def test_only_a_sample_over_every_cap_may_be_over_that_of_its_row() -> None:
    alone = replace(
        STEP,
        micro_batches=tuple(((sample,),) for sample in range(4)),
        num_microbatches=1,
        context_parallel=((1,),) * 4,
    )
    validate_plan(alone, [129, 9, 7, 3])
    with pytest.raises(InvariantError, match="samples 0 take 128 padded tokens, the cap is 32"):
        validate_plan(alone, [128, 9, 7, 3])


def test_beside_a_placeholder_only_a_shared_row_may_hold_two_samples() -> None:
    shared = replace(
        STEP,
        micro_batches=(((1, 3), (2,), (0,)), ((1, 3), (), (0,)), ((), (), (0,)), ((), (), (0,))),
        context_parallel=((2, 1, 4), (2, 1, 4), (1, 1, 4), (1, 1, 4)),
    )
    validate_plan(shared, LENGTHS)
    own = replace(
        STEP,
        micro_batches=(((2, 3), (), (0,)), ((), (), (0,)), ((), (1,), (0,)), ((), (1,), (0,))),
        context_parallel=((1, 1, 4), (1, 1, 4), (1, 2, 4), (1, 2, 4)),
    )
    with pytest.raises(InvariantError, match="slot 1 is a placeholder, but samples 2, 3 share"):
        validate_plan(own, LENGTHS)


def test_sizes_are_powers_of_two_and_all_ranks() -> None:
    assert ParallelDims(data_parallel=6, context_parallel=2).row_sizes(12) == (1, 2, 4, 12)
    assert ParallelDims(data_parallel=6).row_sizes(4) == (1, 2)
    assert ParallelDims(data_parallel=8).row_sizes(8) == (1, 2, 4, 8)
    assert ParallelDims(context_parallel=3).row_sizes(3) == (1, 3)


def test_a_sample_gets_no_less_than_its_length_needs() -> None:
    step = plan_step([*LENGTHS, 500], DIMS, CONFIG)
    least = {row.samples[0]: row.size for row in step.rows() if row.size > 1}
    assert least[0] == 4
    assert least[1] >= 2
    assert least[4] == 4
    with pytest.raises(
        OversizeSampleError, match=r"set max_tokens_per_gpu \(--max-tokens-per-gpu\) to 126 or more"
    ) as caught:
        plan_step([*LENGTHS, 500], DIMS, replace(CONFIG, on_oversize="error"))
    assert (caught.value.index, caught.value.cap) == (4, 128)


def long_tailed(count: int, seed: int = 3) -> list[int]:
    generator = random.Random(seed)
    return [int(500 * generator.lognormvariate(0, 1.4)) + 1 for _ in range(count)]


LAYOUTS = [
    ParallelDims(data_parallel=4, pipeline_parallel=2),
    ParallelDims(data_parallel=4, context_parallel=2, pipeline_parallel=3),
    ParallelDims(data_parallel=4, pipeline_parallel=2, virtual_pipeline=2),
    ParallelDims(data_parallel=4, pipeline_parallel=2, expert_parallel=2),
    ParallelDims(data_parallel=8),
]


def test_a_long_sample_gets_more_ranks_than_it_needs() -> None:
    """Alone it would hold the step back on its way through the stages."""
    lengths, dims = [*long_tailed(60), 30_000], ParallelDims(data_parallel=4, pipeline_parallel=4)
    config = PlannerConfig(max_tokens_per_gpu=30_000, max_context_parallel=4, plan_effort=100)
    step = plan_step(lengths, dims, config)
    (longest,) = [row for row in step.rows() if 60 in row.samples]
    assert longest.size == 4
    without = plan_step(lengths, dims, replace(config, max_context_parallel=None))
    sooner = predicted_step_time(without, lengths) / predicted_step_time(step, lengths)
    assert sooner > 2.0


def test_a_size_without_room_for_a_token_is_left_out() -> None:
    """A token on two ranks is padded to 4 tokens, more than the cap of both."""
    config = PlannerConfig(max_tokens_per_gpu=1, max_context_parallel=2)
    step = plan_step([0], ParallelDims(data_parallel=2), config)
    assert step.context_parallel == ((1,), (1,))
