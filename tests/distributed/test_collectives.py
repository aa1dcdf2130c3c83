"""The collectives among all ranks that a step makes beside Megatron's own: one more is a choice."""

from __future__ import annotations

from typing import Any

import pytest
from kit.harness import Job

DP2_PP2 = {"data_parallel": 2, "pipeline_parallel": 2}
# Sizes, then samples.
EXCHANGE = {"all_to_all_single": 2}
# Reading, with all lengths; the plan, and its broadcast; its arrival; that all samples are here.
PLAN = {"reduce": 4, "gather": 1, "broadcast_bytes": 1, **EXCHANGE}
# Collating, and after the pipeline; the next step's lengths, where there are any, are gathered too.
STOCK_STEP = PLAN | {"reduce": 6}
OF_ALL = {
    "plan": PLAN,
    # Collating, and after the pipeline.
    "train_step": {"reduce": 2},
    # Reading the arguments, collating, and after the pipeline.
    "forward_only": {"reduce": 3},
    "plan of all ranks": {},
    # Reading, packing, filling; all ranks' lengths, and their micro-batches.
    "plan, samples stay": {"reduce": 3, "gather": 2},
    # What was measured travels with the settings.
    "plan, learnt costs": PLAN,
    "train_step, learnt costs": {"reduce": 2},
    "stock step": STOCK_STEP,
    "stock step, learnt costs": STOCK_STEP,
    "stock evaluation": STOCK_STEP,
}
# Who has data, and the data; then lengths are gathered again.
SHARED = {"gather": 3, "broadcast_object_list": 1}
EXPECTED = {
    "dp2": OF_ALL
    | {
        "plan, data on one rank of a replica": PLAN,
        "stock step, data on some ranks": STOCK_STEP,
    },
    "dp2-pp2": OF_ALL
    | {
        "plan, data on one rank of a replica": PLAN | {"reduce": 6, **SHARED},
        "stock step, data on some ranks": STOCK_STEP | {"reduce": 8, **SHARED},
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
    half = len(ranks) // job.dims.get("pipeline_parallel", 1)
    for phases in ranks[-half:]:  # outputs go back where there are any, on the last stage
        assert phases["forward_only"].pop("all_to_all_single") == 4
    for phases in ranks:
        assert phases == expected
