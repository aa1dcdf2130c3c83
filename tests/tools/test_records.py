"""A job's record: written, read back, refused where it is broken, and replayed."""

from __future__ import annotations

import json
import os
import random
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_cases import Case, cases, examples, planned

from mcore_batching.planning import (
    CostModel,
    ParallelDims,
    PlannerConfig,
    StepPlan,
    plan_batch,
    plan_step,
    predicted_step_time,
)
from mcore_batching.planning.forest import PrefixTree, forest_of_groups
from mcore_batching.planning.plans.plan import counted
from mcore_batching.planning.plans.records import (
    COST_MODEL_FILE,
    RecordError,
    StepRecord,
    StepRecorder,
    read_records,
)
from mcore_batching.planning.plans.statistics import total_statistics
from mcore_batching.tools.cli import main
from mcore_batching.tools.replay import by_setting, replay, seconds_per_unit

DIMS = ParallelDims(data_parallel=2, pipeline_parallel=4)
CONFIG = PlannerConfig(max_tokens_per_gpu=1000, balance="cost")
COSTS = CostModel(quadratic=1 / 3000, per_micro_batch=7.0)
SECONDS = st.none() | st.floats(0, 1e6)


def step_of(
    number: int = 0,
    dims: ParallelDims = DIMS,
    config: PlannerConfig = CONFIG,
    costs: CostModel = COSTS,
) -> tuple[StepPlan, list[int], float]:
    """A step's plan, the lengths of its samples, and its predicted time in units of cost."""
    generator = random.Random(number)
    lengths = [min(900, round(generator.lognormvariate(5, 1)) + 1) for _ in range(24)]
    plan = plan_step(lengths, dims, config, costs)
    return plan, lengths, predicted_step_time(plan, lengths)


def recorded(
    directory: Path, *steps: tuple[StepPlan, Sequence[int], float | None, float | None]
) -> list[StepRecord]:
    """Records, read back, of one job's plans, lengths, seconds, and seconds of a unit of cost."""
    recorder = StepRecorder(directory)
    for plan, lengths, seconds, unit in steps:
        recorder.append(plan, lengths, seconds, seconds_per_unit=unit)
    recorder.close()
    return read_records(directory)


def the_file(directory: Path) -> Path:
    (file,) = directory.glob("*.jsonl")
    return file


@given(steps=st.lists(st.tuples(cases(dynamic=True), SECONDS, SECONDS), min_size=1, max_size=3))
@examples(60)
def test_any_steps_come_back(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[Case, float | None, float | None]]
) -> None:
    folder = tmp_path_factory.mktemp("records") / "deep" / "folder"
    models = [replace(COSTS, per_micro_batch=float(step)) for step in range(len(steps))]
    written = [
        (planned(case, model), tuple(case.lengths), seconds, unit)
        for (case, seconds, unit), model in zip(steps, models, strict=True)
    ]
    records = recorded(folder, *written)
    assert [
        (each.plan, each.lengths, each.measured_seconds, each.seconds_per_unit) for each in records
    ] == written
    assert [record.step for record in records] == [*range(len(steps))]
    assert read_records(the_file(folder)) == records
    # For other jobs, the last of them in a file of its own.
    assert CostModel.from_json((folder / COST_MODEL_FILE).read_text()) == models[-1]


def test_samples_that_share_tokens_are_recorded_with_the_plan(tmp_path: Path) -> None:
    lengths = [50, 60, 70]
    forest = forest_of_groups(lengths, [41, 41, 41], "aab")
    config = replace(CONFIG, max_tokens_per_gpu=100)
    plan = plan_step(lengths, DIMS, config, COSTS, forest=forest)
    (record,) = recorded(tmp_path, (plan, lengths, 1.0, None))
    assert (record.lengths, record.plan) == ((50, 60, 70), plan)
    assert plan.trees == (PrefixTree((0, 1), ((0, 40), (40, 50), (40, 60))),)
    statistics = total_statistics([step.statistics for step in replay([record, record])])
    assert (statistics.num_samples, statistics.real_tokens) == (6, 2 * 140)


def test_jobs_have_files_of_their_own(tmp_path: Path) -> None:
    recorders = [StepRecorder(tmp_path) for _ in range(3)]
    for number, recorder in enumerate(recorders):
        recorder.append(plan_step([number + 1], DIMS, CONFIG), [number + 1])
    assert len(list(tmp_path.glob("*.jsonl"))) == 3
    assert sorted(record.lengths for record in read_records(tmp_path)) == [(1,), (2,), (3,)]
    for recorder in recorders:
        recorder.close()
    # Nor do ranks that record nothing touch the folder.
    silent = StepRecorder(tmp_path / "records", writes=False)
    silent.append(plan_step([5], DIMS, CONFIG), [5], 1.0)
    silent.close()
    assert not (tmp_path / "records").exists()


def test_a_killed_job_has_lost_nothing(tmp_path: Path) -> None:
    recorder = StepRecorder(tmp_path)
    for _ in range(3):
        recorder.append(plan_step([5], DIMS, CONFIG), [5], 1.0)
    # Nothing is left to a buffer of the process, which has closed no file.
    assert len(read_records(tmp_path)) == 3
    file = the_file(tmp_path)
    file.write_text(file.read_text()[:-20])  # cut in its last line
    assert [record.step for record in read_records(tmp_path)] == [0, 1]


def test_a_full_disk_stops_the_record_and_not_the_job(tmp_path: Path) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("needs /dev/full")
    recorder = StepRecorder(tmp_path)
    recorder._file = open("/dev/full", "w")  # noqa: SIM115
    plan = plan_step([5], DIMS, CONFIG)
    with pytest.warns(RuntimeWarning, match="no more steps are recorded"):
        recorder.append(plan, [5])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        recorder.append(plan, [5])
        recorder.close()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        RecordError,
        match=r"cannot record .*; set record \(--dynamic-batch-record\) to a writable folder",
    ):
        StepRecorder(tmp_path / "file")


TWO_STEPS = plan_batch(step_of()[1], DIMS, CONFIG, samples_per_step=12)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("plan", json.loads(TWO_STEPS.to_json()), "its plan has 2 steps, expected one"),
        ("version", 1, "expected .*got .* 1; read it with"),
        ("format", "x", "expected .*got 'x'"),
        ("plan", [], "a plan must be a JSON object, got"),
        ("plan", {}, 'expected "format": "mcore-batching/plan", got None'),
        ("lengths", [5] * 25, "24 samples, but 25 lengths"),
        ("lengths", [5000] * 24, "invariant 'cap' is broken"),
        ("lengths", ["x"], "the length of sample 0 must be an integer"),
        ("lengths", [50.7], "the length of sample 0 must be an integer .* got 50.7"),
        ("lengths", [float("inf")], "the length of sample 0 must be an integer"),
        ("lengths", [10**400], "the length of sample 0 must be an integer"),
        ("lengths", [True], "the length of sample 0 must be an integer"),
        ("step", 1.5, "step must be an integer"),
        *(
            (key, value, f"{key} must be a number from 0")
            for key in ("seconds_per_unit", "measured_seconds")
            for value in ("soon", True, -1.5, float("nan"), float("inf"), 10**400)
        ),
        ("cost_model", {"linear": 10**400}, "linear must be a number from 0"),
    ],
)
def test_broken_lines_are_named(tmp_path: Path, key: str, value: object, message: str) -> None:
    plan, lengths, _ = step_of()
    recorded(tmp_path, *[(plan, lengths, 0.5, None)] * 2)
    file = the_file(tmp_path)
    lines = [json.loads(text) for text in file.read_text().splitlines()]
    lines[1][key] = value
    file.write_text("".join(json.dumps(document) + "\n" for document in lines))
    with pytest.raises(RecordError, match=f":2: not a record of a step: .*{message}"):
        read_records(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "holds no recorded step; give a job"),
        ("", "holds no recorded step"),
        ('{"step": 0}\n', "not a record of a step: no key 'format'"),
        ("[]\n", ":1: not a record of a step: expected a record: a JSON object, got '\\[\\]"),
        ("3\n", ":1: not a record of a step: expected a record: a JSON object, got '3"),
        ("nonsense\n", ":1: not a record of a step"),
    ],
)
def test_files_that_are_no_records(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(RecordError, match=message):
        read_records(tmp_path)


def test_learnt_units_that_change_are_each_step_s_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps by learnt costs are of one setting. Their median is of all in one unit, and holds what
    no pass of a mean stage does: a fourth."""
    coefficients = ("linear", "quadratic", "per_micro_batch", "context_parallel_fixed")
    given, expected = [], []
    units = [(9.0, 0.0), (8.0, 0.0), (37.0, 1e-3), (1.0, 2e-2), (0.5, 5e-2), (1.0, 0.0)]
    for step, (unit, seconds) in enumerate(units):
        costs = {name: unit * getattr(COSTS, name) for name in coefficients}
        plan, lengths, end = step_of(step, costs=replace(COSTS, **costs))
        expected.append(seconds * end)
        measured = 1.25 * expected[-1] or None
        given.append((plan, lengths, measured, None if step < 2 else seconds or 2e-2))
    changes, groups = zip(*by_setting(replay(recorded(tmp_path, *given))), strict=True)
    assert [len(alike) for alike in groups] == [1, 1, 4]
    assert (changes[1]["linear"], changes[2]) == (8.0, {"cost_model": "auto"})
    steps, factor = groups[2], seconds_per_unit(groups[2])
    assert factor == pytest.approx(1.25 * 2e-2)
    assert [factor * step.predicted / 1.25 for step in steps[:3]] == pytest.approx(expected[2:5])
    assert [step.error(factor) for step in steps[:3]] == pytest.approx([0.0] * 3, abs=1e-9)
    assert steps[3].error(factor) is None
    assert main(["replay", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "a unit of cost took 2.500e-02 s (median); predictions are off by 0.0%" in printed


@pytest.mark.parametrize(
    ("factors", "unit", "said"),
    [
        # Steps that took what was predicted, but for a slow first one and a fast last one.
        (
            [4e-3, 1e-3, 1e-3, 1e-3, 0.8e-3],
            None,
            "a unit of cost took 1.000e-03 s (median); predictions are off by 20.0% on average, "
            "75.0% at worst\nerror ",
        ),
        ([0.0, 0.0], None, "no time was measured: times are in units of cost\n"),
        ([None], 1e-3, "a unit of cost took 1.000e-03 s (as learnt)\n"),
    ],
)
def test_replay_command(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    factors: list[float | None],
    unit: float | None,
    said: str,
) -> None:
    """Measured seconds are a factor of the predicted units of cost."""
    steps = [step_of(number) for number in range(len(factors))]
    measured = [factor and factor * end for factor, (_, _, end) in zip(factors, steps, strict=True)]
    recorded(tmp_path, *((*step[:2], s, unit) for step, s in zip(steps, measured, strict=True)))
    assert main(["replay", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"{counted(len(steps), 'recorded step')}, DP2 x PP4, cap 1000 tokens")
    assert said in printed
    assert "\ntime/floor " in printed
    if factors[0]:
        (first,) = (line for line in printed.splitlines() if line.split()[:1] == ["0"])
        assert f"{1e-3 * steps[0][2]:.3f} s" in first
        assert "-75.0%" in first


def test_steps_of_other_layouts_options_and_costs_are_replayed_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Jobs in one folder; a unit takes half the time in each than in the one before."""
    dp8, smaller = ParallelDims(data_parallel=8), replace(CONFIG, max_tokens_per_gpu=950)
    jobs = {
        "2 recorded steps, DP2 x PP4, cap 1000": (DIMS, CONFIG, COSTS),
        "data_parallel=8 (--dp 8), pipeline_parallel=1 (--pp 1)": (dp8, CONFIG, COSTS),
        "max_tokens_per_gpu=950 (--max-tokens-per-gpu 950)": (dp8, smaller, COSTS),
        "linear=2.0": (dp8, smaller, replace(COSTS, linear=2.0)),
        "data_parallel=2 (--dp 2), pipeline_parallel=4 (--pp 4), max_tokens_per_gpu=1000 "
        "(--max-tokens-per-gpu 1000), linear=1.0": (DIMS, CONFIG, COSTS),
    }
    for job, settings in enumerate(jobs.values()):
        steps = [step_of(number, *settings) for number in range(2)]
        folder = tmp_path / str(job)
        recorded(folder, *((plan, own, 8e-3 / 2**job * end, None) for plan, own, end in steps))
        the_file(folder).rename(tmp_path / f"{job}.jsonl")
    assert main(["replay", str(tmp_path)]) == 0
    blocks = capsys.readouterr().out.split("\nthen with ")
    for job, (block, begins) in enumerate(zip(blocks, jobs, strict=True)):
        assert block.startswith(begins + ("\n2 recorded steps, " if job else " tokens\n"))
        assert f"a unit of cost took {8e-3 / 2**job:.3e} s (median)" in block
        assert "off by 0.0% on average, 0.0% at worst" in block
