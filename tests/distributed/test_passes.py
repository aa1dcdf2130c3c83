"""Passes of real runs, beside the simulation of them, and the costs that training learns by them.

The simulated order is Megatron's own, and so is who waits for whom. Costs are learnt of stages that
cost what a hidden model says: passes move a clock of their own process, so that times are what they
are meant to be, however busy the machine. Rows that ranks share take ten times as long there, as if
ranks waited for each other.
"""

from __future__ import annotations

import json
import random
import tempfile
from dataclasses import replace
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from kit.harness import Job
from kit.model import adam, arguments, quick_model
from kit.objective import packed_objective
from kit.operations import passes_of
from kit.samples import rollout_of
from megatron.core import parallel_state

from mcore_batching.megatron import cpu_emulation, get_data_iterator, schedule_of, train_step
from mcore_batching.planning import CostModel, ParallelDims
from mcore_batching.planning.clock import Clock
from mcore_batching.planning.plans.records import read_records
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


CAP = 96
NUM_STEPS = 7
LEARNT_BY = 5
"""Steps after which the model is to be known."""
SECONDS_PER_UNIT = 1e-5
ATTENTION = CostModel(
    linear=1.0, quadratic=0.08, per_micro_batch=4.0, context_parallel_overhead=0.6
)
LAUNCHES = CostModel(linear=1.0, quadratic=0.02, per_micro_batch=40.0)


def hidden_costs(name: str, step: int) -> CostModel:
    """The model of a step: the costs of attention and of a micro-batch grow."""
    model, grown = {"attention": ATTENTION, "launches": LAUNCHES}[name], 1.03**step
    quadratic, fixed = grown * model.quadratic, grown * model.per_micro_batch
    return replace(model, quadratic=quadratic, per_micro_batch=fixed)


def samples(seed: int) -> dict[str, list[Any]]:
    """Random samples of log-normal length, some of which do not fit on one rank."""
    draw = random.Random(seed)
    lengths = [max(2, min(CAP, round(draw.lognormvariate(2.7, 0.8)))) for _ in range(24)]
    lengths[::8] = [draw.randint(CAP // 2, 2 * CAP) for _ in lengths[::8]]
    return rollout_of([(length, 1) for length in lengths])


def learn(dims: dict[str, int], name: str) -> list[dict[str, Any]]:
    """Train while the costs are hidden; what each step was planned by, and how it went.

    The first step of every rank takes 50 times as long, as if it compiled.
    """
    model = quick_model(dims, 2 * CAP)
    args = arguments(
        dims,
        max_tokens_per_gpu=CAP,
        dynamic_batch_context_parallel=2,
        dynamic_batch_cost_model="auto",
        dynamic_batch_plan_effort=60,
        dynamic_batch_record=tempfile.mkdtemp(),  # the first rank's alone is written to
    )
    optimizer, seen = adam(model, distributed=False), []
    now = [1000.0 * dist.get_rank()]  # no two clocks agree
    clock = SimpleNamespace(perf_counter=lambda: now[0])
    for step in range(NUM_STEPS):
        data = samples(1000 * step + parallel_state.get_data_parallel_rank())
        iterators, counts = get_data_iterator(args, model, data)
        schedule, costs = schedule_of(iterators), hidden_costs(name, step)
        sizes = schedule.row_sizes(0)
        seconds = []
        for nodes, size in zip(map(schedule.nodes, schedule.steps[0], sizes), sizes, strict=True):
            row = [end - start for start, end in pairwise(nodes.offsets)][: len(nodes.paths)]
            units = costs.on_ranks(size).micro_batch(row) / dims.virtual_pipeline
            slower = (1 if step else 50) * (10 if size > 1 else 1)
            seconds.append(slower * SECONDS_PER_UNIT * units)

        def takes(backward: bool, slot: int, seconds: Any = seconds, costs: Any = costs) -> None:
            now[0] += seconds[slot] * (costs.backward_ratio if backward else 1.0)

        plan, lengths = schedule.step_plan(0)
        again, _ = get_data_iterator(args, model, data)
        learnt = schedule.settings.learnt
        seen.append(
            {
                "plans": [schedule.plan_digest, schedule_of(again).plan_digest],
                "costs": json.loads(schedule.settings.cost_model.to_json()),
                "speed": learnt and learnt.seconds_per_unit,
                "rows": [[lengths[i] for i in row] for rank in plan.micro_batches for row in rank],
                "sizes": [*sizes],
            }
        )
        with (
            mock.patch.object(cpu_emulation, "time", clock),
            passes_of(model, takes),
        ):
            train_step(packed_objective, args, model, iterators, counts, optimizer)
    for file in Path(args.dynamic_batch_record).glob("*.jsonl"):
        seen[-1]["recorded"] = file.read_text()
    return seen


def learning(name: str, *, is_long: bool = False, **more: int) -> Any:
    made = Job.of(f"learn-{name}", "test_passes:learn", DP2_PP2 | more, name=name)
    return pytest.param(made, marks=pytest.mark.long if is_long else ())


@pytest.mark.parametrize(
    "job", [learning("attention"), learning("launches", is_long=True, virtual_pipeline=2)], ids=str
)
def test_a_hidden_model_is_known_within_five_steps(
    job: Job, ranks: list[Any], tmp_path: Path
) -> None:
    """The same on every rank, and recorded; rows that ranks share teach nothing."""
    (tmp_path / "steps.jsonl").write_text(ranks[0][-1].pop("recorded"))
    records = read_records(tmp_path)
    assert {size for rank in ranks for step in rank for size in step["sizes"]} == {1, 2}
    for number, (record, *steps) in enumerate(zip(records, *ranks, strict=True)):
        (step,) = {json.dumps(step | {"sizes": []}) for step in steps}
        first = json.loads(step)
        assert first["plans"] == [first["plans"][0]] * 2
        # The first step, which compiles, counts for nothing; a later one is read for the next.
        read = [size for rank in ranks for step in rank[1:number] for size in step["sizes"]]
        assert (first["speed"] is None) == (1 not in read)
        costs, hidden = CostModel(**first["costs"]), hidden_costs(job.parameters["name"], number)
        assert (record.plan.cost_model, record.seconds_per_unit) == (costs, first["speed"])
        assert costs.context_parallel_overhead == 0.1  # as it was
        for row in first["rows"] if number >= LEARNT_BY else []:
            scale = first["speed"] / SECONDS_PER_UNIT
            found = scale * costs.micro_batch(row)
            assert found == pytest.approx(hidden.micro_batch(row), rel=0.1)
