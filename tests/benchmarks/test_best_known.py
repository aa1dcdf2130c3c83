"""Plans stay near the best known ones, whose clock is that of a pipeline played pass by pass, and
none ends before the bound: every plan of tiny problems is tried."""

from __future__ import annotations

import itertools
import random

import pytest
from benchmark_cases import DATA, mean, timed_plan
from best_known import SEEDS, Case, cases, known_ends, played_end
from hypothesis import given
from planning_cases import Case as PlanningCase
from planning_cases import cases as planning_cases
from planning_cases import examples, planned
from step_bound import step_time_bound

from mcore_batching.planning import (
    CostModel,
    ParallelDims,
    PlannerConfig,
    Problem,
    predicted_step_time,
)
from mcore_batching.planning.clock import Clock
from mcore_batching.planning.packing.bounds import step_time_floor

MOST = {
    ("azure_conv", 128): 1.012,
    ("code-like", 512): 1.003,
    ("heavy-tailed", 512): 1.007,
    ("truncated reasoning", 256): 1.006,
    ("uniform", 256): 1.013,
    ("code-like, slow last stage", 512): 1.01,
    ("σ 1.3 uncut, dynamic CP", 512): 1.009,
}
"""Mean of three draws over the best known ends."""
CASES = [case for case in cases(DATA) if (case.name, case.samples) in MOST]
ROUNDING = 1 + 1e-9


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}-{case.samples}")
def test_plans_end_hardly_later_than_the_best_known(case: Case) -> None:
    over, ends = [], known_ends()
    for seed in SEEDS:
        problem = case.problem(seed)
        step, _ = timed_plan(problem.lengths, case.dims, problem.config, case.model)
        end = predicted_step_time(step, problem.lengths)
        assert played_end(problem, step) == pytest.approx(end, rel=1e-9)
        over.append(end / ends[case.draw(seed)][0])
    assert mean(over) <= MOST[case.name, case.samples]


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
                best = min(best, max(Clock(each, problem.schedule).end for each in of_ranks))
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
    assert step_time_floor(problem) <= step_time_bound(problem) <= best * ROUNDING


@examples(60)
@given(planning_cases(fill=("split",)))
def test_no_plan_ends_sooner(case: PlanningCase) -> None:
    step = planned(case)
    problem = Problem.of(case.lengths, case.dims, case.config)
    end = predicted_step_time(step, case.lengths)
    assert step_time_floor(problem) <= step_time_bound(problem) <= end * ROUNDING
