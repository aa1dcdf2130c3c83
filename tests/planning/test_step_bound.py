"""No plan ends sooner than the bound: every plan of tiny problems is tried."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from planning_cases import Case, cases, examples

from mcore_batching.planning import CostModel, ParallelDims, PlannerConfig, Problem, plan_step
from mcore_batching.planning.bounds import step_time_floor
from mcore_batching.planning.pipeline import pipeline_time
from mcore_batching.planning.statistics import predicted_step_time
from mcore_batching.planning.step_bound import best_weights, step_time_bound


def best_of_all_plans(problem: Problem) -> float:
    """The end of the plan that ends first, whatever it leaves empty, under the cap."""
    ranks, best = problem.dims.data_parallel, float("inf")
    samples = range(problem.num_samples)
    for count in range(1, problem.num_samples + 1):
        for places in itertools.product(range(ranks * count), repeat=problem.num_samples):
            slots = [[i for i in samples if places[i] == place] for place in range(ranks * count)]
            if any(problem.row_tokens(row) > problem.capacity for row in slots):
                continue
            costs = [problem.cost(row) for row in slots]
            ends = [
                pipeline_time(
                    costs[first : first + count],
                    problem.dims,
                    backward_ratio=problem.cost_model.backward_ratio,
                    forward_only=problem.forward_only,
                )
                for first in range(0, ranks * count, count)
            ]
            best = min(best, max(ends))
    return best


@pytest.mark.parametrize("seed", range(28))
def test_no_plan_of_a_tiny_problem_ends_sooner(seed: int) -> None:
    generator = random.Random(seed)
    ranks, count = generator.choice([(1, 4), (2, 3), (1, 3), (3, 3)])
    problem = Problem.of(
        [generator.randint(1, 1000) for _ in range(count)],
        ParallelDims(data_parallel=ranks, pipeline_parallel=generator.choice([1, 2, 3, 4])),
        PlannerConfig(max_tokens_per_gpu=generator.choice([1000, 1500, 4000])),
        CostModel(
            per_micro_batch=generator.choice([0.0, 10.0, 300.0]),
            backward_ratio=generator.choice([1.0, 2.0, 3.0]),
        ),
        forward_only=generator.random() < 0.2,
    )
    best = best_of_all_plans(problem)
    assert step_time_floor(problem) <= step_time_bound(problem) <= best * (1 + 1e-9)


@pytest.mark.parametrize(
    ("stages", "count", "least"),
    [(1, 5, 1.0), (2, 8, 1.0682), (4, 8, 1.2738), (4, 16, 1.1085), (8, 9, 1.6482)],
)
def test_weights_are_those_of_the_linear_program(stages: int, count: int, least: float) -> None:
    """As another solver finds them, over the work of all passes; each slot counts as much."""
    smallest, whole = best_weights(count, stages, 2.0)
    assert smallest / 3 == pytest.approx(least, rel=5e-3)
    assert whole >= count * smallest * (1 - 1e-9)


@examples(60)
@given(cases(fill=("split",)))
def test_no_plan_ends_sooner(case: Case) -> None:
    step = plan_step(case.lengths, case.dims, case.config, owners=case.owners)
    problem = Problem.of(case.lengths, case.dims, case.config)
    end = predicted_step_time(step, case.lengths)
    assert step_time_floor(problem) <= step_time_bound(problem) <= end * (1 + 1e-9)
