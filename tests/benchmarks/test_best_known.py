"""The planner stays near the best known plans, and its clock is that of a pipeline played pass by
pass."""

from __future__ import annotations

import pytest
from benchmark_cases import DATA, mean, timed_plan
from best_known import SEEDS, Case, cases, known_ends, played_end

from mcore_batching.planning import predicted_step_time

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
