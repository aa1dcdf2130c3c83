"""No plan ends sooner than the bound: every plan of tiny problems is tried."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from planning_cases import Case, cases, examples, planned
from step_bound import step_time_bound

from mcore_batching.planning import (
    CostModel,
    ParallelDims,
    PlannerConfig,
    Problem,
)
from mcore_batching.planning.clock import Clock
from mcore_batching.planning.packing.bounds import step_time_floor, way_of_longest
from mcore_batching.planning.plans.statistics import predicted_step_time
from mcore_batching.planning.schedule import Schedule

ROUNDING = 1 + 1e-9


def latest_end(problem: Problem, costs_of_ranks: Sequence[Sequence[float]]) -> float:
    """The end of the latest rank, were no rank to wait for another."""
    schedule = Schedule(
        dims=problem.dims,
        backward_ratio=problem.cost_model.backward_ratio,
        forward_only=problem.forward_only,
    )
    return max(Clock(costs, schedule).end for costs in costs_of_ranks)


def best_of_all_plans(problem: Problem) -> float:
    """The end of the plan that ends first, whatever it leaves empty, under the cap."""
    ranks, best = problem.dims.data_parallel, float("inf")
    samples = range(problem.num_samples)
    for count in range(1, problem.num_samples + 1):
        # The first sample on the first rank: which is which does not matter.
        others = [range(ranks * count)] * (problem.num_samples - 1)
        for places in itertools.product(range(count), *others):
            slots = [[i for i in samples if places[i] == place] for place in range(ranks * count)]
            if all(problem.row_tokens(row) <= problem.capacity for row in slots):
                costs = [problem.cost(row) for row in slots]
                firsts = range(0, ranks * count, count)
                of_ranks = [costs[first : first + count] for first in firsts]
                best = min(best, latest_end(problem, of_ranks))
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
    assert way_of_longest(problem) <= best * ROUNDING
    assert step_time_floor(problem) <= step_time_bound(problem) <= best * ROUNDING


@pytest.mark.parametrize("ratio", [0.5, 1.0, 2.0])
@pytest.mark.parametrize(("count", "stages"), [(1, 4), (2, 4), (3, 2), (4, 4), (9, 4), (7, 1)])
def test_the_way_of_the_longest_sample_counts_what_is_beside_it(
    count: int, stages: int, ratio: float
) -> None:
    """Micro-batches of next to nothing, the fewest that there can be."""
    dims, config = ParallelDims(pipeline_parallel=stages), PlannerConfig(max_tokens_per_gpu=1000)
    model = CostModel(linear=1e-9, quadratic=1.0, per_micro_batch=10.0, backward_ratio=ratio)
    problem = Problem.of([1000] + [1] * 1000 * (count - 1), dims, config, model)
    costs = [[10.0] * count for _ in range(count)]
    for place, slots in enumerate(costs):
        slots[place] += problem.costs[0]
    best = min(latest_end(problem, [slots]) for slots in costs)
    alone = (1 + ratio) * stages * problem.costs[0]
    assert alone + 0.8 * (best - alone) < way_of_longest(problem) <= best * ROUNDING


@examples(60)
@given(cases(fill=("split",)))
def test_no_plan_ends_sooner(case: Case) -> None:
    step = planned(case)
    problem = Problem.of(case.lengths, case.dims, case.config)
    end = predicted_step_time(step, case.lengths)
    assert step_time_floor(problem) <= step_time_bound(problem) <= end * ROUNDING
