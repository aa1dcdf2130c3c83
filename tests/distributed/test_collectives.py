"""The collectives among all ranks that a step makes beside Megatron's own: one more is a choice."""

from __future__ import annotations

from typing import Any

import pytest
from kit.harness import Job

DP2_PP2 = {"data_parallel": 2, "pipeline_parallel": 2}
OF_ALL = {
    # Taking stock, packing, filling.
    "plan": {"reduce": 3},
    # Collating, and after the pipeline.
    "train_step": {"reduce": 2},
    # Reading the arguments, collating, and after the pipeline.
    "forward_only": {"reduce": 3},
    "plans of all ranks": {"reduce": 1, "gather": 1},
    "plans of all ranks, again": {},
    # Taking stock, lengths, plan; then the samples' sizes and the samples, and that all are read.
    "plan, exchange": {"reduce": 4, "gather": 1, "all_to_all_single": 2},
    # What was measured travels with the stock.
    "plan, learnt costs": {"reduce": 3},
    "train_step, learnt costs": {"reduce": 2},
}
IN_REPLICA = {"gather": 1, "broadcast_object_list": 1}
EXPECTED = {
    "dp2": OF_ALL
    | {
        "plan, data on one rank of a replica": {"reduce": 3},
        # Taking stock and packing; filling and collating; after the pipeline, the log's figures.
        "stock step": {"reduce": 3},
        "stock step, learnt costs": {"reduce": 3},
        "stock evaluation": {"reduce": 3},
        "stock step, more micro-batches than hold the samples": {"reduce": 3},
        "stock step, data on some ranks": {"reduce": 3},
    },
    "dp2-pp2": OF_ALL
    | {
        "plan, data on one rank of a replica": {"reduce": 4, **IN_REPLICA},
        "stock step": {"reduce": 3},
        "stock step, learnt costs": {"reduce": 3},
        "stock evaluation": {"reduce": 3},
        "stock step, more micro-batches than hold the samples": {"reduce": 3},
        # Data is shared, then what is packed of it agreed on.
        "stock step, data on some ranks": {"reduce": 4, **IN_REPLICA},
    },
}


@pytest.mark.parametrize(
    "job",
    [
        Job(
            f"collectives-{name}",
            "kit.collectives:collectives_of_phases",
            nproc,
            dims,
            {"dims": dims, "reference": "dense"},
        )
        for name, nproc, dims in (("dp2", 2, {"data_parallel": 2}), ("dp2-pp2", 4, DP2_PP2))
    ],
    ids=str,
)
def test_collectives_of_each_phase(job: Job, ranks: list[dict[str, Any]]) -> None:
    expected = EXPECTED[job.name.removeprefix("collectives-")]
    for phases in ranks:
        assert phases == expected


@pytest.mark.parametrize(
    "job",
    [
        Job(
            f"planned-together-dp2-pp2-{batch_size}",
            "kit.collectives:planned_together",
            4,
            DP2_PP2,
            {"dims": DP2_PP2, "reference": "dense", "batch_size": batch_size},
        )
        for batch_size in (2, 7)  # in seven steps, and in two
    ],
    ids=str,
)
def test_each_step_of_a_rollout_is_planned_once(job: Job, ranks: list[dict[str, Any]]) -> None:
    """By one of the four ranks, not by each of them; a sample over the cap is the same error."""
    num_steps = len(ranks[0]["plans"])
    assert num_steps > 1
    assert sum(rank["made"] for rank in ranks) == num_steps * (4 // num_steps or 1)
    for rank in ranks:
        assert rank["made"] <= -(-num_steps // 4)
        assert rank["plans"] == rank["alone"] == ranks[0]["plans"]
        assert rank["error"] == "OversizeSampleError"
