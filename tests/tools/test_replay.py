"""A recorded job replayed: predictions, settings that change, the command."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
from recorded_jobs import CONFIG, COSTS, DIMS, lengths_of, recorded, recorded_job, the_file

from mcore_batching.planning import (
    ParallelDims,
    plan_step,
    predicted_step_time,
)
from mcore_batching.planning.plans.records import StepRecord, read_records
from mcore_batching.tools import replay
from mcore_batching.tools.cli import main

COEFFICIENTS = ("linear", "quadratic", "per_micro_batch", "context_parallel_fixed")


def measured_job(tmp_path: Path, factor: float = 1e-3) -> list[StepRecord]:
    """A job whose steps took what was predicted, but for a slow first one and a fast last one."""
    plans = [plan_step(lengths_of(step), DIMS, CONFIG, COSTS) for step in range(5)]
    times = [factor * predicted_step_time(plan, lengths_of(i)) for i, plan in enumerate(plans)]
    times[0] *= 4
    times[-1] *= 0.8
    recorded_job(tmp_path, [*times])
    return read_records(tmp_path)


def test_steps_by_learnt_costs_are_one_job(tmp_path: Path) -> None:
    steps = []
    for step in range(6):
        lengths, costs = lengths_of(step), replace(COSTS, per_micro_batch=7.0 + step)
        plan = plan_step(lengths, DIMS, CONFIG, costs)
        unit = 1e-3 if step > 1 else None
        steps.append((plan, lengths, 1e-3 * predicted_step_time(plan, lengths), unit))
    groups = replay.by_setting(replay.replay(recorded(tmp_path, *steps)))
    assert [len(alike) for alike in groups] == [1, 1, 4]
    assert replay.seconds_per_unit(groups[-1]) == pytest.approx(1e-3)


def test_learnt_units_that_change_are_each_step_s_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The median is of all in one unit, and holds what no pass of a mean stage does: a fourth."""
    given, expected = [], []
    for step, (unit, seconds) in enumerate([(37.0, 1e-3), (1.0, 2e-2), (0.5, 5e-2), (1.0, None)]):
        costs = {name: unit * getattr(COSTS, name) for name in COEFFICIENTS}
        plan = plan_step(lengths_of(step), DIMS, CONFIG, replace(COSTS, **costs))
        expected.append((seconds or 0) * predicted_step_time(plan, lengths_of(step)))
        measured = 1.25 * expected[-1] if seconds else None
        given.append((plan, lengths_of(step), measured, seconds or 2e-2))
    records = recorded(tmp_path, *given)
    steps = replay.replay(records)
    assert [len(alike) for alike in replay.by_setting(steps)] == [4]
    factor = replay.seconds_per_unit(steps)
    assert factor == pytest.approx(1.25 * 2e-2)
    assert [factor * step.predicted / 1.25 for step in steps[:3]] == pytest.approx(expected[:3])
    assert [step.error(factor) for step in steps[:3]] == pytest.approx([0.0] * 3, abs=1e-9)
    assert steps[3].error(factor) is None
    recorded_time = sum(step.predicted for step in steps[:3])
    assert factor * recorded_time == pytest.approx(1.25 * sum(expected[:3]))
    assert main(["replay", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "a unit of cost took 2.500e-02 s (median); predictions are off by 0.0%" in printed


def test_replay_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = measured_job(tmp_path)
    assert main(["replay", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("5 recorded steps, DP2 x PP4, cap 1000 tokens\n")
    assert "a unit of cost took 1.000e-03 s (median)" in printed
    assert "off by 20.0% on average, 75.0% at worst" in printed
    for column in ("error", "time/floor"):
        assert f"\n{column} " in printed
    first = next(line for line in printed.splitlines() if line.split()[:1] == ["0"])
    assert f"{1e-3 * predicted_step_time(records[0].plan, records[0].lengths):.3f} s" in first
    assert "-75.0%" in first


@pytest.mark.parametrize(
    ("seconds", "unit", "printed"),
    [
        ([0.0, 0.0], None, "no time was measured: times are in units of cost"),
        ([None], 1e-3, "a unit of cost took 1.000e-03 s (as learnt)\n"),
    ],
)
def test_a_job_without_times(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    seconds: list[float | None],
    unit: float | None,
    printed: str,
) -> None:
    plan = plan_step(lengths_of(0), DIMS, CONFIG, COSTS)
    recorded(tmp_path, *((plan, lengths_of(0), each, unit) for each in seconds))
    assert main(["replay", str(tmp_path)]) == 0
    assert printed in capsys.readouterr().out


def test_jobs_of_different_layouts_are_replayed_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one folder; the second takes half the time for a unit."""
    for name, dims, factor in (("a", DIMS, 2e-3), ("b", ParallelDims(data_parallel=8), 1e-3)):
        plans = [plan_step(lengths_of(step), dims, CONFIG, COSTS) for step in range(2)]
        times = [factor * predicted_step_time(p, lengths_of(i)) for i, p in enumerate(plans)]
        given = [(plans[i], lengths_of(i), times[i], None) for i in range(2)]
        recorded(tmp_path / name, *given)
        the_file(tmp_path / name).rename(tmp_path / f"{name}.jsonl")
    assert main(["replay", str(tmp_path)]) == 0
    blocks = capsys.readouterr().out.split(
        "\nthen with data_parallel=8 (--dp 8), pipeline_parallel=1 (--pp 1)\n"
    )
    for block, (dims_, unit) in zip(blocks, [("DP2 x PP4", 2e-3), ("DP8", 1e-3)], strict=True):
        assert block.startswith(f"2 recorded steps, {dims_}, cap 1000 tokens\n")
        assert f"a unit of cost took {unit:.3e} s (median)" in block
        assert "off by 0.0% on average, 0.0% at worst" in block


def test_steps_part_where_options_or_costs_change(tmp_path: Path) -> None:
    smaller, costs = replace(CONFIG, max_tokens_per_gpu=950), replace(COSTS, linear=2.0)
    settings = ((CONFIG, COSTS), (smaller, COSTS), (smaller, costs), (CONFIG, COSTS))
    plans = [plan_step(lengths_of(0), DIMS, *setting) for setting in settings]
    records = recorded(tmp_path, *((plan, lengths_of(0), None, None) for plan in plans))
    alike = replay.by_setting(replay.replay(records))
    assert [len(steps) for steps in alike] == [1, 1, 1, 1]
    pairs = itertools.pairwise(alike)
    assert [replay.changed_options(before[-1], after[0]) for before, after in pairs] == [
        {"max_tokens_per_gpu": 950},
        {"linear": 2.0},
        {"max_tokens_per_gpu": 1000, "linear": 1.0},
    ]
