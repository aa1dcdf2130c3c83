"""The harness itself: a hang fails with the stacks of all ranks, a crash with its traceback."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch.distributed as dist
from kit import harness
from kit.harness import Job, JobFailedError, run_jobs


def hangs() -> None:
    """The last rank never comes to the barrier that the others wait in."""
    if dist.get_rank() == dist.get_world_size() - 1:
        time.sleep(3600)
    dist.barrier()


def dies() -> None:
    """The last rank raises while the others wait for it."""
    if dist.get_rank() == dist.get_world_size() - 1:
        raise ValueError("on purpose")
    dist.barrier()


def returns_rank() -> int:
    return dist.get_rank()


def test_a_failed_job_shows_all_ranks_and_ends_none_of_those_after_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    jobs = [
        Job("hangs", "test_harness:hangs", 2, seconds=1.0),
        Job("after", "test_harness:returns_rank", 2),
        Job("dies", "test_harness:dies", 2),
    ]
    found = run_jobs(jobs, tmp_path / "first")
    assert isinstance(found["hangs"], JobFailedError)
    text = str(found["hangs"])
    assert "stacks of rank 0" in text
    assert "stacks of rank 1" in text
    assert text.count("in hangs") >= 2
    assert found["after"] == [0, 1]
    assert isinstance(found["dies"], JobFailedError)
    assert "rank 1: Traceback" in str(found["dies"])
    assert "on purpose" in str(found["dies"])
    # Launches of other tests have the same server.
    servers = harness._server.cache_info().currsize
    monkeypatch.setenv("PYTEST_CURRENT_TEST", "another")
    assert run_jobs([jobs[1]], tmp_path / "second") == {"after": [0, 1]}
    assert harness._server.cache_info().currsize == servers
