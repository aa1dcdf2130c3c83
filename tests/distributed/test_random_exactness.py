"""Jobs drawn at random against an unpacked reference of one process.

    pytest --long tests/distributed/test_random_exactness.py

draws jobs for `SECONDS`; other times, and the seed to begin with, are read from the variables
`MCORE_BATCHING_RANDOM_SECONDS` and `MCORE_BATCHING_RANDOM_FIRST`. Single seeds, with or without
``--long``, from `MCORE_BATCHING_RANDOM_SEEDS`, a list as ``17,40-45``.
"""

from __future__ import annotations

import collections
import itertools
import os
import time
from pathlib import Path
from typing import Any

import pytest
from kit.harness import Job, run_jobs
from kit.random_draw import job_of, report, verdict

SECONDS = 150.0
PER_ROUND = 48
MOST_REFUSED = 0.12
"""Of all drawn jobs; more, and what is drawn should be changed."""


def asked_for() -> list[int]:
    seeds: list[int] = []
    for part in filter(None, os.environ.get("MCORE_BATCHING_RANDOM_SEEDS", "").split(",")):
        first, _, last = part.partition("-")
        seeds += range(int(first), int(last or first) + 1)
    return seeds


@pytest.mark.parametrize("job", [*map(job_of, asked_for())], ids=str)
def test_seed_equals_reference(job: Job, ranks: list[dict[str, Any]]) -> None:
    kind, said = verdict(job, ranks)
    assert kind in ("equal", "refused", "not built"), report(job, said)


@pytest.mark.long
def test_random_jobs_equal_reference(tmp_path: Path) -> None:
    """Rounds of as many jobs as share launches, until the time is up."""
    seconds = float(os.environ.get("MCORE_BATCHING_RANDOM_SECONDS", SECONDS))
    seeds = itertools.count(int(os.environ.get("MCORE_BATCHING_RANDOM_FIRST", 1000)))
    kinds: collections.Counter[str] = collections.Counter()
    reports: list[str] = []
    started = time.monotonic()
    for number in itertools.count():
        jobs = [job_of(seed) for seed in itertools.islice(seeds, PER_ROUND)]
        for nproc in sorted({job.nproc for job in jobs}):
            together = [job for job in jobs if job.nproc == nproc]
            outcomes = run_jobs(together, tmp_path / f"{number}-{nproc}")
            for job in together:
                kind, said = verdict(job, outcomes[job.name])
                kinds[kind] += 1
                if kind == "wrong":
                    reports.append(report(job, said))
                if kind != "equal":
                    print(f"{job.name} {kind}: {report(job, said)}", flush=True)
        print(f"{dict(kinds)} in {time.monotonic() - started:.0f} s", flush=True)
        if time.monotonic() - started > seconds:
            break
    assert not reports, "\n\n".join(reports)
    assert kinds["refused"] <= MOST_REFUSED * kinds.total()
    assert kinds["near tie"] <= 0.05 * kinds.total()
