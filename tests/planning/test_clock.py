"""The clock of pipelines against passes played one by one, by code that shares none with it."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from naive_pipeline import Node, played
from planning_cases import examples

from mcore_batching.planning import ParallelDims
from mcore_batching.planning.clock import Blocks, Clock, clocks_of
from mcore_batching.planning.packing.bounds import least_beside, least_end, pipeline_latency
from mcore_batching.planning.schedule import Schedule


@dataclass
class Step:
    """Micro-batches of ranks, some of which they share, and what they are run by."""

    schedule: Schedule
    costs: list[list[float]]
    """Slot after slot, for each kind of stage, of each rank."""
    blocks: list[Blocks]
    dice: random.Random

    def clock(self) -> Clock:
        if len(self.costs[0]) == 1:
            return Clock([cost for (cost,) in self.costs], self.schedule)
        flat = [cost for slot in self.costs for cost in slot]
        return Clock(flat, self.schedule, self.blocks, len(self.costs[0]))

    def played(self, costs: list[list[float]]) -> dict[tuple[int, Node], tuple[float, float]]:
        return played(costs, self.schedule, self.blocks)

    def order(self) -> list[Node]:
        count, stages = len(self.blocks), range(self.schedule.dims.pipeline_parallel)
        return [(stage, *what) for stage in stages for what in self.schedule.order(stage, count)]

    def other_costs(self) -> list[list[float]]:
        dice, ranks = self.dice, len(self.costs[0])
        costs = []
        for shared in (each for each in self.blocks for _ in range(self.schedule.num_costs)):
            costs.append([dice.choice((0.0, 1.0, 9 * dice.random())) for _ in range(ranks)])
            for first, after in shared:
                costs[-1][first:after] = [costs[-1][first]] * (after - first)
        return costs


@st.composite
def steps(draw: st.DrawFn) -> Step:
    stages = draw(st.sampled_from([1, 2, 3, 4, 5, 8]))
    chunks = draw(st.sampled_from([1, 1, 2, 3, 4])) if stages > 1 else 1
    group = draw(st.none() | st.integers(stages, stages + 2)) if chunks > 1 else None
    dims = ParallelDims(
        pipeline_parallel=stages,
        virtual_pipeline=chunks,
        microbatch_group_size=group,
        waits_for_sends=draw(st.booleans()),
    )
    kind = draw(st.sampled_from(["", "", "forward only"]))
    dice = random.Random(draw(st.integers(0, 10**9)))
    drawn = [dice.randrange(3) for _ in range(chunks * stages)]
    numbers = [list(dict.fromkeys(drawn)).index(each) for each in drawn]
    kinds = [tuple(numbers[stage::stages]) for stage in range(stages)]
    schedule = Schedule(
        dims=dims,
        forward_only=kind == "forward only",
        backward_ratio=draw(st.sampled_from([2.0, 2.0, 1.0, 0.0, 3.7])),
        which_cost=tuple(kinds) if draw(st.booleans()) else (),
    )
    ranks = draw(st.sampled_from([1, 1, 2, 4]))
    count = dims.round_up_num_microbatches(draw(st.integers(1, 10)))
    blocks: list[Blocks] = []
    for _ in range(count):
        size = draw(st.sampled_from([size for size in (1, 2, 4) if size <= ranks]))
        firsts = range(0, ranks, size) if size > 1 else ()
        blocks.append([(first, first + size) for first in firsts if dice.random() < 0.6])
    step = Step(schedule, [[0.0] * ranks], blocks, dice)
    step.costs = step.other_costs()
    return step


def ends_of(times: dict[tuple[int, Node], tuple[float, float]]) -> list[float]:
    ranks = {rank for rank, _ in times}
    return [max(end for (each, _), (_, end) in times.items() if each == rank) for rank in ranks]


def length(weights: list[float], costs: list[list[float]]) -> float:
    flat = [cost for slot in costs for cost in slot]
    return sum(weight * cost for weight, cost in zip(weights, flat, strict=True))


def close(value: float) -> object:
    """Equal but for the order of sums and products."""
    return pytest.approx(value, rel=1e-9, abs=1e-9)


@examples(300)
@given(steps())
def test_ends_and_weights_are_those_of_passes_played(step: Step) -> None:
    """Also with other costs; by the weights of any step no other ends sooner than it does."""
    clock, costs = step.clock(), step.costs
    for _ in range(2):
        times = step.played(costs)
        assert clock.ends == close(ends_of(times))
        assert clock.end == max(clock.ends)
        for rank in range(len(clock.ends)):
            made = [(o.stage, o.kind, o.chunk, o.slot) for o in clock.operations(rank)]
            assert made == step.order()
            for node, o in zip(made, clock.operations(rank), strict=True):
                assert (o.start, o.end) == close(times[rank, node])
        weights = clock.weights()
        assert length(weights, costs) == close(clock.end)
        costs = step.other_costs()
        flat = [cost for slot in costs for cost in slot]
        other = clock.with_costs(flat, range(len(flat)))
        assert clock.ends == close(ends_of(times))
        assert length(weights, costs) <= other.end * (1 + 1e-9)
        clock = other


@examples(200)
@given(steps())
def test_no_rank_ends_before_what_its_schedule_says(step: Step) -> None:
    """By its work, or by the way of its longest micro-batch; with uneven stages
    too."""
    schedule = step.schedule
    for costs in ([1.0 + slot[0] for slot in step.costs], [1.0] * len(step.costs)):
        end = Clock(costs, schedule).end * (1 + 1e-9)
        kinds = [kind for stage in schedule.which_cost for kind in stage] or [0]
        costs = [
            sum(costs[at + kind] for kind in kinds) / len(kinds)
            for at in range(0, len(costs), schedule.num_costs)
        ]
        assert least_end(schedule, sum(costs), min(costs)) <= end
        beside = least_beside(schedule, len(costs)) * min(costs)
        assert pipeline_latency(schedule) * max(costs) + beside <= end


def test_written_out() -> None:
    """Two stages; the long second micro-batch is waited for on its way down and back."""
    clock = Clock([1.0, 5.0, 1.0], Schedule(dims=ParallelDims(pipeline_parallel=2)))
    assert (clock.end, clock.weights()) == (33.0, [1.0, 6.0, 2.0])


def test_ranks_wait_for_each_other_in_lockstep_and_where_they_share_rows() -> None:
    costs, sizes = [[1.0, 2.0], [3.0, 2.0]], [[1, 2], [1, 2]]
    alone = Schedule(dims=ParallelDims(data_parallel=2), forward_only=True)
    lockstep = Schedule(dims=ParallelDims(data_parallel=2, expert_parallel=2), forward_only=True)
    for schedule, of_sizes, ends in (
        (alone, None, [[3.0], [5.0]]),
        (alone, sizes, [[5.0, 5.0]]),
        (lockstep, None, [[5.0]]),
        (lockstep, sizes, [[5.0]]),
    ):
        assert [clock.ends for clock in clocks_of(costs, schedule, of_sizes)] == ends
    (clock,) = clocks_of(costs, alone, sizes)
    begun = [[o.start for o in clock.operations(rank)] for rank in (0, 1)]
    assert begun == [[0.0, 3.0], [0.0, 3.0]]
