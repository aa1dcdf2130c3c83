"""Simulated pipeline schedules against a reference that shares no code with them.

The reference states a schedule by what a stage may hold: it goes on with forward passes while it
holds fewer than so many micro-batches (of chunks) whose backward pass is still to come, and else
runs the oldest backward pass that is due. Every pass is a node of a graph with edges from the pass
that its stage ran before, from the pass whose output it needs, and from those at whose end the
transfers end that its stage waits for; it ends at the end of the longest path. That Megatron runs
these orders, and ends no sooner, is shown on recorded runs, in tests/distributed.
"""

from __future__ import annotations

from dataclasses import dataclass
from graphlib import TopologicalSorter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron_transfers import Node, waited_for
from planning_cases import examples, megatron_runs

from mcore_batching.planning import ParallelDims, ParallelDimsError
from mcore_batching.planning.pass_order import stage_order
from mcore_batching.planning.pipeline import (
    Operation,
    inflight_tokens,
    pipeline_operations,
    pipeline_time,
)


@dataclass(frozen=True)
class Run:
    """One simulated step."""

    costs: list[float]
    dims: ParallelDims
    backward_ratio: float
    forward_only: bool
    transfer: float

    def operations(self) -> list[Operation]:
        return pipeline_operations(
            self.costs,
            self.dims,
            backward_ratio=self.backward_ratio,
            forward_only=self.forward_only,
            transfer=self.transfer,
        )


@st.composite
def pipelines(draw: st.DrawFn, most_stages: int = 8) -> ParallelDims:
    stages = draw(st.sampled_from([each for each in (1, 2, 3, 4, 5, 8) if each <= most_stages]))
    chunks = draw(st.integers(1, 3)) if stages > 1 else 1
    group = draw(st.none() | st.integers(stages, stages + 3)) if chunks > 1 else None
    return ParallelDims(
        pipeline_parallel=stages, virtual_pipeline=chunks, microbatch_group_size=group
    )


def costs_for(dims: ParallelDims) -> st.SearchStrategy[list[float]]:
    """Legal numbers of micro-batches of unequal cost, free ones among them."""
    most = 2 * dims.group_size + 6
    counts = [count for count in range(1, most) if megatron_runs(count, dims)]
    cost = st.sampled_from([0.0, 0.1, 1.0, 3.3, 7.25, 50.0])
    return st.sampled_from(counts).flatmap(lambda n: st.lists(cost, min_size=n, max_size=n))


@st.composite
def runs(draw: st.DrawFn, *, plain: bool = False) -> Run:
    dims = draw(pipelines())
    return Run(
        costs=draw(costs_for(dims)),
        dims=dims,
        backward_ratio=draw(st.sampled_from([2.0, 2.0, 1.0, 0.0, 3.7])),
        forward_only=draw(st.booleans()),
        transfer=0.0 if plain else draw(st.sampled_from([0.0, 0.5, 30.0])),
    )


def reference_order(dims: ParallelDims, stage: int, count: int, forward_only: bool) -> list[Node]:
    """The passes of a stage by what it may hold."""
    chunks, stages = dims.virtual_pipeline, dims.pipeline_parallel
    group = dims.microbatch_group_size or stages
    to_run = [(chunk, slot) for slot in range(count) for chunk in range(chunks)]
    # Chunk by chunk within each group of micro-batches; one chunk is in the order of slots.
    forwards = sorted(to_run, key=lambda each: (each[1] // group, each[0], each[1]))
    backwards = sorted(to_run, key=lambda each: (each[1] // group, -each[0], each[1]))
    if forward_only:
        return [(stage, "F", *each) for each in forwards]
    below = stages - stage - 1
    may_hold = 1 + (below if chunks == 1 else 2 * below + (chunks - 1) * group)
    order: list[Node] = []
    held = 0
    while forwards or backwards:
        if forwards and held < may_hold:
            order.append((stage, "F", *forwards.pop(0)))
            held += 1
        else:
            order.append((stage, "B", *backwards.pop(0)))
            held -= 1
    return order


def needs(node: Node, dims: ParallelDims) -> Node | None:
    """What must have run, wherever, before a pass can begin."""
    stage, kind, chunk, slot = node
    last_stage, last_chunk = dims.pipeline_parallel - 1, dims.virtual_pipeline - 1
    if kind == "F" and stage > 0:
        return (stage - 1, "F", chunk, slot)
    if kind == "F":
        return (last_stage, "F", chunk - 1, slot) if chunk > 0 else None
    if stage < last_stage:
        return (stage + 1, "B", chunk, slot)
    if chunk < last_chunk:
        return (0, "B", chunk + 1, slot)
    return (stage, "F", chunk, slot)


def reference_times(run: Run) -> dict[Node, tuple[float, float]]:
    """Start and end of every pass: longest paths."""
    graph: dict[Node, dict[Node, float]] = {}
    orders = [
        reference_order(run.dims, stage, len(run.costs), run.forward_only)
        for stage in range(run.dims.pipeline_parallel)
    ]
    waits = waited_for(orders, run.dims) if run.dims.virtual_pipeline > 1 else {}
    for stage, order in enumerate(orders):
        before: Node | None = None
        for node in order:
            graph[node] = {} if before is None else {before: 0.0}
            needed = needs(node, run.dims)
            if needed is not None:
                graph[node][needed] = run.transfer if needed[0] != stage else 0.0
            graph[node] |= dict.fromkeys(waits.get(node, ()), run.transfer)
            before = node
    times: dict[Node, tuple[float, float]] = {}
    for node in TopologicalSorter(graph).static_order():
        _, kind, _, slot = node
        takes = run.costs[slot] / run.dims.virtual_pipeline
        takes *= run.backward_ratio if kind == "B" else 1.0
        start = max((times[each][1] + wait for each, wait in graph[node].items()), default=0.0)
        times[node] = (start, start + takes)
    return times


def close(value: float) -> object:
    """Equal but for the order in which products are rounded."""
    return pytest.approx(value, rel=1e-12, abs=1e-12)


@examples(120)
@given(runs())
def test_operations_are_those_of_the_reference(run: Run) -> None:
    expected = reference_times(run)
    made = run.operations()
    assert len(made) == len(expected)
    for o in made:
        start, end = expected[o.stage, "B" if o.backward else "F", o.chunk, o.slot]
        assert o.start == close(start)
        assert o.end == close(end)


@examples(200)
@given(runs(plain=True))
def test_pipeline_time_is_the_end_of_the_reference(run: Run) -> None:
    expected = max(end for _, end in reference_times(run).values())
    options = {"backward_ratio": run.backward_ratio, "forward_only": run.forward_only}
    time = pipeline_time(run.costs, run.dims, **options)  # type: ignore[arg-type]
    assert time == close(expected)
    assert time == close(max(operation.end for operation in run.operations()))


@examples(150)
@given(pipelines(), st.data())
def test_stage_order_is_that_of_the_reference(dims: ParallelDims, data: st.DataObject) -> None:
    count = len(data.draw(costs_for(dims)))
    forward_only = data.draw(st.booleans())
    for stage in range(dims.pipeline_parallel):
        order = stage_order(dims, stage, count, forward_only=forward_only)
        expected = reference_order(dims, stage, count, forward_only)
        assert [(stage, "B" if b else "F", chunk, slot) for b, chunk, slot in order] == expected


def test_the_orders_of_two_stages_written_out() -> None:
    """As in figures 3 and 4 of Narayanan et al. (2021), with two stages."""

    def written(dims: ParallelDims, stage: int, count: int) -> str:
        order = stage_order(dims, stage, count)
        return " ".join(f"{'B' if backward else 'F'}{slot}.{c}" for backward, c, slot in order)

    plain = ParallelDims(pipeline_parallel=2)
    assert written(plain, 0, 3) == "F0.0 F1.0 B0.0 F2.0 B1.0 B2.0"
    assert written(plain, 1, 3) == "F0.0 B0.0 F1.0 B1.0 F2.0 B2.0"
    interleaved = ParallelDims(pipeline_parallel=2, virtual_pipeline=2)
    assert written(interleaved, 0, 2) == "F0.0 F1.0 F0.1 F1.1 B0.1 B1.1 B0.0 B1.0"
    assert written(interleaved, 1, 2) == "F0.0 F1.0 F0.1 B0.1 F1.1 B1.1 B0.0 B1.0"


@examples(200)
@given(pipelines(), st.integers(1, 5), st.sampled_from([1.0, 2.0, 3.0]))
def test_equal_micro_batches_take_the_textbook_s_time(
    dims: ParallelDims, groups: int, ratio: float
) -> None:
    """(count + (stages - 1) / chunks) passes forth and back; the interleaved one in whole groups of
    as many micro-batches as stages."""
    stages, chunks = dims.pipeline_parallel, dims.virtual_pipeline
    dims = ParallelDims(pipeline_parallel=stages, virtual_pipeline=chunks)
    count = groups * stages
    bubble = (stages - 1) / chunks
    time = pipeline_time([3.0] * count, dims, backward_ratio=ratio)
    assert time == pytest.approx((count + bubble) * 3.0 * (1 + ratio), rel=1e-12)
    forward = pipeline_time([3.0] * count, dims, forward_only=True)
    assert forward == pytest.approx((count + bubble) * 3.0, rel=1e-12)


@examples(60)
@given(runs())
def test_each_stage_runs_its_order_one_pass_after_the_other(run: Run) -> None:
    operations = run.operations()
    for stage in range(run.dims.pipeline_parallel):
        of_stage = [o for o in operations if o.stage == stage]
        order = stage_order(run.dims, stage, len(run.costs), forward_only=run.forward_only)
        assert [(o.backward, o.chunk, o.slot) for o in of_stage] == order
        for before, after in pairwise(of_stage):
            assert before.start <= before.end <= after.start
    assert [o.stage for o in operations] == sorted(o.stage for o in operations)


@examples(150)
@given(runs(plain=True), st.data())
def test_a_costlier_micro_batch_never_ends_the_step_sooner(run: Run, data: st.DataObject) -> None:
    options = {"backward_ratio": run.backward_ratio, "forward_only": run.forward_only}
    slot = data.draw(st.integers(0, len(run.costs) - 1))
    costlier = list(run.costs)
    costlier[slot] += data.draw(st.floats(0, 200))
    before = pipeline_time(run.costs, run.dims, **options)  # type: ignore[arg-type]
    assert pipeline_time(costlier, run.dims, **options) >= before  # type: ignore[arg-type]


@examples(150)
@given(pipelines(most_stages=6), st.booleans(), st.data())
def test_inflight_tokens_are_those_held_when_a_forward_pass_begins(
    dims: ParallelDims, forward_only: bool, data: st.DataObject
) -> None:
    """Held: forward pass begun, backward pass not over; read off simulated times."""
    count = len(data.draw(costs_for(dims)))
    tokens = data.draw(st.lists(st.integers(0, 1000), min_size=count, max_size=count))
    operations = pipeline_operations([1.0] * count, dims, forward_only=forward_only)
    stage = data.draw(st.integers(0, dims.pipeline_parallel - 1))
    own = [o for o in operations if o.stage == stage]
    until = {(o.chunk, o.slot): o.end for o in own if o.backward or forward_only}
    most = max(
        sum(
            tokens[o.slot]
            for o in own
            if not o.backward and o.start <= now.start < until[o.chunk, o.slot]
        )
        for now in own
        if not now.backward
    )
    held = inflight_tokens(tokens, dims, forward_only=forward_only, stage=stage)
    # Of forward passes alone, one chunk's pass holds what it runs on whole, not a chunk's share.
    share = 1 if forward_only else dims.virtual_pipeline
    assert held == pytest.approx(most / share, rel=1e-12)


@pytest.mark.parametrize("call", [pipeline_time, pipeline_operations])
@pytest.mark.parametrize("forward_only", [False, True])
def test_counts_that_no_schedule_runs_are_refused(call: object, forward_only: bool) -> None:
    interleaved = ParallelDims(pipeline_parallel=4, virtual_pipeline=2, microbatch_group_size=6)
    for dims, count, legal in ((ParallelDims(pipeline_parallel=2), 0, 1), (interleaved, 7, 10)):
        with pytest.raises(ParallelDimsError, match=rf"micro-batch.*(got none|set.* {legal}$)"):
            call([1.0] * count, dims, forward_only=forward_only)  # type: ignore[operator]


def test_a_refused_order_names_the_next_count_that_runs() -> None:
    dims = ParallelDims(pipeline_parallel=4, virtual_pipeline=2)
    with pytest.raises(ParallelDimsError) as caught:
        stage_order(dims, 0, 6)
    assert str(caught.value) == (
        "the schedule cannot run 6 micro-batches per rank; set num_microbatches to 8"
    )
    with pytest.raises(ParallelDimsError, match="set num_microbatches to 4"):
        stage_order(dims, 0, -3)
