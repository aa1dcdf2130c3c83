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

SOURCES = {
    "slime unplanned": ("MCORE_BATCHING_SLIME", "slime before its pull request 1860 (286750aa3)"),
    "slime": ("MCORE_BATCHING_SLIME_SCHEDULED", "slime since its pull request 1926 (624b824a8)"),
    "miles": ("MCORE_BATCHING_MILES", "miles since its pull request 1927 (31f1ca961)"),
    "verl": ("MCORE_BATCHING_VERL_SOURCE", "verl (0.9.1), with tensordict installed"),
}
DP2, PP2, CP2 = ({f"{name}_parallel": 2} for name in ("data", "pipeline", "context"))
TP2_SP = {"tensor_parallel": 2, "sequence_parallel": True}
VPP2 = PP2 | {"virtual_pipeline": 2}
TOKENS, SAMPLES = {"per_token_loss": True}, {"per_token_loss": False}
SLIME: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dp2-tokens": (DP2, TOKENS),
    "dp2-samples": (DP2, SAMPLES),
    "dp2-gspo": (DP2, TOKENS | {"advantage_estimator": "gspo"}),
    "cp2-tokens": (CP2, TOKENS),
    "pp2-samples": (PP2, SAMPLES),
    "tp2-sp-tokens": (TP2_SP, TOKENS),
}
"""Parallel dims and settings of `kit.slime.compare`."""
VERL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dp2": (DP2, {}),
    "pp2": (PP2, {}),
    "pp2-vpp2": (VPP2, {}),
    "pp2-vpp2-too-few": (VPP2, {"num_samples": 3, "group": 4}),
    "tp2-sp": (TP2_SP, {}),
}


def jobs_of(framework: str) -> list[Any]:
    variable, what = SOURCES[framework]
    given = {"source": os.environ.get(variable, "")}
    module, cases = ("verl_engine", VERL) if framework == "verl" else ("slime", SLIME)
    given |= {"of": framework} if cases is SLIME else {}
    lacks = cases is VERL and importlib.util.find_spec("tensordict") is None
    skip: Any = pytest.mark.skip(f"{variable} does not name a folder with {what}")
    marks = () if given["source"] and not lacks else skip
    name = framework.replace(" ", "-")
    return [
        pytest.param(
            Job.of(f"{name}-{case}", f"kit.{module}:compare", dims, **given, **settings),
            marks=marks,
        )
        for case, (dims, settings) in cases.items()
    ]


@pytest.mark.parametrize("job", [job for name in SOURCES for job in jobs_of(name)], ids=str)
def test_a_framework_equals_itself(job: Job, ranks: list[Any]) -> None:
    """The job raises where it does not."""
    assert len(ranks) == job.nproc
