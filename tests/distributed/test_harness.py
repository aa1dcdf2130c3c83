"""The harness itself: a hang fails with the stacks of all ranks, a crash with its traceback."""

from __future__ import annotations

from typing import Any

import pytest
from kit.harness import Job, JobFailedError, run_jobs

JOBS = [
    Job("hangs", "kit.harness_jobs:hangs", 2, seconds=1.0),
    Job("after", "kit.harness_jobs:returns_rank", 2),
    Job("dies", "kit.harness_jobs:dies", 2),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any] | JobFailedError]:
    return run_jobs(JOBS, tmp_path_factory.mktemp("harness"))


def test_hang_fails_with_the_stacks_of_all_ranks(found: dict[str, Any]) -> None:
    failure = found["hangs"]
    assert isinstance(failure, JobFailedError)
    text = str(failure)
    assert "stacks of rank 0" in text
    assert "stacks of rank 1" in text
    assert text.count("in hangs") >= 2


def test_jobs_after_a_hang_run_all_the_same(found: dict[str, Any]) -> None:
    assert found["after"] == [0, 1]


def test_crash_on_one_rank_fails_with_its_traceback(found: dict[str, Any]) -> None:
    failure = found["dies"]
    assert isinstance(failure, JobFailedError)
    assert "rank 1: Traceback" in str(failure)
    assert "on purpose" in str(failure)
