"""Assignment over ranks and slots."""

from __future__ import annotations

from mcore_batching.planning import (
    CostModel,
    ParallelDims,
    PlannerConfig,
    Problem,
    StepPlan,
    plan_step,
)
from mcore_batching.planning.placement import largest_first, place

PROPORTIONAL = CostModel(quadratic=0, per_micro_batch=0)


def loads(step: StepPlan, lengths: list[int]) -> list[int]:
    return sorted(sum(lengths[s] for slot in rank for s in slot) for rank in step.micro_batches)


def test_ranks_are_evened_out_by_cost() -> None:
    lengths = [30, 29, 28, 27, 26, 25, 24, 23]
    step = plan_step(
        lengths, ParallelDims(data_parallel=2), PlannerConfig(max_tokens_per_gpu=40), PROPORTIONAL
    )
    assert loads(step, lengths) == [106, 106]
    dealt = plan_step(
        lengths,
        ParallelDims(data_parallel=2),
        PlannerConfig(max_tokens_per_gpu=40, balance="none"),
        PROPORTIONAL,
    )
    assert dealt.micro_batches == (((0,), (2,), (4,), (6,)), ((1,), (3,), (5,), (7,)))
    assert loads(dealt, lengths) == [104, 108]


def test_a_rank_may_take_more_micro_batches_where_that_evens_out_ranks() -> None:
    """In folds of two the rank of the 5 gets two of the 1s, at least."""
    lengths = [5, 1, 1, 1, 1, 1]
    config = PlannerConfig(max_tokens_per_gpu=5)
    problem = Problem.of(lengths, ParallelDims(data_parallel=2), config, PROPORTIONAL)
    ranks = place(problem, [(sample,) for sample in range(6)], 5)
    assert sorted(len(list(filter(None, rank))) for rank in ranks) == [1, 5]


def test_a_rank_in_lockstep_does_not_end_with_a_placeholder_for_the_largest_to_come_first() -> None:
    dims = ParallelDims(data_parallel=2, expert_parallel=2)
    problem = Problem.of([10, 50, 60], dims, PlannerConfig(max_tokens_per_gpu=100))
    ranks = (((0,), (1,)), ((), (2,)))
    assert largest_first(problem, ranks) == ranks


def test_in_lockstep_the_slot_with_the_largest_micro_batch_comes_first_on_all_ranks() -> None:
    dims = ParallelDims(data_parallel=2, expert_parallel=2)
    problem = Problem.of([40, 50, 10, 60, 30, 45], dims, PlannerConfig(max_tokens_per_gpu=100))
    ranks = (((0,), (2,), (4,)), ((1,), (3,), (5,)))
    assert largest_first(problem, ranks) == (((2,), (0,), (4,)), ((3,), (1,), (5,)))
