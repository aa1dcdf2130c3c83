"""The simulated order of passes is Megatron's own, read off real runs; so is who waits for whom."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import pytest
from kit.harness import Job

from mcore_batching.planning import ParallelDims
from mcore_batching.planning.clock import Clock
from mcore_batching.planning.schedule import Schedule

LAYOUTS: dict[str, dict[str, int]] = {
    "pp2": {"pipeline_parallel": 2},
    "pp3": {"pipeline_parallel": 3},
    "pp4": {"pipeline_parallel": 4},
    "pp2-vpp2": {"pipeline_parallel": 2, "virtual_pipeline": 2},
    "pp3-vpp2": {"pipeline_parallel": 3, "virtual_pipeline": 2},
    "pp4-vpp2": {"pipeline_parallel": 4, "virtual_pipeline": 2},
    "pp2-vpp3": {"pipeline_parallel": 2, "virtual_pipeline": 3},
    "pp2-vpp2-group3": {"pipeline_parallel": 2, "virtual_pipeline": 2, "microbatch_group_size": 3},
}


def steps_of(dims: dict[str, int]) -> list[tuple[int, bool]]:
    """Every legal number of micro-batches up to three a stage; both passes."""
    legal = [
        count
        for count in range(1, 3 * dims["pipeline_parallel"] + 1)
        if ParallelDims(**dims).is_legal_num_microbatches(count)
    ]
    return [(count, False) for count in legal] + [(legal[-1], True)]


def order_of(name: str) -> Any:
    steps = steps_of(LAYOUTS[name])
    job = Job.of(f"order-{name}", "kit.operations:operations", LAYOUTS[name], steps=steps)
    # Three processes are a launch of their own.
    return pytest.param(job, marks=pytest.mark.long if job.nproc == 3 else ())


@pytest.mark.parametrize("job", map(order_of, LAYOUTS), ids=str)
def test_simulated_order_is_megatrons(job: Job, ranks: list[Any]) -> None:
    dims = ParallelDims(**job.parameters["dims"])
    for number, (count, forward_only) in enumerate(steps_of(job.parameters["dims"])):
        costs = [1.0 + slot % 3 for slot in range(count)]
        ran = [
            (stage, kind, chunk, slot)
            for stage, steps in enumerate(ranks)
            for kind, chunk, slot, *_ in steps[number]
        ]
        schedule = Schedule(dims=dims, forward_only=forward_only)
        simulated = Clock(costs, schedule).operations()
        assert [(o.stage, o.kind, o.chunk, o.slot) for o in simulated] == ran
        order = schedule.order(0, count)
        assert [tuple(step) for stage, *step in ran if stage == 0] == order


BEFORE_0_18 = tuple(map(int, version("megatron-core").split(".")[:2])) < (0, 18)


def asleep(name: str, *, is_long: bool = True, **dims: int) -> Any:
    # As many rows as samples; passes sleep for longer than they compute.
    flags = {"seconds_per_unit": 5e-4, "dynamic_batch_max_samples_per_row": 1}
    job = Job.of(f"asleep-{name}", "kit.operations:asleep", dims, **flags)
    return pytest.param(job, marks=pytest.mark.long if is_long else ())


DP2_PP2 = {"data_parallel": 2, "pipeline_parallel": 2}


@pytest.mark.parametrize(
    "job",
    [
        asleep("dp2-pp2", **DP2_PP2),
        asleep("dp2-pp2-vpp2", **DP2_PP2, virtual_pipeline=2),
        asleep("group3", is_long=False, **DP2_PP2, virtual_pipeline=2, microbatch_group_size=3),
        asleep("dp4", data_parallel=4),
    ],
    ids=str,
)
def test_no_pass_ends_before_the_simulation_says(job: Job, ranks: list[Any]) -> None:
    """Passes sleep what they cost. So Megatron has every wait that the simulation has, and ranks
    that share a row wait for each other."""
    dims = job.parameters["dims"]
    interleaved = dims.get("virtual_pipeline", 1) > 1
    for rows in ranks[0]:
        clocks = [rank[rows] for rank in ranks]
        assert {c["waits_for_sends"] for c in clocks} == {not (interleaved and BEFORE_0_18)}
        assert {size for clock in clocks for size in clock["sizes"]} > {1} or rows == "one rank"
        (steps,) = zip(*(clock["passes"] for clock in clocks), strict=True)
        began = min(start for passes in steps for *_, start, _ in passes)
        for clock, passes in zip(clocks, steps, strict=True):
            assert [list(what) for *what, _, _ in passes] == clock["order"]
            for (*_, end), expected in zip(passes, clock["pass_ends"], strict=True):
                assert end - began >= expected * (1 - 1e-9)
        ended = max(passes[-1][-1] for passes in steps)
        assert ended - began >= clocks[0]["predicted"] * (1 - 1e-9)
