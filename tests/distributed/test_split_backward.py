"""Backward passes split in two: the same gradients, sooner sent on."""

from __future__ import annotations

from typing import Any

import pytest
from kit.harness import Job

PP2 = {"pipeline_parallel": 2}
PP4 = {"pipeline_parallel": 4}
DP2_PP2 = {"data_parallel": 2, "pipeline_parallel": 2}
TP2_PP2 = {"tensor_parallel": 2, "pipeline_parallel": 2}
PP2_VPP2 = {"pipeline_parallel": 2, "virtual_pipeline": 2}
SMALL_BUCKETS = {"overlap_grad_reduce": True, "bucket_size": 3000}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "pp4": (PP4, {}),
    "dp2-pp2-overlap": (DP2_PP2, {"ddp": SMALL_BUCKETS}),
    "dp2-pp2-distributed-optimizer": (
        DP2_PP2,
        {"ddp": SMALL_BUCKETS | {"use_distributed_optimizer": True}},
    ),
    "tp2-pp2": (TP2_PP2, {}),
    "tp2-pp2-sp": (TP2_PP2 | {"sequence_parallel": True}, {}),
    "pp2-vpp2": (PP2_VPP2, {}),
    "pp2-tied": (PP2, {"tied": True}),
    "pp2-ep2": (DP2_PP2 | {"expert_parallel": 2}, {"kind": "moe"}),
    "pp2-full": (PP2, FULL),
    "pp2-biases": (PP2, {"add_bias_linear": True}),
    "pp2-mean": (PP2, {"calculate_per_token_loss": False}),
}


def jobs() -> list[Any]:
    made = []
    for name, (dims, settings) in CASES.items():
        nproc = 1
        for key in ("data_parallel", "pipeline_parallel", "tensor_parallel", "context_parallel"):
            nproc *= dims.get(key, 1)
        job = Job(
            f"split-{name}",
            "kit.split_backward:compare_steps",
            nproc,
            dims,
            {"dims": dims, **settings},
        )
        made.append(job)
    return made


@pytest.mark.parametrize("job", jobs(), ids=str)
def test_all_passes_split_is_equal_to_the_bit(job: Job, ranks: list[Any]) -> None:
    for rank in ranks:
        assert rank["peak_bytes"] > 0
        assert (rank["gradients"], rank["weights"]) == (0.0, 0.0)
