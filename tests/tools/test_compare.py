"""The comparison with plainer modes and other frameworks' rules, as a library and as a command."""

from __future__ import annotations

import functools
import math
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest

from mcore_batching.planning import (
    ConfigError,
    CostModel,
    LengthError,
    OversizeSampleError,
    ParallelDims,
    PlannerConfig,
    PlanningError,
    plan_step,
    predicted_step_time,
    step_statistics,
    validate_plan,
)
from mcore_batching.tools import compare
from mcore_batching.tools.cli import main
from mcore_batching.tools.rules import RULES

GENERATOR = random.Random(0)
LENGTHS = [min(900, round(GENERATOR.lognormvariate(5, 1))) for _ in range(64)]
STEPS = [LENGTHS[:32], LENGTHS[32:]]
DIMS, DP2 = ParallelDims(data_parallel=2, pipeline_parallel=2), ParallelDims(data_parallel=2)
CP4 = ParallelDims(data_parallel=2, pipeline_parallel=4, context_parallel=4)
CONFIG = PlannerConfig(max_tokens_per_gpu=1000, plan_effort=100)
SMALL = PlannerConfig(max_tokens_per_gpu=100, plan_effort=10)
LONG = PlannerConfig(max_tokens_per_gpu=40_000, plan_effort=1)
SHARED = ParallelDims(data_parallel=4, pipeline_parallel=2)
DYNAMIC = PlannerConfig(max_tokens_per_gpu=20_000, max_context_parallel=4, plan_effort=30)
SHARED_LENGTHS = [*LENGTHS[:40], 20_000]
MODEL = CostModel(per_micro_batch=200.0)

CASES = {
    "usual": (STEPS, DIMS, CONFIG),
    "a high cap": (STEPS, DIMS, replace(CONFIG, max_tokens_per_gpu=4000)),
    # Under a cap below 4000 verl has no plan for the second step, and ends the first sooner.
    "no plan below": (
        [[1000] * 32, [1000] * 14 + [4000] * 2],
        DIMS,
        replace(SMALL, max_tokens_per_gpu=10_000),
    ),
    "no plan for one": ([[20, 30, 40], [20, 30, 40, 50]], DP2, SMALL),
    "no plan": ([[5] * 3], DP2, SMALL),
    # A micro-batch holds the cap on each of its ranks: a best one may be below the mean length.
    "long rows": ([[4000] * 64], CP4, LONG),
    "long shared rows": ([[4000] * 64], CP4, replace(LONG, max_context_parallel=8)),
    "shared rows": ([SHARED_LENGTHS], SHARED, DYNAMIC),
} | {
    # The rule's own size is above the largest, or no row can have it on so many ranks.
    f"{ranks} x {context} ranks, rows on {most}": (
        [[5000, 1091, 590, 554, 1131, 524]],
        ParallelDims(data_parallel=ranks, context_parallel=context),
        PlannerConfig(max_tokens_per_gpu=4096, max_context_parallel=most, plan_effort=1),
    )
    for ranks, context, most in [(2, 4, 2), (4, 3, 2), (3, 1, 3)]
}


@functools.cache
def outcomes_of(name: str) -> dict[str, compare.Outcome]:
    return {each.name: each for each in compare.compare(*CASES[name], MODEL)}


def ends_of(planner: compare.Planner, name: str, cap: int | None) -> list[float]:
    """Predicted ends of a case's steps as planned under a cap; infinite where there is no plan."""
    (steps, _, config), ends = CASES[name], []
    for lengths in steps:
        try:
            plan = planner.plan(lengths, replace(config, max_tokens_per_gpu=cap))
            ends.append(predicted_step_time(plan, lengths, planner.cost_model))
        except PlanningError:
            ends.append(math.inf)
    return ends


@pytest.mark.parametrize("name", CASES)
def test_outcomes_are_those_of_the_planners_own_plans(name: str) -> None:
    """At the given cap, and at the best below, under which it has as many; all weighed alike."""
    (_, dims, config), found = CASES[name], outcomes_of(name)
    cap, every = config.max_tokens_per_gpu, list(compare.planners(dims, config, MODEL, RULES))
    assert list(found) == [planner.name for planner in every]
    ours = ends_of(every[0], name, cap)
    for planner in every:
        outcome, given = found[planner.name], ends_of(planner, name, cap)
        assert outcome.planned == sum(map(math.isfinite, given))
        assert outcome.is_rule == (planner.name in RULES)
        if not outcome.planned:
            continue
        best = ends_of(planner, name, outcome.best_cap)
        for ends, over in (
            (given, outcome.time_over_ours),
            (best, outcome.time_over_ours_at_best_cap),
        ):
            both = [end / own for end, own in zip(ends, ours, strict=True) if math.isfinite(end)]
            assert len(both) == outcome.planned
            assert over == pytest.approx(sum(both) / len(both))
            assert over >= 1 - 1e-9 or name != "usual"
        assert sum(best) <= sum(given)
        # A search takes fewer tokens than the cap allows anyway: no smaller one is tried.
        fills_up = planner.rule is not None or not replace(config, **planner.changes).searches
        assert fills_up or outcome.best_cap == cap


def test_what_caps_are_best_and_what_figures_of_our_own_plans_are() -> None:
    theirs = outcomes_of("a high cap")["first-fit in order"]
    assert theirs.time_over_ours
    assert theirs.time_over_ours_at_best_cap
    assert theirs.time_over_ours_at_best_cap < 0.9 * theirs.time_over_ours
    assert max(LENGTHS) <= (theirs.best_cap or 0) < 4000
    for name in ("long rows", "long shared rows"):
        assert (outcomes_of(name)["first-fit in order"].best_cap or math.inf) < 4000
    assert (outcomes_of("no plan below")["verl 0.9"].best_cap or 0) >= 4000
    ours = outcomes_of("usual")[compare.OURS]
    made = [step_statistics(plan_step(each, DIMS, CONFIG, MODEL), each) for each in STEPS]
    assert ours.time_over_floor == pytest.approx(sum(s.time_over_floor for s in made) / 2)
    assert ours.num_microbatches == sum(s.num_microbatches for s in made) / 2
    assert (ours.planning_seconds or 0) > 0


def test_a_rule_without_a_plan_is_listed_with_its_reason() -> None:
    found = outcomes_of("no plan for one")
    reason = "3 samples do not divide by 2; pass a multiple of 2"
    assert str(found["verl 0.9"].failure) == reason
    assert found["verl 0.9"].time_over_floor is not None
    lines = compare.summary([*found.values()])
    assert f"verl 0.9 has no plan for 1 of 2 steps: {reason}" in lines
    assert not lines[0].startswith("of the other frameworks' rules at their own best caps verl")
    never = outcomes_of("no plan")["verl 0.9"]
    assert compare.table_row(never) == ("verl 0.9", "0/1", *["-"] * 6)
    # A plan with too many samples in a micro-batch is none.
    bounded = compare.compare([[10] * 24], DP2, replace(SMALL, max_samples_per_row=3))
    assert [each.name for each in bounded if not each.is_rule and each.planned == 0] == []
    (verl,) = (each for each in bounded if each.name == "verl 0.9")
    assert (verl.planned, str(verl.failure)) == (
        0,
        "its plan has 6 samples in a micro-batch, max_samples_per_row "
        "(--dynamic-batch-max-samples-per-row) is 3",
    )


def test_summary_names_the_best_rule_at_the_given_cap_and_at_its_own() -> None:
    outcomes = [*outcomes_of("usual").values()]
    peers = [o for o in outcomes if o.is_rule and o.time_over_ours]
    best = min(peers, key=lambda o: (o.time_over_ours, o.name))
    tuned = min(peers, key=lambda o: (o.time_over_ours_at_best_cap, o.name))
    line = compare.summary(outcomes)[0]
    at = f"at {tuned.time_over_ours_at_best_cap:.3f} x the time"
    assert f"{tuned.name} under {tuned.best_cap} ends soonest, {at}" in line
    assert f"at the given cap {best.name}, at {best.time_over_ours:.3f} x" in line


def test_steps_are_cut_in_order_and_settings_that_have_no_plan_are_no_ones_failure() -> None:
    assert compare.consecutive_steps([3, 4, 5], None) == [[3, 4, 5]]
    assert compare.consecutive_steps([3, 4, 5], 2) == [[3, 4], [5]]
    with pytest.raises(LengthError, match="lengths holds no length"):
        compare.consecutive_steps([], None)
    for options in ({"max_tokens_per_gpu": 1}, {"max_tokens_per_gpu": 9, "plan_effort": 10**9}):
        with pytest.raises(ConfigError, match=[*options][-1]):
            compare.compare([[5]], ParallelDims(context_parallel=2), PlannerConfig(**options))


def test_planners_under_dynamic_cp_have_one_size_for_all() -> None:
    """The rules the largest that rows may have up to the dims'."""
    made = {each.name: each for each in compare.planners(SHARED, DYNAMIC, MODEL, {})}
    for size in (1, 2, 4):
        planner = made[f"CP {size} for all"]
        fixed = planner.plan(SHARED_LENGTHS, DYNAMIC)
        validate_plan(fixed, SHARED_LENGTHS)
        assert (fixed.dims, fixed.cost_model) == (SHARED.for_rows_on(size), MODEL.on_ranks(size))
        validate_plan(planner.plan([5], DYNAMIC), [5])
        if size < 4:
            with pytest.raises(OversizeSampleError):
                planner.plan(SHARED_LENGTHS, replace(DYNAMIC, max_tokens_per_gpu=5000))
    for dims, most, size in ((CP4, 2, 2), (SHARED, 4, 1)):
        config = replace(DYNAMIC, max_context_parallel=most)
        *_, rule = compare.planners(dims, config, MODEL, RULES)
        assert (rule.dims, rule.cost_model) == (dims.for_rows_on(size), MODEL.on_ranks(size))
        assert rule.plan([500] * 64, config).config.max_context_parallel is None
    assert not any("CP" in name for name in outcomes_of("usual"))


COMMAND = "--max-tokens-per-gpu 1000 --dp 2 --pp 2 --samples-per-step 16 --plan-effort 20"


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text("\n".join(map(str, LENGTHS)))

    def printed(*others: str) -> list[str]:
        assert main(["compare", str(path), *COMMAND.split(), *others]) == 0
        return capsys.readouterr().out.splitlines()

    lines = printed()
    assert lines[0] == "4 steps of 16 samples, DP2 x PP2, cap 1000 tokens"
    columns = [column.strip() for column in re.split("  +", lines[1].strip())]
    assert columns[2:5] == ["time/ours, given cap", "own best cap", "time/ours, own best cap"]
    steps = compare.consecutive_steps(LENGTHS, 16)
    ours, *_ = compare.compare(steps, DIMS, replace(CONFIG, plan_effort=20))
    (line,) = [line for line in lines if line.split()[:1] == ["mcore_batching"]]
    assert line.split()[1:6] == ["4/4", "1.000", "1000", "1.000", f"{ours.time_over_floor:.3f}"]
    # A rule's own best cap is per GPU, and so is the heading's second one.
    heading = "4 steps of 16 samples, DP2 x PP2 x CP2, cap 1000 tokens, 500 per GPU"
    assert printed("--max-tokens-per-gpu", "500", "--cp", "2")[0] == heading
    refused = "set max_tokens_per_gpu (--max-tokens-per-gpu) so that every sample fits"
    assert refused in "\n".join(printed("--max-tokens-per-gpu", "800"))
