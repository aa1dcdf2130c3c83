"""The simulated order of passes is Megatron's own, read off real runs; so is who waits for whom."""

from __future__ import annotations

from importlib.metadata import version
from itertools import cycle, islice
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


def order_of(name: str) -> Job:
    dims = LAYOUTS[name]
    parameters = {"dims": dims, "steps": steps_of(dims)}
    return Job(
        f"order-{name}", "kit.operations:operations", dims["pipeline_parallel"], dims, parameters
    )


# Three processes are a launch of their own.
JOBS = [
    pytest.param(order_of(name), marks=pytest.mark.long if dims["pipeline_parallel"] == 3 else ())
    for name, dims in LAYOUTS.items()
]


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_simulated_order_is_megatrons(job: Job, ranks: list[Any]) -> None:
    dims = ParallelDims(**job.parameters["dims"])
    for number, (costs, forward_only) in enumerate(steps_of(job.parameters["dims"])):
        ran = [
            (stage, kind, chunk, slot)
            for stage, steps in enumerate(ranks)
            for kind, chunk, slot, *_ in steps[number]
        ]
        schedule = Schedule(dims=dims, forward_only=forward_only)
        simulated = Clock(costs, schedule).operations()
        assert [(o.stage, o.kind, o.chunk, o.slot) for o in simulated] == ran
        order = schedule.order(0, len(costs))
        assert [tuple(step) for stage, *step in ran if stage == 0] == order


BEFORE_0_18 = tuple(map(int, version("megatron-core").split(".")[:2])) < (0, 18)
SECONDS_PER_COST = 0.02


def clock_of(name: str) -> Job:
    dims = LAYOUTS[name]
    group = dims.get("microbatch_group_size", dims["pipeline_parallel"])
    costs = list(islice(cycle([5.0, 1.0, 1.0, 3.0]), 2 * group))
    parameters = {"dims": dims, "steps": [(costs, False), (costs, True)]}
    parameters["seconds_per_cost"] = SECONDS_PER_COST
    return Job(
        f"clock-{name}",
        "kit.operations:operations",
        dims["pipeline_parallel"],
        dims,
        parameters,
    )


@pytest.mark.parametrize(
    "job",
    [
        pytest.param(clock_of("pp2-vpp2"), marks=pytest.mark.long),
        clock_of("pp2-vpp2-group3"),
        pytest.param(clock_of("pp4-vpp2"), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_no_pass_ends_before_the_simulation_says(job: Job, ranks: list[Any]) -> None:
    """Passes sleep what they cost. So Megatron has every wait that the simulation has."""
    dims = ParallelDims(**job.parameters["dims"], waits_for_sends=not BEFORE_0_18)
    chunks = dims.virtual_pipeline
    for number, (costs, forward_only) in enumerate(job.parameters["steps"]):
        began = min(start for steps in ranks for *_, start, _ in steps[number])
        ended = {
            (stage, kind, chunk, slot): end - began
            for stage, steps in enumerate(ranks)
            for kind, chunk, slot, _, end in steps[number]
        }
        # Each chunk sleeps the whole cost.
        whole = [chunks * cost for cost in costs]
        schedule = Schedule(dims=dims, forward_only=forward_only)
        for o in Clock(whole, schedule).operations():
            end = ended[o.stage, o.kind, o.chunk, o.slot]
            assert end >= SECONDS_PER_COST * o.end * (1 - 1e-9), o


def asleep(name: str, **dims: int) -> Job:
    parameters = {"dims": dims, "seconds_per_unit": 5e-5}
    return Job(f"asleep-{name}", "kit.operations:asleep", 4, dims, parameters)


DP2_PP2 = {"data_parallel": 2, "pipeline_parallel": 2}


@pytest.mark.parametrize(
    "job",
    [
        asleep("dp2-pp2", **DP2_PP2),
        pytest.param(asleep("dp2-pp2-vpp2", **DP2_PP2, virtual_pipeline=2), marks=pytest.mark.long),
        pytest.param(asleep("dp4", data_parallel=4), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_ranks_that_share_a_row_wait_for_each_other_as_simulated(
    job: Job, ranks: list[Any]
) -> None:
    """Passes sleep what they cost: none can end before the simulation says, on a busy machine
    neither."""
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
