"""Rollouts of several steps: the first is planned at once, the others while earlier ones run."""

from __future__ import annotations

from typing import Any

import pytest
from kit.harness import Job

LAYOUTS: dict[str, dict[str, int]] = {
    "dp2": {"data_parallel": 2},
    "dp2-pp2": {"data_parallel": 2, "pipeline_parallel": 2},
}


def job(layout: str, name: str, function: str, **parameters: Any) -> Job:
    dims = LAYOUTS[layout]
    ranks = dims["data_parallel"] * dims.get("pipeline_parallel", 1)
    given = {"dims": dims, "reference": "dense", **parameters}
    return Job(f"later-{name}", f"kit.later_steps:{function}", ranks, dims, given)


@pytest.mark.parametrize(
    "job",
    [
        job("dp2", "dp2-mishaps", "mishaps", planner={}),
        job("dp2-pp2", "dp2-pp2-mishaps", "mishaps", planner={}),
    ],
    ids=str,
)
def test_rollouts_that_nobody_trains_on_and_plans_that_fail(
    job: Job, ranks: list[dict[str, Any]]
) -> None:
    for rank in ranks:
        assert rank["repr"] == f"[{rank['kept'][0][0]}, and 2 being planned]"
        plan = rank["at first"]
        for what in ("abandoned", "after an error", "after a sample over the cap"):
            assert rank[what] == plan
        assert rank["kept"] == [plan[1], True, repr(plan[1])]
        # Step 0 is trained; what a later step fails for is raised on every rank, each time.
        assert len(rank["not planned"]) == 3
        for error in rank["not planned"]:
            assert error.startswith("PlanningFailedError: ")
            assert "rank 0: PlanningError: refused, on purpose" in error
        [error] = rank["damaged"]
        assert error.startswith("PlanningFailedError: ")
        assert "rank 1: PlanFormatError: " in error
        [error] = rank["early"]
        assert "read num_microbatches[1] on all ranks first" in error
        [error] = rank["apart"]
        assert error.startswith("PlanMismatchError: ")
        assert "'planning'" in error
        [error] = rank["oversize"]
        assert "OversizeSampleError" in error
    for what in ("not planned", "damaged", "apart", "oversize"):
        assert all(rank[what] == ranks[0][what] for rank in ranks), what
