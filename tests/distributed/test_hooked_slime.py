"""slime's own modules with the hooked batching, against slime with its own.

Read from checkouts of slime: ``MCORE_BATCHING_SLIME`` names one before its pull request 1860
(commit 286750aa3), ``MCORE_BATCHING_SLIME_SCHEDULED`` one since its pull request 1926 (commit
624b824a8). Both sides compute in float32 over rows of other contents; tolerances as in
`test_exactness`.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from kit.harness import Job

LOG_PROBS = 2e-6
GRADIENTS = 2e-5
REPORTED = 2e-6

CHECKOUTS = {
    "kit.slime:compare": ("MCORE_BATCHING_SLIME", "286750aa3"),
    "kit.slime_scheduled:compare": ("MCORE_BATCHING_SLIME_SCHEDULED", "624b824a8"),
}
OLD, SCHEDULED = CHECKOUTS
SOURCES = {function: os.environ.get(name, "") for function, (name, _) in CHECKOUTS.items()}


def job_of(function: str, name: str, dims: dict[str, Any], **parameters: Any) -> Job:
    parameters = {"dims": dims, "reference": "dense", "source": SOURCES[function]} | parameters
    age = "slime" if function == OLD else "slime-scheduled"
    return Job(f"{age}-{name}", function, 2, dims, parameters)


def jobs_of(function: str) -> list[Any]:
    """A job per layout, or a skipped one: its job would be launched beside those of other tests."""
    if not SOURCES[function]:
        variable, commit = CHECKOUTS[function]
        reason = f"{variable} does not name a checkout of slime ({commit})"
        return [pytest.param(None, marks=pytest.mark.skip(reason=reason), id=variable)]
    sequence = {"tensor_parallel": 2, "sequence_parallel": True}
    gspo = {"advantage_estimator": "gspo"}
    return [
        job_of(function, "dp2-tokens", {"data_parallel": 2}, per_token_loss=True),
        job_of(function, "dp2-samples", {"data_parallel": 2}, per_token_loss=False),
        job_of(function, "dp2-gspo", {"data_parallel": 2}, per_token_loss=True, **gspo),
        job_of(function, "cp2-tokens", {"context_parallel": 2}, per_token_loss=True),
        job_of(function, "pp2-samples", {"pipeline_parallel": 2}, per_token_loss=False),
        job_of(function, "tp2-sp-tokens", sequence, per_token_loss=True),
    ]


@pytest.mark.parametrize("job", jobs_of(OLD), ids=str)
def test_slime_equals_itself(job: Job, ranks: list[dict[str, Any]]) -> None:
    assert max(rank["log_probs"] for rank in ranks) < LOG_PROBS
    assert max(rank["gradients"] for rank in ranks) < GRADIENTS
    for rank in ranks:
        if job.dims.get("data_parallel", 1) > 1:
            assert rank["placeholders"] > 0
        if not rank["last_stage"]:
            continue
        own, hooked = rank["reported"]
        assert own.keys() == hooked.keys()
        # By samples, slime counts a placeholder as one in the denominator of what it *reports*.
        # Nothing that get_batch returns reaches that count. Gradients do not depend on it.
        counted = 1.0
        if not job.parameters["per_token_loss"]:
            counted = 1 + rank["placeholders"] / rank["samples"]
        for name, value in own.items():
            assert hooked[name] * counted == pytest.approx(value, rel=REPORTED, abs=1e-7), name


@pytest.mark.parametrize("job", jobs_of(SCHEDULED), ids=str)
def test_slime_that_plans_in_its_rollout_manager_equals_itself(
    job: Job, ranks: list[dict[str, Any]]
) -> None:
    assert max(rank["log_probs"] for rank in ranks) < LOG_PROBS
    assert max(rank["gradients"] for rank in ranks) < GRADIENTS
    for rank in ranks:
        assert rank["placeholders"] >= job.dims.get("data_parallel", 1)
        assert rank["counts"][0] < 8
        own, hooked = rank["reported"]
        assert own.keys() == hooked.keys()
        assert bool(own) == rank["last_stage"]
        for name, value in own.items():
            assert hooked[name] == pytest.approx(value, rel=REPORTED, abs=1e-7), name
