"""``--dynamic-batch-record``: rank 0 writes every step of the whole job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kit.harness import Job

from mcore_batching.planning import CostModel, plan_step
from mcore_batching.planning.records import read_records
from mcore_batching.planning.validation import validate_plan

LAYOUT = {"data_parallel": 2, "pipeline_parallel": 2}


MODEL = CostModel(quadratic=0.25, per_micro_batch=2.0)


def job(name: str, **parameters: Any) -> Job:
    given = {"dims": LAYOUT, "cost_model": MODEL.to_json(), **parameters}
    return Job(name, "kit.recording:record", 4, LAYOUT, given)


@pytest.mark.parametrize("job", [job("record", steps=3, taken=False)], ids=str)
def test_every_step_of_all_ranks_is_recorded(
    job: Job, ranks: list[dict[str, str]], tmp_path: Path
) -> None:
    assert {rank["error"] for rank in ranks} == {""}
    (tmp_path / "steps.jsonl").write_text(ranks[0]["recorded"])
    records = read_records(tmp_path)
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


@pytest.mark.parametrize("job", [job("no-folder", steps=1, taken=True)], ids=str)
def test_a_folder_that_cannot_be_made_is_an_error_on_every_rank(
    job: Job, ranks: list[dict[str, str]]
) -> None:
    (raised,) = {rank["error"] for rank in ranks}
    assert "cannot record into" in raised
    assert "set --dynamic-batch-record to a folder" in raised
