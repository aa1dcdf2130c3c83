"""Plans under dynamic CP: explained, compared, and made on the command line."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path

import pytest

from mcore_batching.planning import (
    CostModel,
    OversizeSampleError,
    ParallelDims,
    Plan,
    PlannerConfig,
    WeighedStep,
    plan_step,
    predicted_step_time,
    step_statistics,
    validate_plan,
)
from mcore_batching.tools.cli import main
from mcore_batching.tools.compare import compare, one_size
from mcore_batching.tools.explain import explain
from mcore_batching.tools.rules import RULES, rule_plan

GENERATOR = random.Random(4)
LENGTHS = [int(GENERATOR.lognormvariate(6, 1)) + 1 for _ in range(40)] + [20_000]
DIMS = ParallelDims(data_parallel=4, pipeline_parallel=2)
CONFIG = PlannerConfig(max_tokens_per_gpu=20_000, max_context_parallel=4, plan_effort=30)
STEP = plan_step(LENGTHS, DIMS, CONFIG)


def test_explain_counts_micro_batches_by_their_ranks() -> None:
    said = explain(STEP, LENGTHS, advice_seconds=0)
    assert "41 samples on 4 ranks: " in said
    shared = sum(row.size == 4 for row in STEP.rows())
    assert re.search(rf"micro-batches by context-parallel size: .*{shared} of size 4$", said, re.M)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_one_size_for_all(size: int) -> None:
    fixed = one_size(size, DIMS, STEP.cost_model, LENGTHS, CONFIG)
    validate_plan(fixed, LENGTHS)
    problem = WeighedStep.of(STEP, LENGTHS).problem
    rows = problem.on_ranks[size]
    assert (fixed.dims, fixed.cost_model) == (rows.dims, rows.cost_model)
    assert fixed.num_samples == len(LENGTHS)
    validate_plan(one_size(size, DIMS, STEP.cost_model, [5], CONFIG), [5])
    if size < 4:
        small = replace(CONFIG, max_tokens_per_gpu=5000)
        with pytest.raises(OversizeSampleError):
            one_size(size, DIMS, STEP.cost_model, LENGTHS, small)


def test_statistics_count_a_shared_row_once() -> None:
    found = step_statistics(STEP, LENGTHS)
    assert found.real_tokens == sum(LENGTHS)
    rows = [row for row in STEP.rows() if row.samples]
    problem = WeighedStep.of(STEP, LENGTHS).problem
    assert found.padded_tokens == sum(
        sum(problem.on_ranks[row.size].tokens[i] for i in row.samples) for row in rows
    )
    assert found.offered_tokens == 4 * STEP.num_microbatches * 20_000
    assert found.num_placeholders == sum(not row.samples for row in STEP.rows())
    assert found.largest_row_tokens < 20_000
    assert found.time_over_floor >= 1.0


def test_compare_has_every_size() -> None:
    outcomes = {o.name: o for o in compare([LENGTHS], DIMS, CONFIG)}
    for name in ("CP 1 for all", "CP 2 for all", "CP 4 for all"):
        other = outcomes[name].time_over_ours
        assert other is not None
        assert other >= 1 - 1e-9
        # The search takes fewer tokens than the cap allows anyway: no smaller one is tried.
        assert outcomes[name].best_cap == CONFIG.max_tokens_per_gpu
    # The rules have the largest size of rows up to the dims'.
    model, dims = CostModel(per_micro_batch=7.0), ParallelDims(context_parallel=4)
    config, lengths = replace(CONFIG, max_context_parallel=2), LENGTHS[:40]
    found = {o.name: o for o in compare([lengths], dims, config, model)}
    end = predicted_step_time(plan_step(lengths, dims, config, model), lengths)
    fixed, shared = replace(config, max_context_parallel=None), dims.for_rows_on(2)
    for name, rule in RULES.items():
        plan = rule_plan(rule, lengths, shared, fixed)
        theirs = predicted_step_time(plan, lengths, model.on_ranks(2))
        assert found[name].time_over_ours == pytest.approx(theirs / end)
    without = {o.name for o in compare([[5, 6]], DIMS, replace(CONFIG, max_context_parallel=None))}
    assert not any("CP" in name for name in without)


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text("\n".join(map(str, LENGTHS)))
    options = ["--max-tokens-per-gpu", "20000", "--dp", "4", "--pp", "2", "--plan-effort", "30"]
    plan = tmp_path / "plan.json"
    assert main(["plan", str(path), *options, "--dynamic-cp", "4", "--out", str(plan)]) == 0
    said = capsys.readouterr().out
    assert "DP4 x PP2, dynamic CP to 4, cap 20000 tokens per rank" in said
    assert Plan.from_json(plan.read_text()).steps == (STEP,)
    assert main(["check", str(plan), str(path)]) == 0
    several = [*options, "--dynamic-cp", "4", "--samples-per-step", "20", "--out", str(plan)]
    assert main(["plan", str(path), *several]) == 0
    assert len(Plan.from_json(plan.read_text()).steps) == 3
