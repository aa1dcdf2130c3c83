"""Frameworks hooked, against themselves with their own plan and batching.

Each is read from a folder that an environment variable names. verl's is a checkout or an unpacked
wheel; of its engine the micro-batch loop is run. Both sides compute in float32 over rows of other
contents; tolerances as in `test_exactness`.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest
from kit.harness import Job
from kit.slime import check_equal, compared_jobs

SOURCES = {
    "slime unplanned": ("MCORE_BATCHING_SLIME", "slime before its pull request 1860 (286750aa3)"),
    "slime": ("MCORE_BATCHING_SLIME_SCHEDULED", "slime since its pull request 1926 (624b824a8)"),
    "miles": ("MCORE_BATCHING_MILES", "miles since its pull request 1927 (31f1ca961)"),
    "verl": ("MCORE_BATCHING_VERL_SOURCE", "verl (0.9.1), with tensordict installed"),
}
SLIMES = ("slime unplanned", "slime", "miles")


def source_of(framework: str) -> str:
    return os.environ.get(SOURCES[framework][0], "")


def params(framework: str, jobs: list[Job]) -> list[Any]:
    """The framework's jobs, skipped where there is none."""
    variable, what = SOURCES[framework]
    lacks = framework == "verl" and importlib.util.find_spec("tensordict") is None
    marks: Any = pytest.mark.skip(f"{variable} does not name a folder with {what}")
    is_there = source_of(framework) and not lacks
    return [pytest.param(job, marks=() if is_there else marks) for job in jobs]


@pytest.mark.parametrize(
    "job",
    [each for of in SLIMES for each in params(of, compared_jobs(of, source_of(of)))],
    ids=str,
)
def test_slime_and_miles_equal_themselves(job: Job, ranks: list[dict[str, Any]]) -> None:
    check_equal(job, ranks)


def verl(name: str, dims: dict[str, Any], **parameters: Any) -> Job:
    parameters["source"] = source_of("verl")
    return Job.of(f"verl-{name}", "kit.verl_engine:compare", dims, **parameters)


INTERLEAVED = {"pipeline_parallel": 2, "virtual_pipeline": 2}
VERL = [
    verl("dp2", {"data_parallel": 2}),
    verl("pp2", {"pipeline_parallel": 2}),
    verl("pp2-vpp2", INTERLEAVED),
    verl("pp2-vpp2-too-few", INTERLEAVED, num_samples=3, group=4),
    verl("tp2-sp", {"tensor_parallel": 2, "sequence_parallel": True}),
]
OUTPUTS = 2e-6
GRADIENTS = 2e-5


@pytest.mark.parametrize("job", params("verl", VERL), ids=str)
def test_verl_equals_itself(job: Job, ranks: list[dict[str, Any]]) -> None:
    assert max(rank["outputs"] for rank in ranks) < OUTPUTS
    assert max(rank["gradients"] for rank in ranks) < GRADIENTS
    assert len({rank["counts"][1] for rank in ranks}) == 1
    for rank in ranks:
        own, hooked = rank["losses"]
        assert hooked == pytest.approx(own, rel=OUTPUTS)
        assert rank["num_outputs"] == (rank["samples"] if rank["last_stage"] else 0)
        if rank["last_stage"] and "group" not in job.parameters:
            assert rank["tokens"] == rank["expected_tokens"]
        if "group" in job.parameters:
            assert rank["counts"][1] == 4 > rank["samples"]
