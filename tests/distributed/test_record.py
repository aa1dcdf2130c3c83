"""``--dynamic-batch-record``: rank 0 writes every step of the whole job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kit.harness import Job, JobFailedError, results, run_jobs

from mcore_batching.planning import CostModel, plan_step
from mcore_batching.planning.records import read_records
from mcore_batching.planning.validation import validate_plan

LAYOUT = {"data_parallel": 2, "pipeline_parallel": 2}


MODEL = CostModel(quadratic=0.25, per_micro_batch=2.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds a file "taken", where no folder can be made, and what the jobs recorded."""
    made = tmp_path_factory.mktemp("record")
    (made / "taken").write_text("")
    (made / "cost.json").write_text(MODEL.to_json())
    return made


@pytest.fixture(scope="module")
def outcomes_of_jobs(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[Any] | JobFailedError]:
    def job(name: str, **parameters: Any) -> Job:
        return Job(name, "kit.recording:record", 4, LAYOUT, {"dims": LAYOUT, **parameters})

    jobs = [
        job(
            "record",
            directory=str(folder / "steps"),
            steps=3,
            cost_model=str(folder / "cost.json"),
        ),
        job("no-folder", directory=str(folder / "taken" / "steps"), steps=1, cost_model=None),
    ]
    return run_jobs(jobs, tmp_path_factory.mktemp("jobs"))


def test_every_step_of_all_ranks_is_recorded(
    folder: Path, outcomes_of_jobs: dict[str, Any]
) -> None:
    assert set(results(outcomes_of_jobs["record"])) == {""}
    records = read_records(folder / "steps")
    assert [record.step for record in records] == [0, 1, 2]
    for record in records:
        validate_plan(record.plan, record.lengths)
        assert len(record.lengths) == 8
        assert record.plan.dims.data_parallel == 2
        assert record.plan.cost_model == MODEL
        owners = [
            next(r for r, rank in enumerate(record.plan.micro_batches) if any(i in s for s in rank))
            for i in range(8)
        ]
        planned = plan_step(
            record.lengths, record.plan.dims, record.plan.config, MODEL, owners=owners
        )
        assert record.plan.micro_batches == planned.micro_batches
        assert record.measured_seconds is not None
        assert record.measured_seconds > 0


def test_a_folder_that_cannot_be_made_is_an_error_on_every_rank(
    outcomes_of_jobs: dict[str, Any],
) -> None:
    raised = results(outcomes_of_jobs["no-folder"])
    assert len(set(raised)) == 1
    assert "cannot record into" in raised[0]
    assert "set --dynamic-batch-record to a folder" in raised[0]
