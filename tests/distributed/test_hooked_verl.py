"""The micro-batch loop of verl's Megatron engine with the hooked rearrangement, against its own.

verl is read from the folder that ``MCORE_BATCHING_VERL_SOURCE`` names: an unpacked wheel (0.9.1) or
a checkout. Both sides compute in float32 over rows of other contents; tolerances as in
`test_exactness`.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest
from kit.harness import Job

OUTPUTS = 2e-6
GRADIENTS = 2e-5

SOURCE = os.environ.get("MCORE_BATCHING_VERL_SOURCE", "")

if not SOURCE or importlib.util.find_spec("tensordict") is None:  # not a mark, as for slime
    pytest.skip(
        "MCORE_BATCHING_VERL_SOURCE does not name a folder with verl, or tensordict is missing",
        allow_module_level=True,
    )


def job_of(name: str, dims: dict[str, Any], **parameters: Any) -> Job:
    parameters = {"dims": dims, "reference": "dense", "source": SOURCE} | parameters
    return Job(f"verl-{name}", "kit.verl_engine:compare", 2, dims, parameters)


INTERLEAVED = {"pipeline_parallel": 2, "virtual_pipeline": 2}
JOBS = [
    job_of("dp2", {"data_parallel": 2}),
    job_of("pp2", {"pipeline_parallel": 2}),
    job_of("pp2-vpp2", INTERLEAVED),
    job_of("pp2-vpp2-too-few", INTERLEAVED, num_samples=3, group=4),
    job_of("tp2-sp", {"tensor_parallel": 2, "sequence_parallel": True}),
]


@pytest.mark.parametrize("job", JOBS, ids=str)
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
