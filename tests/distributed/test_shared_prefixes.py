"""Samples that begin alike: what is printed and reported.

That nothing changes but the tokens that are computed is shown in `test_exactness`, too, but of few
rows with branches.
"""

from __future__ import annotations

from typing import Any

import pytest
from kit.harness import Job
from kit.prefixes import BRANCH, TOTALS, TRAJECTORIES
from kit.random_verdict import job_of, report, verdict

DP2 = {"data_parallel": 2}
SAMPLES = len(TOTALS) + 1
ALL = 2 * TRAJECTORIES * SAMPLES
TOKENS = 2 * TRAJECTORIES * (sum(TOTALS) + BRANCH)
SHARED = TOTALS[-2] - 1
"""A branch begins with the last token that it has in common with a turn."""
COMPUTED = 2 * TRAJECTORIES * (TOTALS[-1] + BRANCH - SHARED)
KEYS = 2 * TRAJECTORIES * (SHARED + TOTALS[-1] + BRANCH)


@pytest.mark.parametrize(
    "job",
    [
        Job(
            "prefixes-said_and_reported",
            "kit.prefixes:said_and_reported",
            2,
            DP2,
            {"dims": DP2, "reference": "dense"},
        )
    ],
    ids=str,
)
def test_what_is_printed_and_reported_of_samples_and_trees(
    job: Job, ranks: list[dict[str, Any]]
) -> None:
    silent, printed = (rank["printed"] for rank in ranks)
    assert set(silent.values()) == {""}
    assert printed["off"] == ""
    assert printed["on"].count("\n") == 1
    assert printed["mark"].count("\n") == 1
    assert "tokens that samples have in common are computed for each" in printed["mark"]
    saved = f"{TOKENS:,} tokens of samples computed as {COMPUTED:,}: {TOKENS / COMPUTED:.1f}x fewer"
    assert saved in printed["on"]
    assert printed["exchanged"] == ""  # once a job
    for rank in ranks:
        # Of each trajectory the shared node, the last turn's and the branch's.
        for trajectory in range(TRAJECTORIES):
            *begun, turn, branch = rank["last"][trajectory * SAMPLES :][:SAMPLES]
            assert (turn, branch) == (3 * trajectory + 1, 3 * trajectory + 2)
            assert {*begun} <= {turn, branch}
        assert rank["cut"] == TRAJECTORIES * (TOTALS[1] + TOTALS[-1] + BRANCH - SHARED)
        assert not any(rank["rows"])  # costs are learnt of rows without trees
        assert rank["samples"] == ALL
        assert rank["tokens"] == [COMPUTED, TOKENS, KEYS]
        errors = rank["errors"]
        assert "samples [0, 1, 2, 3" in errors["not finite"]
        # The first trajectory's last turn, as its samples are numbered.
        for exchanges in (False, True):
            text = f"sample {len(TOTALS) - 1} has {TOTALS[-1]} tokens"
            assert text in errors[f"oversize, {exchanges}"]
        assert errors["agreeing field"] == errors["evaluated"] == ""
        assert errors["other field"].startswith("PlanningFailedError")
        assert "field 'beside', sample " in errors["other field"]
        assert "unset --dynamic-batch-share-prefixes" in errors["drawn"]


# 13 samples of 39 tokens are computed as 294, up to five nodes behind each other.
BRANCHES: dict[str, Any] = {
    "turns": True,
    "shared_prefixes": True,
    "rollouts": 1,
    "rollout 0, steps": "one",
    "rollout 0, padding samples": False,
    "without the flag": False,
    "cap": 100,
    "samples of a row": False,
    "dynamic CP": False,
    "worker": None,
    "kind": "dense",
    "other_layers": False,
    "hybrid": False,
    "positions": "rope",
    "attention": None,
    "trained": "all",
    "bfloat16": False,
    "loss masks": "weights",
    "lopsided": False,
}
DEPTHS = {"multi-token prediction": True, "depths": 2, "detached heads": False}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one-rank": {"layout": (1, 1, 1, 1), "nproc": 1, "multi-token prediction": False},
    "cp2": {"layout": (1, 1, 2, 1), "nproc": 2, "multi-token prediction": False},
    "further-tokens": {"layout": (1, 1, 1, 1), "nproc": 1, **DEPTHS},
}


@pytest.mark.parametrize(
    "job",
    [job_of(174, f"branches-{name}", **BRANCHES | layout) for name, layout in LAYOUTS.items()],
    ids=str,
)
def test_rows_with_branches_give_what_each_sample_does(
    job: Job, ranks: list[dict[str, Any]]
) -> None:
    kind, said = verdict(job, ranks)
    if kind == "not built":
        pytest.skip(said.splitlines()[-1])
    assert kind == "equal", report(job, said)
