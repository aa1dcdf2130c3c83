"""``--dynamic-batch-record``: rank 0 writes every step of the whole job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kit.harness import Job, JobFailedError, run_jobs

from mcore_batching.planning import CostModel, plan_step
from mcore_batching.planning.records import read_records

LAYOUT = {"data_parallel": 2, "pipeline_parallel": 2}


def _run(directory: Path, scratch: Path, cost_model: Path | None = None) -> list[Any]:
    job = Job(
        "record",
        "kit.recording:record",
        4,
        LAYOUT,
        {
            "layout": LAYOUT,
            "directory": str(directory),
            "steps": 3,
            "cost_model": cost_model and str(cost_model),
        },
    )
    outcome = run_jobs([job], scratch)[job.name]
    if isinstance(outcome, JobFailedError):
        raise outcome
    return outcome


def test_every_step_of_all_ranks_is_recorded(tmp_path: Path) -> None:
    model = CostModel(quadratic=0.25, per_micro_batch=2.0)
    (tmp_path / "cost.json").write_text(model.to_json())
    raised = _run(tmp_path / "record", tmp_path / "scratch", tmp_path / "cost.json")
    assert set(raised) == {""}
    records = read_records(tmp_path / "record")
    assert [record.step for record in records] == [0, 1, 2]
    for record in records:
        record.plan.validate(record.lengths)
        assert len(record.lengths) == 8
        assert record.plan.layout.data_parallel == 2
        assert record.plan.cost_model == model
        owners = [
            next(r for r, rank in enumerate(record.plan.micro_batches) if any(i in s for s in rank))
            for i in range(8)
        ]
        planned = plan_step(
            record.lengths, record.plan.layout, record.plan.config, model, owners=owners
        )
        assert record.plan.micro_batches == planned.micro_batches
        assert record.measured_seconds is not None
        assert record.measured_seconds > 0


def test_a_folder_that_cannot_be_made_is_an_error_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    raised = _run(tmp_path / "file" / "record", tmp_path / "scratch")
    assert len(set(raised)) == 1
    assert "cannot record into" in raised[0]
    assert "set --dynamic-batch-record to a folder" in raised[0]


@pytest.fixture(autouse=True)
def _scratch(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
