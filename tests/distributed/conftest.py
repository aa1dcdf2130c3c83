"""Jobs of all selected tests, in as few launches as possible."""

from __future__ import annotations

from typing import Any

import pytest
from kit.harness import Job, results, run_jobs


@pytest.fixture(scope="session")
def outcomes() -> dict[str, Any]:
    """Outcome of every job that has run, by name."""
    return {}


@pytest.fixture
def ranks(
    request: pytest.FixtureRequest,
    job: Job,
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
            each
            for each in selected.values()
            if each.nproc == job.nproc and each.name not in outcomes
        ]
        outcomes |= run_jobs(together, tmp_path_factory.mktemp(f"nproc{job.nproc}"))
    return results(outcomes[job.name])


def _selected(request: pytest.FixtureRequest) -> list[Job]:
    return [
        item.callspec.params["job"]
        for item in request.session.items
        # Other tests with jobs run them by themselves.
        if "ranks" in getattr(item, "fixturenames", ())
        and "job" in getattr(getattr(item, "callspec", None), "params", {})
        and item.get_closest_marker("skip") is None
    ]
