"""What becomes of a drawn job, and how a failure is said: with its seed as a command."""

from __future__ import annotations

import json
from typing import Any

from kit.harness import Job, JobFailedError
from kit.random_draw import drawn_job

NEAR_TIE = 5e-6
"""Between two experts of which a router takes one, in logits: rounding may choose the other."""


def job_of(seed: int, name: str | None = None, **forced: Any) -> Job:
    """The job of a seed, but for choices that are forced; see `drawn_job`."""
    drawn = drawn_job(seed, **forced)
    parameters = {"job": drawn}
    name = name or f"random-{seed}"
    return Job(name, "kit.random_jobs:compare", drawn["nproc"], None, parameters)


def verdict(job: Job, outcome: list[dict[str, Any]] | JobFailedError) -> tuple[str, str]:
    """``"equal"``, ``"refused"``, ``"not built"``, ``"near tie"`` or ``"wrong"``, and why."""
    if isinstance(outcome, JobFailedError):
        return "wrong", str(outcome)
    for kind in ("failed", "not built", "refused"):
        said = [rank[kind] for rank in outcome if kind in rank]
        if said and (kind == "failed" or len(said) == len(outcome)):
            return ("wrong" if kind == "failed" else kind), said[0]
        if said:
            return "wrong", f"refused on {len(said)} of {len(outcome)} ranks: {said[0]}"
    if len({str(rank["counts"]) for rank in outcome}) > 1:
        return "wrong", f"counts differ: {[rank['counts'] for rank in outcome]}"
    found = {
        f"rank {number}": {n: round(v, 2) for n, v in rank["differences"].items() if v > 1}
        | ({"wrong": rank["wrong"]} if rank["wrong"] else {})
        for number, rank in enumerate(outcome)
    }
    found = {rank: values for rank, values in found.items() if values}
    if not found:
        return "equal", ""
    said = "times the tolerance: " + json.dumps(found)[:3000]
    return ("near tie" if outcome[0]["gap"] < NEAR_TIE else "wrong"), said


def report(job: Job, said: str) -> str:
    """The seed as a command, the job as a line of JSON, and what was wrong."""
    seed = job.parameters["job"]["seed"]
    return (
        f"MCORE_BATCHING_RANDOM_SEEDS={seed} pytest tests/distributed/test_random_exactness.py\n"
        f"{json.dumps(job.parameters['job'])}\n{said}"
    )
