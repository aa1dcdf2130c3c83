"""Orders, times and memory of pipelines against references that share no code with them.

The reference states an order by what a stage may hold: it goes on with forward passes while it
holds fewer than so many micro-batches (of chunks) whose backward pass is still to come, and else
runs the oldest backward pass that is due. That Megatron runs these orders, and ends no sooner, is
shown on recorded runs, in tests/distributed.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from naive_pipeline import Node
from planning_cases import examples, least_count, megatron_runs

from mcore_batching.planning import ParallelDims
from mcore_batching.planning.clock import Clock
from mcore_batching.planning.plans.statistics import tokens_in_flight
from mcore_batching.planning.schedule import Schedule


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


@examples(300)
@given(pipelines(), st.integers(0, 60))
def test_counts_are_megatrons_and_rounded_up_to_the_least(dims: ParallelDims, count: int) -> None:
    assert dims.is_legal_num_microbatches(count) == megatron_runs(count, dims)
    assert dims.round_up_num_microbatches(count) == least_count(count, dims)


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


@examples(150)
@given(pipelines(), st.data())
def test_stage_order_is_that_of_the_reference(dims: ParallelDims, data: st.DataObject) -> None:
    count = len(data.draw(costs_for(dims)))
    forward_only = data.draw(st.booleans())
    for stage in range(dims.pipeline_parallel):
        order = Schedule(dims=dims, forward_only=forward_only).order(stage, count)
        expected = reference_order(dims, stage, count, forward_only)
        assert [(stage, *what) for what in order] == expected


@examples(150)
@given(pipelines(most_stages=6), st.booleans(), st.data())
def test_tokens_in_flight_are_those_held_when_a_forward_pass_begins(
    dims: ParallelDims, forward_only: bool, data: st.DataObject
) -> None:
    """Held: forward pass begun, backward pass not over; read off simulated times."""
    kind = "F" if forward_only else "B"
    schedule = Schedule(dims=dims, forward_only=forward_only)
    count = len(data.draw(costs_for(dims)))
    tokens = data.draw(st.lists(st.integers(0, 1000), min_size=count, max_size=count))
    operations = Clock([1.0] * count, schedule).operations()
    stage = data.draw(st.integers(0, dims.pipeline_parallel - 1))
    own = [o for o in operations if o.stage == stage]
    until = {(o.chunk, o.slot): o.end for o in own if o.kind == kind}
    most = max(
        sum(
            tokens[o.slot]
            for o in own
            if o.kind == "F" and o.start <= now.start < until[o.chunk, o.slot]
        )
        for now in own
        if now.kind == "F"
    )
    held = tokens_in_flight([tokens], schedule, stage)
    # Of forward passes alone, one chunk's pass holds what it runs on whole, not a chunk's share.
    share = 1 if forward_only else dims.virtual_pipeline
    assert held == pytest.approx(most / share, rel=1e-12)
