"""Orders, times and memory of pipelines against references that share no code with them.

The reference of orders states them by what a stage may hold: it goes on with forward passes while
it holds fewer than so many micro-batches (of chunks) whose backward pass is still to come, and else
runs the oldest backward pass that is due. That Megatron runs these orders, and ends no sooner, is
shown on recorded runs, in tests/distributed. Times are those of passes played one by one.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from naive_pipeline import Node, played
from planning_cases import examples, least_count, megatron_runs

from mcore_batching.planning import ParallelDims
from mcore_batching.planning.clock import Blocks, Clock
from mcore_batching.planning.packing.bounds import least_end, pipeline_latency
from mcore_batching.planning.plans.statistics import tokens_in_flight
from mcore_batching.planning.schedule import Schedule


@st.composite
def pipelines(draw: st.DrawFn) -> ParallelDims:
    stages = draw(st.sampled_from([1, 2, 3, 4, 5, 8]))
    chunks = draw(st.sampled_from([1, 1, 2, 3, 4])) if stages > 1 else 1
    return ParallelDims(
        pipeline_parallel=stages,
        virtual_pipeline=chunks,
        microbatch_group_size=draw(st.none() | st.integers(stages, stages + 3)),
        waits_for_sends=draw(st.booleans()),
    )


@examples(300)
@given(pipelines(), st.integers(0, 60))
def test_counts_are_megatrons_and_rounded_up_to_the_least(dims: ParallelDims, count: int) -> None:
    assert dims.is_legal_num_microbatches(count) == megatron_runs(count, dims)
    assert dims.round_up_num_microbatches(count) == least_count(count, dims)


def reference_order(schedule: Schedule, stage: int, count: int) -> list[Node]:
    """The passes of a stage by what it may hold."""
    dims = schedule.dims
    chunks, stages = dims.virtual_pipeline, dims.pipeline_parallel
    group = dims.microbatch_group_size or stages
    to_run = [(chunk, slot) for slot in range(count) for chunk in range(chunks)]
    # Chunk by chunk within each group of micro-batches; one chunk is in the order of slots.
    forwards = sorted(to_run, key=lambda each: (each[1] // group, each[0], each[1]))
    backwards = sorted(to_run, key=lambda each: (each[1] // group, -each[0], each[1]))
    if schedule.forward_only:
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
@given(pipelines(), st.booleans(), st.integers(1, 28), st.data())
def test_orders_and_tokens_in_flight_are_those_of_the_reference(
    dims: ParallelDims, forward_only: bool, wanted: int, data: st.DataObject
) -> None:
    """In flight are those held when a forward pass begins, their backward pass not over; read off
    simulated times."""
    count, schedule = least_count(wanted, dims), Schedule(dims=dims, forward_only=forward_only)
    tokens = data.draw(st.lists(st.integers(0, 1000), min_size=count, max_size=count))
    operations = Clock([1.0] * count, schedule).operations()
    for stage in range(dims.pipeline_parallel):
        own = [o for o in operations if o.stage == stage]
        expected = reference_order(schedule, stage, count)
        assert [(stage, *what) for what in schedule.order(stage, count)] == expected
        forward = [o for o in own if o.kind == "F"]
        until = {(o.chunk, o.slot): o.end for o in own}  # the last pass of each ends its stay
        most = max(
            sum(tokens[o.slot] for o in forward if o.start <= now < until[o.chunk, o.slot])
            for now in [o.start for o in forward]
        )
        held = tokens_in_flight([tokens], schedule, stage)
        # Of forward passes alone, one chunk's pass holds what it runs on whole, not its share.
        share = 1 if forward_only else dims.virtual_pipeline
        assert held == pytest.approx(most / share, rel=1e-12)


@dataclass
class Step:
    """Micro-batches of ranks, some of which they share, and what they are run by."""

    schedule: Schedule
    ranks: int
    blocks: list[Blocks]
    dice: random.Random

    def order(self) -> list[Node]:
        count, stages = len(self.blocks), range(self.schedule.dims.pipeline_parallel)
        return [(stage, *what) for stage in stages for what in self.schedule.order(stage, count)]

    def costs(self) -> list[list[float]]:
        """Random costs: slot after slot, for each kind of stage, of each rank."""
        dice, costs = self.dice, []
        for shared in (each for each in self.blocks for _ in range(self.schedule.num_costs)):
            costs.append([dice.choice((0.0, 1.0, 9 * dice.random())) for _ in range(self.ranks)])
            for first, after in shared:
                costs[-1][first:after] = [costs[-1][first]] * (after - first)
        return costs


@st.composite
def steps(draw: st.DrawFn) -> Step:
    dims = draw(pipelines())
    stages, chunks = dims.pipeline_parallel, dims.virtual_pipeline
    dice = random.Random(draw(st.integers(0, 10**9)))
    drawn = [dice.randrange(3) for _ in range(chunks * stages)]
    numbers = [list(dict.fromkeys(drawn)).index(each) for each in drawn]
    kinds = tuple(tuple(numbers[stage::stages]) for stage in range(stages))
    schedule = Schedule(
        dims=dims,
        forward_only=draw(st.sampled_from([False, False, True])),
        backward_ratio=draw(st.sampled_from([2.0, 2.0, 1.0, 0.0, 3.7])),
        which_cost=kinds if draw(st.booleans()) else (),
    )
    ranks = draw(st.sampled_from([1, 1, 2, 4]))
    blocks: list[Blocks] = []
    for _ in range(least_count(draw(st.integers(1, 10)), dims)):
        size = draw(st.sampled_from([size for size in (1, 2, 4) if size <= ranks]))
        firsts = range(0, ranks, size) if size > 1 else ()
        blocks.append([(first, first + size) for first in firsts if dice.random() < 0.6])
    return Step(schedule, ranks, blocks, dice)


def flat(costs: list[list[float]]) -> list[float]:
    return [cost for slot in costs for cost in slot]


def close(value: float) -> object:
    """Equal but for the order of sums and products."""
    return pytest.approx(value, rel=1e-9, abs=1e-9)


@examples(300)
@given(steps())
def test_ends_and_weights_are_those_of_passes_played(step: Step) -> None:
    """Also with other costs; by the weights of any step no other ends sooner than it does."""
    costs = step.costs()
    coupled = (step.blocks, step.ranks) if step.ranks > 1 else ()
    clock = Clock(flat(costs), step.schedule, *coupled)
    for _ in range(2):
        times, ends = played(costs, step.schedule, step.blocks), [0.0] * step.ranks
        for (rank, _), (_, end) in times.items():
            ends[rank] = max(ends[rank], end)
        assert clock.ends == close(ends)
        assert clock.end == max(clock.ends)
        for rank in range(step.ranks):
            made = [(o.stage, o.kind, o.chunk, o.slot) for o in clock.operations(rank)]
            assert made == step.order()
            for node, o in zip(made, clock.operations(rank), strict=True):
                assert (o.start, o.end) == close(times[rank, node])
        weights = clock.weights()
        assert sum(w * c for w, c in zip(weights, flat(costs), strict=True)) == close(clock.end)
        costs = step.costs()
        other = clock.with_costs(flat(costs), range(len(weights)))
        assert clock.ends == close(ends)
        least = sum(w * c for w, c in zip(weights, flat(costs), strict=True))
        assert least <= other.end * (1 + 1e-9)
        clock = other


@examples(200)
@given(steps())
def test_no_rank_ends_before_what_its_schedule_says(step: Step) -> None:
    """By its work, or by the way of its longest micro-batch; with uneven stages too."""
    schedule = step.schedule
    for costs in ([1.0 + slot[0] for slot in step.costs()], [1.0] * len(step.costs())):
        end = Clock(costs, schedule).end * (1 + 1e-9)
        kinds = [kind for stage in schedule.which_cost for kind in stage] or [0]
        costs = [
            sum(costs[at + kind] for kind in kinds) / len(kinds)
            for at in range(0, len(costs), schedule.num_costs)
        ]
        assert least_end(schedule, sum(costs), min(costs)) <= end
        assert pipeline_latency(schedule) * max(costs) <= end
