"""Fixtures: reference results once a session, jobs in as few launches as possible."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from kit.harness import REPOSITORY, Job, environment, results, run_jobs
from kit.patience import patience

KINDS = ("dense", "moe", "replay", "learned", "qk")
LAYERS = ("moe", "mamba", "gdn", "mla", "dsa", "dsa-top", "dsa-loss")
HYBRID = ("hybrid", *(f"hybrid-{layers}" for layers in LAYERS))
MULTI_TOKEN = ("mtp", "mtp-deep", "mtp-moe", "hybrid-mtp", "hybrid-mtp-moe")
KINDS_ASKED_FOR = (
    "window",
    "sinks",
    "mrope",
    "frozen",
    "lora",
    "mla",
    "mamba",
    *HYBRID,
    *MULTI_TOKEN,
    "dense-trained",
    "moe-trained",
)
"""Beside `KINDS`, where some test asks for them; trained: several steps in a row."""


@pytest.fixture(scope="session")
def references(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """Model kind to the file with its reference results."""
    wanted = {job.parameters.get("reference") for job in _selected(request)}
    kinds = [*KINDS, *(kind for kind in KINDS_ASKED_FOR if kind in wanted)]
    folder = tmp_path_factory.mktemp("reference")
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    variables = environment(1) | alone | {"MASTER_PORT": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "kit.reference", str(folder), *kinds],
        env=variables,
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=patience(180),
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {kind: str(folder / f"{kind}.pt") for kind in kinds}


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
        selected = {each.name: each for each in _selected(request)}
        together = [
            with_reference(each, references)
            for each in selected.values()
            if each.nproc == job.nproc and each.name not in outcomes
        ]
        outcomes |= run_jobs(together, tmp_path_factory.mktemp(f"nproc{job.nproc}"))
    return results(outcomes[job.name])


def _selected(request: pytest.FixtureRequest) -> list[Job]:
    """The jobs of all selected tests."""
    return [
        item.callspec.params["job"]
        for item in request.session.items
        if "job" in getattr(getattr(item, "callspec", None), "params", {})
    ]


def with_reference(job: Job, references: dict[str, str]) -> Job:
    """The job with the reference's path in place of its kind, if it asks for one."""
    kind = job.parameters.get("reference")
    if kind is not None:
        job.parameters["reference"] = references.get(kind, kind)
    return job
