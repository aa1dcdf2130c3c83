"""Ranks that share micro-batches wait for each other in them; checked by playing all events."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron_transfers import waited_for
from planning_cases import dims_list, examples

from mcore_batching.planning.coupled_ranks import coupled_chain, coupled_passes
from mcore_batching.planning.parallel_dims import ParallelDims
from mcore_batching.planning.pass_order import stage_order
from mcore_batching.planning.pipeline import pipeline_time

Blocks = list[list[tuple[int, int]]]


def played(
    costs: list[list[float]], blocks: Blocks, dims: ParallelDims, ratio: float, forward_only: bool
) -> list[float]:
    """End of each rank's step: passes are begun in any order in which they can be."""
    count, ranks, stages = len(costs), len(costs[0]), dims.pipeline_parallel
    chunks = dims.virtual_pipeline
    queues = {
        (rank, stage): list(reversed(stage_order(dims, stage, count, forward_only=forward_only)))
        for rank in range(ranks)
        for stage in range(stages)
    }
    orders = [
        [(stage, "B" if backward else "F", *rest) for backward, *rest in reversed(queues[0, stage])]
        for stage in range(stages)
    ]
    waits = waited_for(orders, dims) if chunks > 1 else {}
    free = dict.fromkeys(queues, 0.0)
    done: dict[tuple[int, int, int, bool], float] = {}
    while any(queues.values()):
        heads = [place for place, queue in queues.items() if queue]
        random.shuffle(heads)
        for rank, stage in heads:
            backward, chunk, slot = queues[rank, stage][-1]
            shared = [range(*block) for block in blocks[slot] if block[0] <= rank < block[1]]
            members = shared[0] if shared else range(rank, rank + 1)
            if any(
                not queues[r, stage] or queues[r, stage][-1] != (backward, chunk, slot)
                for r in members
            ):
                continue
            # The model as one row of chunks * stages parts, down and then up again.
            part, parts = chunk * stages + stage, chunks * stages
            if backward:
                needed = (part + 1, True) if part < parts - 1 else (part, False)
            else:
                needed = (part - 1, False)
            inputs = [(r, slot, *needed) for r in members if needed[0] >= 0]
            for place, kind, of_chunk, of_slot in waits.get(
                (stage, "B" if backward else "F", chunk, slot), ()
            ):
                inputs += [(r, of_slot, of_chunk * stages + place, kind == "B") for r in members]
            if any(each not in done for each in inputs):
                continue
            start = max([free[r, stage] for r in members] + [done[each] for each in inputs])
            for r in members:
                queues[r, stage].pop()
                cost = costs[slot][r] / chunks * (ratio if backward else 1.0)
                free[r, stage] = done[r, slot, part, backward] = start + cost
            break
        else:
            raise AssertionError("nothing can begin")
    return [max(free[rank, stage] for stage in range(stages)) for rank in range(ranks)]


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[list[float]], Blocks, ParallelDims, bool]:
    dims = draw(dims_list())
    ranks = draw(st.sampled_from([1, 2, 4]))
    count = dims.round_up_num_microbatches(draw(st.integers(1, 9)))
    costs, blocks = [], []
    for _ in range(count):
        of_slot = [float(draw(st.integers(0, 40))) for _ in range(ranks)]
        size = draw(st.sampled_from([size for size in (1, 2, 4) if size <= ranks]))
        shared = [
            (first, first + size)
            for first in range(0, ranks, size)
            if size > 1 and draw(st.booleans())
        ]
        for first, after in shared:
            of_slot[first:after] = [of_slot[first]] * size
        costs.append(of_slot)
        blocks.append(shared)
    return costs, blocks, dims, draw(st.booleans())


@examples(300)
@given(steps())
def test_every_rank_ends_when_the_events_say(
    step: tuple[list[list[float]], Blocks, ParallelDims, bool],
) -> None:
    costs, blocks, dims, forward_only = step
    ends = coupled_passes(costs, blocks, dims, backward_ratio=2.0, forward_only=forward_only)
    of_ranks = ends[-1]
    # Thirds do not add up exactly in every order.
    assert of_ranks == pytest.approx(played(costs, blocks, dims, 2.0, forward_only), rel=1e-12)
    for rank, end in enumerate(of_ranks):
        chain = coupled_chain(ends, rank, blocks, dims, forward_only=forward_only)
        length = sum(weight * costs[slot][first] for (first, slot), weight in chain.items())
        assert length == pytest.approx(end, rel=1e-9)


@examples(100)
@given(steps(), st.randoms(use_true_random=False))
def test_no_costs_end_a_step_before_a_chain_does(
    step: tuple[list[list[float]], Blocks, ParallelDims, bool], dice: random.Random
) -> None:
    costs, blocks, dims, forward_only = step
    ends = coupled_passes(costs, blocks, dims, forward_only=forward_only)
    chain = coupled_chain(ends, 0, blocks, dims, forward_only=forward_only)
    others = [[float(dice.randrange(60)) for _ in of_slot] for of_slot in costs]
    for of_slot, shared in zip(others, blocks, strict=True):
        for first, after in shared:
            of_slot[first:after] = [of_slot[first]] * (after - first)
    changed = coupled_passes(others, blocks, dims, forward_only=forward_only)
    end = changed[-1][0]
    length = sum(weight * others[slot][first] for (first, slot), weight in chain.items())
    assert end >= length * (1 - 1e-9)


@examples(50)
@given(steps())
def test_ranks_that_share_nothing_run_by_themselves_and_all_that_share_all_in_lockstep(
    step: tuple[list[list[float]], Blocks, ParallelDims, bool],
) -> None:
    costs, _, dims, forward_only = step
    ranks = len(costs[0])
    alone = coupled_passes(costs, [[]] * len(costs), dims, forward_only=forward_only)
    assert alone[-1] == pytest.approx(
        [
            pipeline_time(list(own), dims, forward_only=forward_only)
            for own in zip(*costs, strict=True)
        ],
        rel=1e-12,
    )
    slowest = [[max(of_slot)] * ranks for of_slot in costs]
    together = coupled_passes(slowest, [[(0, ranks)]] * len(costs), dims, forward_only=forward_only)
    assert together[-1] == pytest.approx(
        [pipeline_time([own[0] for own in slowest], dims, forward_only=forward_only)] * ranks,
        rel=1e-12,
    )


def test_a_shared_micro_batch_begins_when_the_later_rank_is_ready() -> None:
    dims = ParallelDims(data_parallel=2)
    ends = coupled_passes([[1.0, 3.0], [2.0, 2.0]], [[], [(0, 2)]], dims, forward_only=True)
    assert ends == [[0.0, 0.0], [1.0, 3.0], [5.0, 5.0]]
    ends = coupled_passes([[1.0, 3.0], [2.0, 2.0]], [[], []], dims, forward_only=True)
    assert ends == [[0.0, 0.0], [1.0, 3.0], [3.0, 5.0]]
