"""Losses that balance experts weigh the same in every layout: as on one process, by the rows."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import pytest
from kit.harness import Job

GRADIENTS = 2e-5
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2-ep2": (2, {"data_parallel": 2, "expert_parallel": 2}),
    "cp2": (2, {"context_parallel": 2}),
    "cp4": (4, {"context_parallel": 4}),
    "tp2-sp-ep2": (2, {"tensor_parallel": 2, "sequence_parallel": True, "expert_parallel": 2}),
}
LOSSES = {"aux_loss": 3e-3, "seq_aux_loss": 2e-3}
if tuple(map(int, version("megatron-core").split(".")[:2])) >= (0, 19):
    LOSSES["z_loss"] = 1e-3  # too weak before, and refused
ROWS_PADDED = {"dynamic_batch_pad_total_to": 32}


def job(name: str, losses: dict[str, float], planner: dict[str, Any]) -> Job:
    nproc, dims = LAYOUTS[name]
    parameters = {"dims": dims, "reference": "moe", "losses": losses, "planner": planner}
    label = "-".join(["balanced", name, *losses, *(["padded"] if planner else [])])
    return Job(label, "kit.auxiliary_losses:compare", nproc, dims, parameters)


JOBS = [
    *(job(name, LOSSES, {}) for name in LAYOUTS),
    *(job("cp2", {loss: value}, {}) for loss, value in LOSSES.items()),
    # Padding at the end of rows lies unevenly on context-parallel ranks.
    *(job(name, LOSSES, ROWS_PADDED) for name in ("cp2", "tp2-sp-ep2")),
]


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_gradients_are_those_of_the_losses_definitions(
    job: Job, ranks: list[dict[str, float]]
) -> None:
    for rank in ranks:
        assert rank["share"] > 0.1  # a factor of 2 would show
        assert rank["gradients"] < GRADIENTS
        assert rank["grad_norm"] < GRADIENTS
