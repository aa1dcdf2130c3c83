"""The comparison with plainer modes and other frameworks' rules, as a library and as a command."""

from __future__ import annotations

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
    plan_step,
    predicted_step_time,
    step_statistics,
    validate_plan,
)
from mcore_batching.tools import compare
from mcore_batching.tools.cli import main
from mcore_batching.tools.rules import RULES, rule_plan

GENERATOR = random.Random(0)
LENGTHS = [min(900, round(GENERATOR.lognormvariate(5, 1))) for _ in range(64)]
STEPS = [LENGTHS[:32], LENGTHS[32:]]
DIMS = ParallelDims(data_parallel=2, pipeline_parallel=2)
CONFIG = PlannerConfig(max_tokens_per_gpu=1000, plan_effort=100)
COSTS = CostModel()
CONFIG_OF_100 = PlannerConfig(max_tokens_per_gpu=100, plan_effort=10)


@pytest.fixture(scope="module")
def outcomes() -> list[compare.Outcome]:
    return compare.compare(STEPS, DIMS, CONFIG)


def by_name(outcomes: list[compare.Outcome], name: str) -> compare.Outcome:
    return next(outcome for outcome in outcomes if outcome.name == name)


def test_everyone_is_on_the_table_once_and_none_ends_before_ours(
    outcomes: list[compare.Outcome],
) -> None:
    modes = [f"mcore_batching, balance {balance}" for balance in ("cost", "tokens", "none")]
    assert [outcome.name for outcome in outcomes] == ["mcore_batching", *modes, *RULES]
    assert [outcome.is_rule for outcome in outcomes] == [False] * 4 + [True] * len(RULES)
    assert {outcome.steps for outcome in outcomes} == {2}
    assert len({by_name(outcomes, mode).time_over_floor for mode in modes}) == 3
    ours, *others = outcomes
    made = [step_statistics(plan_step(each, DIMS, CONFIG), each) for each in STEPS]
    assert ours.time_over_floor == pytest.approx(sum(s.time_over_floor for s in made) / 2)
    assert ours.num_microbatches == sum(s.num_microbatches for s in made) / 2
    assert (ours.time_over_ours, ours.best_cap, ours.time_over_ours_at_best_cap) == (1, 1000, 1)
    assert (ours.planning_seconds or 0) > 0
    assert all(other.time_over_ours >= 1 for other in others if other.time_over_ours)


def test_a_rule_is_shown_at_the_given_cap_and_at_its_own_best_below() -> None:
    """Weighed under the given cap, whatever cap it was planned under."""
    config = replace(CONFIG, max_tokens_per_gpu=4000)
    found = compare.compare(STEPS, DIMS, config)
    ends = [predicted_step_time(plan_step(step, DIMS, config), step) for step in STEPS]

    def over_ours(cap: int) -> float:
        under = replace(config, max_tokens_per_gpu=cap)
        plans = [rule_plan(RULES["first-fit in order"], step, DIMS, under) for step in STEPS]
        both = zip(plans, STEPS, ends, strict=True)
        return sum(predicted_step_time(plan, step) / end for plan, step, end in both) / 2

    theirs = by_name(found, "first-fit in order")
    assert theirs.time_over_ours == pytest.approx(over_ours(4000))
    assert theirs.best_cap is not None
    assert theirs.time_over_ours_at_best_cap == pytest.approx(over_ours(theirs.best_cap))
    assert max(LENGTHS) <= theirs.best_cap < 4000
    assert theirs.time_over_ours_at_best_cap < 0.9 * over_ours(4000)
    assert all(
        o.time_over_ours_at_best_cap <= o.time_over_ours * (1 + 0.01)
        for o in found
        if o.time_over_ours and o.time_over_ours_at_best_cap
    )


@pytest.mark.parametrize("most", [None, 8])
def test_the_best_cap_of_shared_rows_may_be_below_the_mean_length(most: int | None) -> None:
    """A micro-batch holds it on each of its ranks."""
    dims = ParallelDims(data_parallel=2, pipeline_parallel=4, context_parallel=4)
    config = PlannerConfig(max_tokens_per_gpu=40_000, max_context_parallel=most, plan_effort=1)
    best_cap = by_name(compare.compare([[4000] * 64], dims, config), "first-fit in order").best_cap
    assert best_cap is not None
    assert best_cap < 4000


def test_no_cap_is_a_rules_best_under_which_it_lacks_a_plan() -> None:
    """Under a cap below 40 it has none for the second step, and an end sooner for the first."""
    steps = [[10] * 32, [10] * 14 + [40] * 2]
    found = compare.compare(steps, DIMS, CONFIG_OF_100)
    theirs = by_name(found, "verl 0.9")
    assert (theirs.planned, theirs.failure) == (2, None)
    assert theirs.best_cap is not None
    assert theirs.best_cap >= 40


def test_a_rule_without_a_plan_is_listed_with_its_reason() -> None:
    found = compare.compare(
        [[20, 30, 40], [20, 30, 40, 50]], ParallelDims(data_parallel=2), CONFIG_OF_100
    )
    verl = by_name(found, "verl 0.9")
    assert (verl.steps, verl.planned) == (2, 1)
    assert str(verl.failure) == "3 samples do not divide by 2; pass a multiple of 2"
    assert verl.time_over_floor is not None
    lines = compare.summary(found)
    (line,) = [line for line in lines if line.startswith("verl 0.9")]
    assert line == f"verl 0.9 has no plan for 1 of 2 steps: {verl.failure}"
    never = by_name(
        compare.compare([[5] * 3], ParallelDims(data_parallel=2), CONFIG_OF_100), "verl 0.9"
    )
    assert (never.planned, never.time_over_floor, never.planning_seconds) == (0, None, None)
    assert compare.table_row(never) == ("verl 0.9", "0/1", *["-"] * 6)


def test_summary_names_the_best_rule_at_the_given_cap_and_at_its_own(
    outcomes: list[compare.Outcome],
) -> None:
    peers = [o for o in outcomes if o.is_rule and o.time_over_ours]
    best = min(peers, key=lambda o: (o.time_over_ours, o.name))
    tuned = min(peers, key=lambda o: (o.time_over_ours_at_best_cap, o.name))
    line = compare.summary(outcomes)[0]
    at = f"at {tuned.time_over_ours_at_best_cap:.3f} x the time"
    assert f"{tuned.name} under {tuned.best_cap} ends soonest, {at}" in line
    assert f"at the given cap {best.name}, at {best.time_over_ours:.3f} x" in line


@pytest.mark.parametrize(("ranks", "context", "most"), [(2, 4, 2), (4, 3, 2), (3, 1, 3)], ids=str)
def test_every_planner_is_shown_where_dynamic_cp_lacks_a_rules_size(
    ranks: int, context: int, most: int
) -> None:
    """The rule's own size is above the largest, or no row can have it on so many ranks."""
    dims = ParallelDims(data_parallel=ranks, context_parallel=context)
    config = PlannerConfig(max_tokens_per_gpu=4096, max_context_parallel=most, plan_effort=1)
    found = compare.compare([[5000, 1091, 590, 554, 1131, 524]], dims, config)
    assert by_name(found, compare.OURS).planned
    assert len(found) == len(list(compare.planners(dims, config, CostModel(), RULES)))


def test_steps_are_cut_in_order_and_settings_that_have_no_plan_are_no_ones_failure() -> None:
    assert compare.consecutive_steps([3, 4, 5], None) == [[3, 4, 5]]
    assert compare.consecutive_steps([3, 4, 5], 2) == [[3, 4], [5]]
    with pytest.raises(LengthError, match="lengths holds no length"):
        compare.consecutive_steps([], None)
    for options in ({"max_tokens_per_gpu": 1}, {"max_tokens_per_gpu": 9, "plan_effort": 10**9}):
        with pytest.raises(ConfigError, match=[*options][-1]):
            compare.compare([[5]], ParallelDims(context_parallel=2), PlannerConfig(**options))


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


def test_plans_with_too_many_samples_in_a_micro_batch_are_no_plans() -> None:
    config = PlannerConfig(max_tokens_per_gpu=100, max_samples_per_row=3, plan_effort=100)
    found = compare.compare([[10] * 24], ParallelDims(data_parallel=2), config)
    assert [each.name for each in found if not each.is_rule and each.planned == 0] == []
    verl = by_name(found, "verl 0.9")
    assert (verl.planned, str(verl.failure)) == (
        0,
        "its plan has 6 samples in a micro-batch, max_samples_per_row "
        "(--dynamic-batch-max-samples-per-row) is 3",
    )


SHARED = (
    ParallelDims(data_parallel=4, pipeline_parallel=2),
    PlannerConfig(max_tokens_per_gpu=20_000, max_context_parallel=4, plan_effort=30),
)
SHARED_LENGTHS = [*LENGTHS[:40], 20_000]


def test_one_size_for_all() -> None:
    dims, config = SHARED
    made = [each for each in compare.planners(*SHARED, COSTS, {}) if each.name.endswith("for all")]
    for planner, size in zip(made, (1, 2, 4), strict=True):
        fixed = planner.plan(SHARED_LENGTHS, config)
        validate_plan(fixed, SHARED_LENGTHS)
        assert (fixed.dims, fixed.cost_model) == (dims.for_rows_on(size), COSTS.on_ranks(size))
        validate_plan(planner.plan([5], config), [5])
        if size < 4:
            with pytest.raises(OversizeSampleError):
                planner.plan(SHARED_LENGTHS, replace(config, max_tokens_per_gpu=5000))


def test_compare_has_every_size() -> None:
    outcomes = {o.name: o for o in compare.compare([SHARED_LENGTHS], *SHARED)}
    for name in ("CP 1 for all", "CP 2 for all", "CP 4 for all"):
        other = outcomes[name].time_over_ours
        assert other is not None
        assert other >= 1 - 1e-9
        # The search takes fewer tokens than the cap allows anyway: no smaller one is tried.
        assert outcomes[name].best_cap == SHARED[1].max_tokens_per_gpu
    # The rules have the largest size of rows up to the dims'.
    model, dims = CostModel(per_micro_batch=7.0), ParallelDims(context_parallel=4)
    config, lengths = replace(SHARED[1], max_context_parallel=2), SHARED_LENGTHS[:40]
    found = {o.name: o for o in compare.compare([lengths], dims, config, model)}
    end = predicted_step_time(plan_step(lengths, dims, config, model), lengths)
    fixed, shared = replace(config, max_context_parallel=None), dims.for_rows_on(2)
    for name, rule in RULES.items():
        plan = rule_plan(rule, lengths, shared, fixed)
        theirs = predicted_step_time(plan, lengths, model.on_ranks(2))
        assert found[name].time_over_ours == pytest.approx(theirs / end)
    without = {o.name for o in compare.compare([[5, 6]], DIMS, CONFIG)}
    assert not any("CP" in name for name in without)
