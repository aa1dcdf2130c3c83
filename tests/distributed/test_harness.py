"""The harness itself: a hang fails with the stacks of all ranks, a crash with its traceback."""

from __future__ import annotations

from pathlib import Path

from kit.harness import Job, JobFailedError, run_jobs


def test_hang_fails_with_the_stacks_of_all_ranks(tmp_path: Path) -> None:
    jobs = [
        Job("hangs", "kit.faults:hangs", 2, seconds=3.0),
        Job("after", "kit.faults:returns_rank", 2),
    ]
    outcomes = run_jobs(jobs, tmp_path)
    failure = outcomes["hangs"]
    assert isinstance(failure, JobFailedError)
    text = str(failure)
    assert "stacks of rank 0" in text
    assert "stacks of rank 1" in text
    assert text.count("in hangs") >= 2
    assert outcomes["after"] == [0, 1]


def test_crash_on_one_rank_fails_with_its_traceback(tmp_path: Path) -> None:
    outcomes = run_jobs([Job("dies", "kit.faults:dies", 2)], tmp_path)
    failure = outcomes["dies"]
    assert isinstance(failure, JobFailedError)
    assert "rank 1: Traceback" in str(failure)
    assert "on purpose" in str(failure)
