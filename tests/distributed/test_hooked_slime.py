"""slime's own modules with the hooked batching, against slime with its own.

Read from a checkout of slime that ``MCORE_BATCHING_SLIME`` names, as it was before its pull request
1860 (commit 286750aa3). Both sides compute in float32 over rows of other contents; tolerances as in
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

SOURCE = os.environ.get("MCORE_BATCHING_SLIME", "")

if not SOURCE:  # not a mark: its jobs would still be launched beside those of other tests
    pytest.skip(
        "MCORE_BATCHING_SLIME does not name a checkout of slime (286750aa3)",
        allow_module_level=True,
    )


from kit import output_faults  # noqa: E402
from kit.slime import compared_jobs  # noqa: E402 - needs Megatron, there where a checkout is

JOBS = compared_jobs("slime", "kit.slime:compare", SOURCE)


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_slime_equals_itself(job: Job, ranks: list[dict[str, Any]]) -> None:
    assert max(rank["log_probs"] for rank in ranks) < LOG_PROBS
    assert max(rank["gradients"] for rank in ranks) < GRADIENTS
    for rank in ranks:
        if job.dims.get("data_parallel", 1) > 1:
            assert rank["placeholders"] > 0
        if not rank["last_stage"]:
            continue
        own, hooked = rank["reported"]
        assert own.keys() == hooked.keys()
        # By samples, slime counts a placeholder as one in the denominator of what it *reports*.
        # Nothing that get_batch returns reaches that count. Gradients do not depend on it.
        counted = 1.0
        if not job.parameters["per_token_loss"]:
            counted = 1 + rank["placeholders"] / rank["samples"]
        for name, value in own.items():
            assert hooked[name] * counted == pytest.approx(value, rel=REPORTED, abs=1e-7), name


@pytest.mark.parametrize("job", output_faults.jobs_of("slime unplanned", SOURCE), ids=str)
def test_outputs_that_no_sample_has_are_an_error_on_all(
    job: Job, ranks: list[dict[str, str]]
) -> None:
    output_faults.check(ranks)
