"""miles hooked, against miles with its own plan and batching.

Read from a checkout of miles that ``MCORE_BATCHING_MILES`` names, since its pull request 1927
(commit 31f1ca961).
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from kit.harness import Job

SOURCE = os.environ.get("MCORE_BATCHING_MILES", "")

if not SOURCE:  # not a mark: its jobs would still be launched beside those of other tests
    pytest.skip(
        "MCORE_BATCHING_MILES does not name a checkout of miles (31f1ca961)",
        allow_module_level=True,
    )


from kit import output_faults  # noqa: E402
from kit.slime import compared_jobs  # noqa: E402 - needs Megatron, there where a checkout is
from kit.slime_scheduled import check_equal  # noqa: E402

JOBS = compared_jobs("miles", "kit.miles:compare", SOURCE)


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_miles_equals_itself(job: Job, ranks: list[dict[str, Any]]) -> None:
    check_equal(job, ranks)


@pytest.mark.parametrize("job", output_faults.jobs_of("miles", SOURCE), ids=str)
def test_outputs_that_no_sample_has_are_an_error_on_all(
    job: Job, ranks: list[dict[str, str]]
) -> None:
    output_faults.check(ranks)
