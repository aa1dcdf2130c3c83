"""Samples computed in the segments of those that they begin: what is said and reported.

That nothing changes but the tokens that are computed is shown in `test_exactness`.
"""

from __future__ import annotations

from typing import Any

import pytest
from kit.harness import Job
from kit.prefixes import TOTALS, TRAJECTORIES

DP2 = {"data_parallel": 2}
TURNS = len(TOTALS)
ALL, OWN = 2 * TRAJECTORIES * TURNS, 2 * TRAJECTORIES
TOKENS, COMPUTED = 2 * TRAJECTORIES * sum(TOTALS), 2 * TRAJECTORIES * TOTALS[-1]


def job(function: str) -> Job:
    parameters = {"dims": DP2, "reference": "dense"}
    return Job(f"prefixes-{function}", f"kit.prefixes:{function}", 2, DP2, parameters)


@pytest.mark.parametrize("job", [job("said_and_reported")], ids=str)
def test_what_is_said_and_reported_of_samples_and_hosts(
    job: Job, ranks: list[dict[str, Any]]
) -> None:
    silent, told = (rank["printed"] for rank in ranks)
    assert set(silent.values()) == {""}
    assert told["off"] == ""
    assert told["on"].count("\n") == 1
    assert f"{ALL} samples in {OWN} rows' worth of tokens: {COMPUTED:,}, 2.2x" in told["on"]
    assert told["mark"].count("\n") == 1
    alone = "samples that begin others are computed by themselves:"
    assert f"1 {alone} field 'mark' differs" in told["mark"]
    # A later reason is said all the same; of each trajectory a turn begins one of the other step.
    assert told["cut"].count("\n") == 1
    assert f"{OWN} {alone} another optimizer step" in told["cut"]
    for rank in ranks:
        last = [i // TURNS * TURNS + TURNS - 1 for i in range(TRAJECTORIES * TURNS)]
        assert rank["hosts"] == last
        assert rank["cut hosts"] == [i // 2 * 2 + 1 for i in range(TRAJECTORIES * TURNS)]
        assert sum(map(sum, rank["rows"])) == COMPUTED // 2
        assert rank["samples"] == [OWN, ALL - OWN]
        assert rank["tokens"] == [COMPUTED, TOKENS - COMPUTED]
        errors = rank["errors"]
        assert "samples [0, 1, 2, 3" in errors["not finite"]  # hosts and who begins them
        # The first trajectory's last turn, not the first of the samples with segments of their own.
        for exchanges in (False, True):
            assert f"sample {TURNS - 1} has {TOTALS[-1]} tokens" in errors[f"oversize, {exchanges}"]
        assert errors["agreeing field"] == errors["evaluated"] == ""
        assert errors["other field"].startswith("PlanningFailedError")
        assert "field 'beside', sample " in errors["other field"]
        assert "unset --dynamic-batch-share-prefixes" in errors["drawn"]
