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

DP2_PP2 = {"data_parallel": 2, "pipeline_parallel": 2}
STAYS = {"dynamic_batch_exchange": False}
SHARED = {"dynamic_batch_context_parallel": 2}
MODEL = CostModel(quadratic=0.25, per_micro_batch=2.0)
JOBS: dict[str, tuple[dict[str, int], dict[str, Any], int]] = {
    "record": (DP2_PP2, {"steps": 3, "max_tokens_per_gpu": 96}, 96),
    "record-stays": (DP2_PP2, {"steps": 3, "max_tokens_per_gpu": 96, **STAYS}, 96),
    "record-over-cap": (DP2_PP2, {"steps": 1, "max_tokens_per_gpu": 10}, 10),
    "record-over-cap-stays": (DP2_PP2, {"steps": 1, "max_tokens_per_gpu": 10, **STAYS}, 10),
    "record-over-cap-shared": (
        {"data_parallel": 4},
        {"steps": 1, "max_tokens_per_gpu": 5, **SHARED},
        10,
    ),
}
"""By name: parallel dims, parameters, and the tokens of the largest row."""


@pytest.mark.parametrize(
    ("job", "largest_row"),
    [
        (
            Job(
                name,
                "kit.recording:record",
                4,
                dims,
                {"dims": dims, "cost_model": MODEL.to_json(), **parameters},
            ),
            largest_row,
        )
        for name, (dims, parameters, largest_row) in JOBS.items()
    ],
    ids=list(JOBS),
)
def test_every_step_of_all_ranks_is_recorded_and_a_sample_over_the_cap_is_said_once(
    job: Job, ranks: list[dict[str, str]], largest_row: int, tmp_path: Path
) -> None:
    """Said by one rank, with its length and the cap that would do; a row that ranks share has
    theirs."""
    (tmp_path / "steps.jsonl").write_text(ranks[0]["recorded"])
    records = read_records(tmp_path)
    assert [record.step for record in records] == list(range(job.parameters["steps"]))
    replicas = job.dims["data_parallel"]
    for record in records:
        validate_plan(record.plan, record.lengths)
        assert len(record.lengths) == 8
        assert record.plan.dims.data_parallel == replicas
        assert record.plan.cost_model == MODEL
        given = record.lengths, record.plan.dims, record.plan.config
        if job.parameters.get("dynamic_batch_exchange", True):
            assert record.plan == plan_step(*given, MODEL)
        else:  # lengths are listed rank after rank
            assert record.plan == plan_locally(*given, [0] * 4 + [1] * 4, MODEL)
        assert record.measured_seconds is not None
        assert record.measured_seconds > 0
    *others, last = [rank["printed"] for rank in ranks]
    assert set(others) == {""}
    if job.parameters["steps"] > 1:
        assert last == ""
        return
    longest = max(record.lengths)
    assert step_statistics(record.plan, record.lengths).num_oversize > 0
    assert last.count("\n") == 1
    needed = -(-longest * job.parameters["max_tokens_per_gpu"] // largest_row)
    assert f"a sample has {longest} tokens, " in last
    assert f"over the cap of {largest_row} of a micro-batch: it runs alone" in last
    assert f"--max-tokens-per-gpu {needed} would hold it" in last
