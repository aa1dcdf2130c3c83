"""Times of passes in which ranks wait for each other: the numbers that travel, and what is told."""

from __future__ import annotations

import dataclasses
import math

import pytest

from mcore_batching.megatron.learning.pass_times import (
    MAX_SHARED_PASSES,
    MAX_SLOTS,
    SharedTimes,
    TimedStep,
    costs_of_slots,
    places_of_slots,
)
from mcore_batching.planning.pipeline import Kind, Pass
from mcore_batching.planning.plans.plan import Row

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
    assert {len(each) for each in numbers} == {MAX_SHARED_PASSES}
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
    assert of_rank(0).timings(least([*numbers, [0.0] * MAX_SHARED_PASSES])) == []


def test_of_many_slots_some_are_told() -> None:
    assert places_of_slots(3) == {0: 0, 1: 1, 2: 2}
    places = places_of_slots(100)
    assert len(places) == MAX_SLOTS
    assert max(places) > 90
    numbers = costs_of_slots([float(slot) for slot in range(100)])
    assert all(numbers[place] == slot for slot, place in places.items())
    assert len(costs_of_slots([])) == MAX_SLOTS
    assert (
        dataclasses.replace(of_rank(0), rows=[], lengths=[]).timings([0.0] * MAX_SHARED_PASSES)
        == []
    )


def test_passes_take_the_time_between_their_marks() -> None:
    order = [Pass("F", 0, 0), Pass("B", 0, 0), Pass("F", 0, 1), Pass("B", 0, 1)]
    marks = [0.0, 1.0, 1.0, 3.0, 4.0, 6.0, 6.0, 10.0]
    step = TimedStep([(5,), (9,)], [1, 1], order, marks, None)
    assert step.is_over
    seconds = step.seconds()
    assert seconds == dict(zip(order, [1.0, 2.0, 2.0, 4.0], strict=True))
    timed = step.timings(seconds | {Pass("B", 1, 0): 2.0})  # of another chunk of the stage
    assert [row.forward_seconds for row in timed] == [1.0, 2.0]
    assert [row.backward_seconds for row in timed] == [4.0, 4.0]
