"""The harness itself: a hang fails with the stacks of all ranks, a crash with its traceback."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

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
    """This rank."""
    return dist.get_rank()


JOBS = [
    Job("hangs", "test_harness:hangs", 2, seconds=1.0),
    Job("after", "test_harness:returns_rank", 2),
    Job("dies", "test_harness:dies", 2),
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


def test_launches_of_other_tests_have_the_same_server(
    found: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    servers = harness._server.cache_info().currsize
    monkeypatch.setenv("PYTEST_CURRENT_TEST", "another")
    assert run_jobs([Job("after", "test_harness:returns_rank", 2)], tmp_path)["after"] == [0, 1]
    assert harness._server.cache_info().currsize == servers
