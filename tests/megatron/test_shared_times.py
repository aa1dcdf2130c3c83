"""Times of passes in which ranks wait for each other: the numbers that travel, and what is told."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import replace

import pytest

from mcore_batching.megatron.learning.shared_times import (
    NUM_LEAST,
    NUM_SLOTS,
    Rivals,
    SharedTimes,
    costs_of_slots,
    places_of_slots,
)
from mcore_batching.planning import CostModel, ParallelDims, PlannerConfig
from mcore_batching.planning.cost_fit import Timing
from mcore_batching.planning.learnt_costs import LearntCosts
from mcore_batching.planning.pipeline import Kind, Pass
from mcore_batching.planning.plan import Row, StepPlan

CHUNKS = 2
ROWS = [Row(rank=0, slot=1, size=2, samples=(0,)), Row(rank=0, slot=0, size=4, samples=(1, 2))]


def of_rank(own: int) -> SharedTimes:
    lengths = [(700,), (900, 800)]
    return SharedTimes(rows=ROWS, lengths=lengths, chunks=CHUNKS, own=own)


KINDS: tuple[tuple[Kind, float], ...] = (("F", 4.0), ("B", 8.0))


def passes(own: int, broken: float | None = None) -> dict[Pass, float]:
    """Backward passes take twice 4 s and forward ones 4 s, which all ranks but 1 wait to begin."""
    seconds = {
        Pass(kind, chunk, slot): took + (own ^ 1)
        for kind, took in KINDS
        for chunk in range(CHUNKS)
        for slot in range(2)
    }
    return seconds if broken is None else seconds | {Pass("B", 1, 0): broken}


def least(numbers: list[list[float]]) -> list[float]:
    return [min(each) for each in zip(*numbers, strict=True)]


def test_a_row_takes_what_the_rank_that_waited_least_took() -> None:
    # Ranks are of two stages, the second of which is twice as slow.
    numbers = [of_rank(own).seconds(passes(own), 1.0) for own in (0, 2, 3)]
    numbers.append(of_rank(1).seconds({each: 2 * s for each, s in passes(1).items()}, 2.0))
    assert {len(each) for each in numbers} == {NUM_LEAST}
    (slot, two), (other_slot, four) = of_rank(0).timings(least(numbers))
    assert (slot, two.lengths, two.context_parallel) == (1, (700,), 2)
    assert (other_slot, four.lengths, four.context_parallel) == (0, (900, 800), 4)
    for timing in (two, four):  # of both chunks
        assert (timing.forward_seconds, timing.backward_seconds) == (8.0, 16.0)


@pytest.mark.parametrize("broken", [math.nan, 0.0, -1.0], ids=str)
def test_a_time_that_is_none_drops_the_row_everywhere(broken: float) -> None:
    numbers = [
        of_rank(own).seconds(passes(own, broken if own == 3 else None), 1.0) for own in range(4)
    ]
    [(slot, _)] = of_rank(0).timings(least(numbers))
    assert slot == 1
    # As a rank says that has not read the step yet.
    assert of_rank(0).timings(least([*numbers, [0.0] * NUM_LEAST])) == []


def test_of_many_slots_some_are_told() -> None:
    assert places_of_slots(3) == {0: 0, 1: 1, 2: 2}
    places = places_of_slots(100)
    assert len(places) == NUM_SLOTS
    assert max(places) > 90
    numbers = costs_of_slots([float(slot) for slot in range(100)])
    assert all(numbers[place] == slot for slot, place in places.items())
    assert len(costs_of_slots([])) == NUM_SLOTS
    assert dataclasses.replace(of_rank(0), rows=[], lengths=[]).timings([0.0] * NUM_LEAST) == []


LENGTHS = [900, 300, 300, 300, 100, 850, 2000, 400]
RANKS = (((0,), (6,), ()), ((1, 2, 3, 4), (6,), ()), ((5,), (7,), ()), ((), (4, 1), ()))
"""One long sample or several short ones; a row of two ranks beside rows of one; placeholders."""
KNOWN = [
    CostModel(per_micro_batch=fixed, quadratic=quadratic, context_parallel_fixed=latency)
    for fixed in (0.0, 500.0)
    for quadratic in (0.0, 1e-4, 1e-2)
    for latency in (0.0, 1000.0)
]


def plan_of(context_parallel: int | None = None) -> StepPlan:
    sizes = ((1, 2, 1), (1, 2, 1), (1, 1, 1), (1, 1, 1))
    return StepPlan(
        micro_batches=RANKS,
        num_microbatches=3,
        sample_indices=tuple(range(len(LENGTHS))),
        dims=ParallelDims(data_parallel=4, context_parallel=context_parallel or 1),
        config=PlannerConfig(max_tokens_per_gpu=1000),
        context_parallel=sizes if context_parallel is None else None,
    )


def timed_rows(plan: StepPlan, size: int | None = None) -> list[tuple[int, Timing]]:
    return [
        (
            row.slot,
            Timing(
                lengths=tuple(LENGTHS[i] for i in reversed(row.samples)),
                forward_seconds=1.0,
                backward_seconds=2.0,
                context_parallel=size or row.size,
            ),
        )
        for row in plan.rows()
    ]


@pytest.mark.parametrize("model", KNOWN, ids=str)
@pytest.mark.parametrize("window", [None, 256])
def test_the_costliest_row_of_a_slot_is_told_by_any_costs(
    model: CostModel, window: int | None
) -> None:
    plan = plan_of()
    learnt, timed = LearntCosts(cost_model=replace(model, window=window)), timed_rows(plan)
    found = Rivals.of(plan, LENGTHS, window).costliest(timed, learnt)
    for slot in range(plan.num_microbatches):
        in_slot = [row for of, row in timed if of == slot]
        costs = [learnt.units(row.lengths, row.context_parallel) for row in in_slot]
        for row, cost in zip(in_slot, costs, strict=True):
            is_most = cost == pytest.approx(max(costs), rel=1e-12)
            assert any(each is row for each in found) == is_most


def test_which_row_was_the_costliest_changes_with_the_costs() -> None:
    plan = plan_of()
    rivals, timed = Rivals.of(plan, LENGTHS, None), timed_rows(plan)
    found = [
        [row.lengths for row in rivals.costliest(timed, LearntCosts(cost_model=each))]
        for each in KNOWN
    ]
    for slot in range(2):
        assert len({lengths[slot] for lengths in found}) == 2
    # Of the first slot the longest sample and the most tokens; no other can be the costliest.
    assert [len(rows) for rows in rivals.rows] == [2, 2, 1]


def test_rows_that_are_costlier_within_a_window_are_not_forgotten() -> None:
    lengths = [1000, *[100] * 10, 720, 720]  # more tokens and pairs than the two last ones
    plan = StepPlan(
        micro_batches=((tuple(range(11)),), ((11, 12),)),
        num_microbatches=1,
        sample_indices=tuple(range(13)),
        dims=ParallelDims(data_parallel=2),
        config=PlannerConfig(max_tokens_per_gpu=2000),
    )
    assert [len(Rivals.of(plan, lengths, window).rows[0]) for window in (None, 256)] == [1, 2]


def test_rows_that_all_have_one_size_are_compared_as_they_are_timed() -> None:
    """Under fixed CP a row is timed as if it were on one rank: all share what that adds."""
    plan = plan_of(context_parallel=2)
    learnt = LearntCosts(cost_model=CostModel(context_parallel_fixed=9000.0))
    found = Rivals.of(plan, LENGTHS, None).costliest(timed_rows(plan, size=1), learnt)
    assert {sum(row.lengths) for row in found} == {1000, 2000, 0}
