"""The planner stays near the best known plans, and its clock is that of a pipeline played pass by
pass."""

from __future__ import annotations

import pytest
from benchmark_cases import DATA, layout_name, mean, timed_plan
from best_known import SEEDS, cases, known, played_end

from mcore_batching.planning import PlannerConfig, Problem, predicted_step_time

MOST = {
    ("azure_conv", 128): 1.012,
    ("code-like", 512): 1.003,
    ("heavy-tailed", 512): 1.007,
    ("truncated reasoning", 256): 1.006,
    ("uniform", 256): 1.013,
    ("code-like, slow last stage", 512): 1.01,
}
"""Mean of three draws over the best known ends."""
CASES = [case for case in cases(DATA) if (case[0].name, case[1]) in MOST]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0].name}-{case[1]}")
def test_plans_end_hardly_later_than_the_best_known(case: tuple) -> None:
    source, samples, dims, model = case
    over, ends = [], known()
    for seed in SEEDS:
        lengths, cap = source.draw(samples, seed)
        config = PlannerConfig(max_tokens_per_gpu=cap)
        step, _ = timed_plan(lengths, dims, config, model)
        end = predicted_step_time(step, lengths)
        problem = Problem.of(lengths, dims, config, model)
        assert played_end(problem, step) == pytest.approx(end, rel=1e-9)
        over.append(end / ends[source.name, samples, layout_name(dims), seed][0])
    assert mean(over) <= MOST[source.name, samples]
