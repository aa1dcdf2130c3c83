"""Fixtures: reference results once a session, jobs in as few launches as possible."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from kit.harness import REPOSITORY, Job, environment, results, run_jobs
from kit.patience import patience

KINDS = ("dense", "moe", "replay", "learned", "qk")


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Model kind to the file with its reference results."""
    folder = tmp_path_factory.mktemp("reference")
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    variables = environment(1) | alone | {"MASTER_PORT": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "kit.reference", str(folder), *KINDS],
        env=variables,
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=patience(180),
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {kind: str(folder / f"{kind}.pt") for kind in KINDS}


@pytest.fixture(scope="session")
def outcomes() -> dict[str, Any]:
    """Outcome of every job that has run, by name."""
    return {}


@pytest.fixture
def ranks(
    request: pytest.FixtureRequest,
    job: Job,
    references: dict[str, str],
    outcomes: dict[str, Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> list[Any]:
    """What every rank returned for the test's ``job``.

    The first test that needs a number of processes runs the jobs of all selected tests with that
    number.
    """
    if job.name not in outcomes:
        selected = {
            item.callspec.params["job"].name: item.callspec.params["job"]
            for item in request.session.items
            if "job" in getattr(getattr(item, "callspec", None), "params", {})
        }
        together = [
            with_reference(each, references)
            for each in selected.values()
            if each.nproc == job.nproc and each.name not in outcomes
        ]
        outcomes |= run_jobs(together, tmp_path_factory.mktemp(f"nproc{job.nproc}"))
    return results(outcomes[job.name])


def with_reference(job: Job, references: dict[str, str]) -> Job:
    """The job with the reference's path in place of its kind, if it asks for one."""
    kind = job.parameters.get("reference")
    if kind is not None:
        job.parameters["reference"] = references.get(kind, kind)
    return job
