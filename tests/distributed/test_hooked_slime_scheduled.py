"""slime that plans in its rollout manager, hooked, against slime with its own plan and batching.

Read from a checkout of slime that ``MCORE_BATCHING_SLIME_SCHEDULED`` names, since its pull request
1926 (commit 624b824a8). Both sides compute in float32 over rows of other contents; tolerances as in
`test_exactness`.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from kit.harness import Job

LOG_PROBS = 2e-6
GRADIENTS = 2e-5
REPORTED = 2e-6

SOURCE = os.environ.get("MCORE_BATCHING_SLIME_SCHEDULED", "")

if not SOURCE:  # not a mark: its jobs would still be launched beside those of other tests
    pytest.skip(
        "MCORE_BATCHING_SLIME_SCHEDULED does not name a checkout of slime (624b824a8)",
        allow_module_level=True,
    )


from kit.slime import compared_jobs  # noqa: E402 - needs Megatron, there where a checkout is

JOBS = compared_jobs("slime-scheduled", "kit.slime_scheduled:compare", SOURCE)


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_slime_equals_itself(job: Job, ranks: list[dict[str, Any]]) -> None:
    assert max(rank["log_probs"] for rank in ranks) < LOG_PROBS
    assert max(rank["gradients"] for rank in ranks) < GRADIENTS
    for rank in ranks:
        assert rank["placeholders"] >= job.dims.get("data_parallel", 1)
        assert rank["counts"][0] < 8
        own, hooked = rank["reported"]
        assert own.keys() == hooked.keys()
        assert bool(own) == rank["last_stage"]
        for name, value in own.items():
            assert hooked[name] == pytest.approx(value, rel=REPORTED, abs=1e-7), name
