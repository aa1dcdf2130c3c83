"""A job's record: written, read back, and refused where it is broken."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from kit.patience import patience
from planning_cases import Case, cases, examples, planned
from recorded_jobs import CONFIG, COSTS, DIMS, lengths_of, recorded, recorded_job, the_file

from mcore_batching.planning import CostModel, plan_batch, plan_step, step_statistics
from mcore_batching.planning.plans.records import (
    COST_MODEL_FILE,
    RecordError,
    StepRecorder,
    read_records,
)
from mcore_batching.planning.plans.statistics import total_statistics
from mcore_batching.planning.prefix_trees import PrefixTree, forest_of_groups
from mcore_batching.planning.tree_planner import plan_forest
from mcore_batching.tools.explain import explain
from mcore_batching.tools.replay import replay


def test_costs_times_and_their_unit_are_recorded(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "folder"
    models = [replace(COSTS, per_micro_batch=float(step)) for step in range(3)]
    plans = [plan_step([5, 6], DIMS, CONFIG, model) for model in models]
    seconds, units = (0.5, None, 1.0), (None, 1e-3, 2e-3)
    given = zip(plans, [[5, 6]] * 3, seconds, units, strict=True)
    records = recorded(folder, *given)
    assert [record.plan.cost_model for record in records] == models
    assert tuple(record.seconds_per_unit for record in records) == units
    assert tuple(record.measured_seconds for record in records) == seconds
    assert [record.step for record in records] == [0, 1, 2]
    assert read_records(the_file(folder)) == records
    # For other jobs, the last of them in a file of its own.
    assert CostModel.from_json((folder / COST_MODEL_FILE).read_text()) == models[-1]


def test_samples_that_share_tokens_are_recorded_with_the_plan(tmp_path: Path) -> None:
    lengths = [50, 60, 70]
    forest = forest_of_groups(lengths, [41, 41, 41], "aab")
    plan = plan_forest(forest, DIMS, replace(CONFIG, max_tokens_per_gpu=100), COSTS)
    (record,) = recorded(tmp_path, (plan, lengths, 1.0, None))
    assert (record.lengths, record.plan) == ((50, 60, 70), plan)
    assert plan.trees == (PrefixTree((0, 1), ((0, 40), (40, 50), (40, 60))),)
    statistics = total_statistics([step.statistics for step in replay([record, record])])
    assert (statistics.num_samples, statistics.real_tokens) == (6, 2 * 140)
    text = "180 tokens of samples computed as 140: 1.3x fewer, 1.6 keys per token"
    assert text in explain(plan, lengths)
    assert step_statistics(plan, lengths).sharing == text
    assert step_statistics(replace(plan, trees=()), lengths).sharing == ""


@given(case=cases(dynamic=True))
@examples(60)
def test_any_plan_comes_back(tmp_path_factory: pytest.TempPathFactory, case: Case) -> None:
    plan = planned(case, COSTS)
    (record,) = recorded(tmp_path_factory.mktemp("records"), (plan, case.lengths, None, None))
    assert record.plan == plan
    assert record.plan.digest() == plan.digest()
    assert record.lengths == tuple(case.lengths)


def test_a_step_out_of_a_batch_is_refused_where_it_is_read(tmp_path: Path) -> None:
    lengths = lengths_of(0)
    steps = plan_batch(lengths, DIMS, CONFIG, samples_per_step=10).steps
    with pytest.raises(RecordError, match="10 samples, but 24 lengths"):
        recorded(tmp_path, (steps[1], lengths, None, None))


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


KILLED = """
import os, signal, sys
from mcore_batching.planning import *
from mcore_batching.planning.plans.records import StepRecorder
recorder = StepRecorder(sys.argv[1])
for _ in range(3):
    recorder.append(plan_step([5], ParallelDims(), PlannerConfig(max_tokens_per_gpu=9)), [5], 1.0)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_job_has_lost_nothing(tmp_path: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], timeout=patience(60))
    assert killed.returncode == -signal.SIGKILL
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


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
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
    recorded_job(tmp_path, [0.5, 0.5])
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
        ("[]\n", ":1: not a record of a step: expected a JSON object, got \\[\\]"),
        ("3\n", ":1: not a record of a step: expected a JSON object, got 3"),
        ("nonsense\n", ":1: not a record of a step"),
    ],
)
def test_files_that_are_no_records(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(RecordError, match=message):
        read_records(tmp_path)
