"""``--dynamic-batch-record``: rank 0 writes every step of the whole job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kit.harness import Job
from planning_cases import plan_locally

from mcore_batching.planning import CostModel, plan_step, step_statistics
from mcore_batching.planning.plans.records import read_records
from mcore_batching.planning.plans.validation import validate_plan

LAYOUT = {"data_parallel": 2, "pipeline_parallel": 2}


MODEL = CostModel(quadratic=0.25, per_micro_batch=2.0)


def job(name: str, dims: dict[str, int] | None = None, **parameters: Any) -> Job:
    dims = dims or LAYOUT
    given = {"dims": dims, "cost_model": MODEL.to_json(), "taken": False, **parameters}
    return Job(name, "kit.recording:record", 4, dims, given)


@pytest.mark.parametrize(
    "job",
    [
        job("record", steps=3, max_tokens_per_gpu=96),
        job("record-stays", steps=3, max_tokens_per_gpu=96, dynamic_batch_exchange=False),
    ],
    ids=str,
)
def test_every_step_of_all_ranks_is_recorded(
    job: Job, ranks: list[dict[str, str]], tmp_path: Path
) -> None:
    moves = job.parameters.get("dynamic_batch_exchange", True)
    assert {(rank["error"], rank["printed"]) for rank in ranks} == {("", "")}
    (tmp_path / "steps.jsonl").write_text(ranks[0]["recorded"])
    records = read_records(tmp_path)
    assert [record.step for record in records] == [0, 1, 2]
    for record in records:
        validate_plan(record.plan, record.lengths)
        assert len(record.lengths) == 8
        assert record.plan.dims.data_parallel == 2
        assert record.plan.cost_model == MODEL
        given = record.lengths, record.plan.dims, record.plan.config
        if moves:
            assert record.plan == plan_step(*given, MODEL)
        else:  # lengths are listed rank after rank
            assert record.plan == plan_locally(*given, [0] * 4 + [1] * 4, MODEL)
        assert record.measured_seconds is not None
        assert record.measured_seconds > 0


@pytest.mark.parametrize("job", [job("no-folder", steps=1, taken=True)], ids=str)
def test_a_folder_that_cannot_be_made_is_an_error_on_every_rank(
    job: Job, ranks: list[dict[str, str]]
) -> None:
    (raised,) = {rank["error"] for rank in ranks}
    assert "cannot record into" in raised
    assert "set record (--dynamic-batch-record) to a writable folder" in raised


SHARED = {"dynamic_batch_context_parallel": 2}


@pytest.mark.parametrize(
    ("job", "largest_row"),
    [
        (job("over-cap", steps=1, max_tokens_per_gpu=10), 10),
        (job("over-cap-stays", steps=1, max_tokens_per_gpu=10, dynamic_batch_exchange=False), 10),
        (job("over-cap-shared", {"data_parallel": 4}, steps=1, max_tokens_per_gpu=5, **SHARED), 10),
    ],
    ids=str,
)
def test_a_sample_over_the_cap_is_said_once_a_job(
    job: Job, ranks: list[dict[str, str]], largest_row: int, tmp_path: Path
) -> None:
    """By one rank, with its length and the cap that would do; a row that ranks share has theirs."""
    assert {rank["error"] for rank in ranks} == {""}
    (tmp_path / "steps.jsonl").write_text(ranks[0]["recorded"])
    (record,) = read_records(tmp_path)
    longest = max(record.lengths)
    assert step_statistics(record.plan, record.lengths).num_oversize > 0
    *others, last = [rank["printed"] for rank in ranks]
    assert set(others) == {""}
    assert last.count("\n") == 1
    needed = -(-longest * job.parameters["max_tokens_per_gpu"] // largest_row)
    assert f"a sample has {longest} tokens, " in last
    assert f"over the cap of {largest_row} of a micro-batch: it runs alone" in last
    assert f"--max-tokens-per-gpu {needed} would hold it" in last
