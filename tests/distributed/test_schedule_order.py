"""The simulated order of passes is Megatron's own, read off real runs."""

from __future__ import annotations

from typing import Any

import pytest
from kit.harness import Job

from mcore_batching.planning import ParallelDims
from mcore_batching.planning.pipeline import pipeline_operations, stage_order

LAYOUTS: dict[str, dict[str, int]] = {
    "pp2": {"pipeline_parallel": 2},
    "pp3": {"pipeline_parallel": 3},
    "pp4": {"pipeline_parallel": 4},
    "pp2-vpp2": {"pipeline_parallel": 2, "virtual_pipeline": 2},
    "pp3-vpp2": {"pipeline_parallel": 3, "virtual_pipeline": 2},
    "pp4-vpp2": {"pipeline_parallel": 4, "virtual_pipeline": 2},
    "pp2-vpp3": {"pipeline_parallel": 2, "virtual_pipeline": 3},
    "pp2-vpp2-group3": {
        "pipeline_parallel": 2,
        "virtual_pipeline": 2,
        "microbatch_group_size": 3,
    },
}


def steps_of(dims: dict[str, int]) -> list[tuple[list[float], bool]]:
    """Every legal number of micro-batches up to three a stage, of unequal costs; both passes."""
    legal = [
        count
        for count in range(1, 3 * dims["pipeline_parallel"] + 1)
        if ParallelDims(**dims).is_legal_num_microbatches(count)
    ]
    costs = [[1.0 + slot % 3 for slot in range(count)] for count in legal]
    return [(each, False) for each in costs] + [(costs[-1], True)]


def order_of(name: str, suffix: str = "") -> Job:
    dims = LAYOUTS[name]
    return Job(
        f"order-{name}{suffix.replace('_', '-')}",
        f"kit.operations:operations{suffix}",
        dims["pipeline_parallel"],
        dims,
        {"dims": dims, "steps": steps_of(dims)},
    )


# Three processes are a launch of their own. Nor does the order of passes ask for transfers that
# would never end under NCCL.
JOBS = [
    pytest.param(
        order_of(name, suffix),
        marks=pytest.mark.long if suffix or dims["pipeline_parallel"] == 3 else (),
    )
    for suffix in ("", "_blocking")
    for name, dims in LAYOUTS.items()
]


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_simulated_order_is_megatrons(job: Job, ranks: list[Any]) -> None:
    dims = ParallelDims(**job.parameters["dims"])
    for number, (costs, forward_only) in enumerate(steps_of(job.parameters["dims"])):
        ran = [
            (stage, kind == "B", chunk, slot)
            for stage, steps in enumerate(ranks)
            for kind, chunk, slot, *_ in steps[number]
        ]
        simulated = pipeline_operations(costs, dims, forward_only=forward_only)
        assert [(o.stage, o.backward, o.chunk, o.slot) for o in simulated] == ran
        assert [step for s, *step in ran if s == 0] == [
            list(step) for step in stage_order(dims, 0, len(costs), forward_only=forward_only)
        ]
