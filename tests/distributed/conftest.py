"""Fixtures: weights once a session, jobs in as few launches as possible."""

from __future__ import annotations

from typing import Any

import pytest
from kit.harness import Job, reference_files, results, run_jobs, with_reference


@pytest.fixture(scope="session")
def references(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """Model kind to the file with its weights."""
    wanted = {job.parameters.get("reference") for job in _selected(request)} - {None}
    return reference_files(tmp_path_factory.mktemp("reference"), sorted({"dense", *wanted}))


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
    """The jobs of all selected tests, but for those that are skipped."""
    return [
        item.callspec.params["job"]
        for item in request.session.items
        if "job" in getattr(getattr(item, "callspec", None), "params", {})
        and item.get_closest_marker("skip") is None
    ]
