"""Plans by the first guess of a model's costs, and pipelines whose last stage is slow."""

from __future__ import annotations

from dataclasses import replace

import pytest
from bench_model_costs import CONFIG, DIMS, FAMILIES, LENGTHS, ends_of, mooncake
from best_known import SEEDS, SLOW, cases, known, layout_name, slow_last_stage

from mcore_batching.planning import PlannerConfig, plan_step, predicted_step_time
from mcore_batching.planning.costs.layer_costs import LayerCost, cost_model, costs_of_chunks

needs_trace = pytest.mark.skipif(not LENGTHS.exists(), reason="the trace is not here")


@needs_trace
@pytest.mark.parametrize("family", FAMILIES)
def test_the_first_guess_plans_as_well_as_true_costs(family: str) -> None:
    ends = ends_of(FAMILIES[family], mooncake())
    assert ends["first guess"] <= 1.01 * ends["true"]


@pytest.mark.parametrize(
    ("name", "most"), {"azure_conv": 1.01, "mooncake_conv": 1.01, "code-like": 1.006}.items()
)
def test_a_slow_last_stage_is_planned_nearly_as_well_as_by_a_long_search(
    name: str, most: float
) -> None:
    """Mean of three draws; the long search is annealing of 3·10⁶ moves, of code-like lengths with
    less to gain."""
    of_name = [case for case in cases(LENGTHS.parent) if case[0].name == name + SLOW]
    if not of_name:
        pytest.skip("the trace is not here")
    ((source, samples, dims),) = of_name
    over = 0.0
    for seed in SEEDS:
        lengths, cap = source.draw(samples, seed)
        config = PlannerConfig(max_tokens_per_gpu=cap)
        end = predicted_step_time(plan_step(lengths, dims, config, slow_last_stage()), lengths)
        over += end / known()[source.name, samples, layout_name(dims), seed][0]
    assert over / len(SEEDS) <= most


@needs_trace
def test_plans_that_know_of_a_slow_last_stage_end_sooner() -> None:
    """32 layers of a 7B dense model; the output layer makes the last stage 1.5 times the mean."""
    lengths, output = mooncake(), 0.6 * 32 / 3.0
    layer = LayerCost(1.0, 1 / 24576, 1 / 24576, 1.0)
    model = cost_model("a" * 32 + "V", {"a": layer, "V": LayerCost(output, 0.0, 0.0, 1.0)})
    kinds, ((_,), *_, (last,)) = costs_of_chunks(model, DIMS)
    assert kinds[last].linear == pytest.approx(1.5, abs=0.01)
    found = predicted_step_time(plan_step(lengths, DIMS, CONFIG, model), lengths)
    blind = plan_step(lengths, DIMS, CONFIG, replace(model, layers="", layer_costs=()))
    assert found < 0.9 * predicted_step_time(blind, lengths, model)
