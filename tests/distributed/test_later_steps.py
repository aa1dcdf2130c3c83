"""Rollouts of several steps: the first is planned at once, the others while it runs."""

from __future__ import annotations

from typing import Any

import pytest
from kit.harness import Job

LAYOUTS: dict[str, dict[str, int]] = {
    "dp2": {"data_parallel": 2},
    "dp2-pp2": {"data_parallel": 2, "pipeline_parallel": 2},
}
EXCHANGE = {"dynamic_batch_exchange": True}
PREFIXES = {"dynamic_batch_share_prefixes": True}
PLANNERS = {
    "dp2-pp2-exchange": EXCHANGE,
    "dp2-shared-prefixes": {
        "dynamic_batch_context_parallel": 2,
        "dynamic_batch_share_prefixes": True,
    },
}


def job(layout: str, name: str, function: str, **parameters: Any) -> Job:
    dims = LAYOUTS[layout]
    ranks = dims["data_parallel"] * dims.get("pipeline_parallel", 1)
    given = {"dims": dims, "reference": "dense", **parameters}
    return Job(f"later-{name}", f"kit.later_steps:{function}", ranks, dims, given)


@pytest.mark.parametrize(
    "job",
    [
        job("dp2-pp2", "dp2-pp2-exchange", "compare", planner=EXCHANGE),
        job("dp2", "dp2-shared-prefixes", "compare", planner=PLANNERS["dp2-shared-prefixes"]),
        job("dp2-pp2", "dp2-pp2-shared", "compare", planner=PREFIXES),
    ],
    ids=str,
)
def test_later_steps_are_planned_meanwhile_and_all_is_the_same(
    job: Job, ranks: list[dict[str, Any]]
) -> None:
    for rank in ranks:
        digests, *expected = rank["found"].pop("not ahead")
        if "exchange" not in job.name and "prefixes" not in job.name:
            # Of samples that stay on their ranks the plan ahead is in two parts.
            digests = rank["found"]["ahead"][0]
        for way, found in rank["found"].items():
            assert found == [digests, *expected], way
        # Of each rollout at least one plan was asked for on some rank, and after the first pass.
        assert all(rank["were_opened"])
    assert any(rank["were_opened"] for rank in ranks)
    said = ranks[0]["said"]
    assert not said["not ahead"]
    assert not said["ahead"]
    for way, why in (("killed", "failed"), ("stopped", "took more"), ("absent", "no planning")):
        [line] = said[way]
        assert "plans in line, for which its next steps wait: " in line
        assert why in line
    assert not any(lines for rank in ranks[1:] for lines in rank["said"].values())


@pytest.mark.parametrize(
    "job",
    [
        job("dp2", "dp2-exchange-mishaps", "mishaps", planner=EXCHANGE),
        job("dp2-pp2", "dp2-pp2-mishaps", "mishaps", planner={}),
    ],
    ids=str,
)
def test_rollouts_that_nobody_trains_on_and_plans_that_fail(
    job: Job, ranks: list[dict[str, Any]]
) -> None:
    for rank in ranks:
        assert rank["repr"] == f"[{rank['kept'][0][0]}, and 2 that are being planned]"
        plan = rank["at first"]
        for what in ("abandoned", "after an error", "after a sample over the cap"):
            assert rank[what] == plan
        first, *later = rank["digests"]
        assert first not in later
        assert rank["plans"] == ranks[0]["plans"]
        assert rank["kept"] == [plan[1], True, repr(plan[1])]
        # Step 0 is trained; what a later step fails for is said on every rank, each time.
        assert len(rank["errors"]) == 3
        for error in rank["errors"]:
            assert error.startswith("PlanningFailedError: ")
            assert f"rank {len(ranks) - 1}: PlanningError: refused, on purpose" in error
        assert rank["errors"] == ranks[0]["errors"]
        assert "OversizeSampleError" in rank["oversize"]
        assert rank["threads"] <= 0
        assert rank["requests"] == 0
