"""Slots filled to a profile, against the same rule stated as a scan over all slots."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_cases import examples

from mcore_batching.planning import CostModel, ParallelDims, PlannerConfig, Problem
from mcore_batching.planning.pipeline import pipeline_time
from mcore_batching.planning.search import Objective
from mcore_batching.planning.search.profiles import (
    EFFORT_OF_SWAPS,
    FIRST_GROUP,
    LAST_GROUP,
    fill_slots,
    profile,
    profile_of,
    settle,
    shapes_of,
    staircase,
    swap,
)


@dataclass(frozen=True)
class Filling:
    """Samples of one rank, and sizes for its slots."""

    lengths: list[int]
    cap: int
    sizes: list[float]

    def objective(self, **options: Any) -> Objective:
        return Objective(self.problem(**options))

    def problem(self, **options: Any) -> Problem:
        return Problem.of(
            self.lengths,
            ParallelDims(),
            PlannerConfig(max_tokens_per_gpu=self.cap, **options),
            CostModel(quadratic=0.01, per_micro_batch=3.0),
        )

    def costliest_first(self) -> list[int]:
        costs = self.problem().costs
        return sorted(range(len(costs)), key=lambda sample: (-costs[sample], sample))


@st.composite
def fillings(draw: st.DrawFn, longest: float = 1.5) -> Filling:
    """Up to 30 samples, the longest so many caps long, for up to 10 slots."""
    cap = draw(st.sampled_from([10, 40, 1000]))
    count = draw(st.integers(1, 10))
    rise, lowest = draw(st.integers(0, count)), draw(st.sampled_from([0.1, 0.5, 1.0]))
    return Filling(
        draw(st.lists(st.integers(0, int(longest * cap)), max_size=30)),
        cap,
        profile(count, 4, rise, lowest),
    )


def scan(filling: Filling) -> list[list[int]] | None:
    """Each sample to the slot that lacks most of those that have room, the lowest on a tie."""
    work = filling.problem()
    fixed = work.cost_model.per_micro_batch
    total = 0.0
    for sample in filling.costliest_first():
        total += work.costs[sample]
    total += fixed * len(filling.sizes)
    whole = 0.0
    for size in filling.sizes:
        whole += size
    surplus = [fixed - total / whole * size for size in filling.sizes]
    slots: list[list[int]] = [[] for _ in filling.sizes]
    for sample in filling.costliest_first():
        tokens = max(filling.lengths[sample], 1)

        def takes(slot: int, tokens: int = tokens) -> bool:
            held = [max(filling.lengths[other], 1) for other in slots[slot]]
            return not held or sum(held) + tokens <= filling.cap

        open_slots = [slot for slot in range(len(slots)) if takes(slot)]
        if not open_slots:
            return None
        chosen = min(open_slots, key=lambda slot: (surplus[slot], slot))
        slots[chosen].append(sample)
        surplus[chosen] += work.costs[sample]
    return slots


@examples(300)
@given(st.integers(1, 40), st.integers(2, 9), st.integers(0, 40), st.floats(0.1, 1), st.booleans())
def test_sizes_grow_then_stay_then_shrink(
    count: int, stages: int, rise: int, lowest: float, gentle: bool
) -> None:
    sizes = profile(count, stages, rise, lowest, gentle=gentle)
    assert len(sizes) == count
    assert all(0 < size <= 1.0 for size in sizes)
    largest = sizes.index(max(sizes))
    assert all(a <= b for a, b in pairwise(sizes[:largest]))
    assert all(a >= b for a, b in pairwise(sizes[largest:]))
    if rise < count:
        assert sizes[-1] == pytest.approx(lowest)


@pytest.mark.parametrize(("stages", "count"), [(2, 8), (4, 8), (4, 16), (4, 24), (8, 16), (8, 40)])
def test_the_best_shape_is_close_to_sizes_that_may_be_any(stages: int, count: int) -> None:
    """Ends of steps of no overhead over their work, held against those of a linear program."""
    any_sizes = {(2, 8): 1.0682, (4, 8): 1.2738, (4, 16): 1.1085, (4, 24): 1.0633}
    any_sizes |= {(8, 16): 1.3156, (8, 40): 1.0941}
    dims = ParallelDims(pipeline_parallel=stages)
    ends = []
    for shape in shapes_of(count, dims):
        sizes = profile_of(shape, dims)
        ends.append(pipeline_time(sizes, dims) / (3 * sum(sizes)))
    assert any_sizes[stages, count] - 1e-4 < min(ends) < 1.025 * any_sizes[stages, count]


def test_sizes_written_out() -> None:
    assert profile(4, 4, 0, 1.0) == [1.0] * 4
    assert profile(5, 4, 3, 1.0) == pytest.approx([0.216, 0.36, 0.6, 1, 1])
    assert profile(6, 4, 2, 0.5) == pytest.approx([0.36, 0.6, 0.827, 0.7535, 0.6489, 0.5], abs=1e-3)
    assert profile(3, 4, 0, 0.5, gentle=True) == pytest.approx([0.648, 0.5805, 0.5], abs=2e-3)
    assert staircase(6, 2, 0, 0) == [1.0] * 6
    assert staircase(8, 2, 1, 2) == pytest.approx([0.2, 0.2, 1, 1, 0.65, 0.65, 0.3, 0.3])
    # The last group may be short; where the ends meet, the lower of the two holds.
    assert staircase(5, 3, 2, 2) == pytest.approx([0.2, 0.2, 0.2, 0.3, 0.3])


@examples(200)
@given(st.integers(1, 60), st.integers(1, 9), st.integers(0, 9), st.integers(0, 9))
def test_steps_are_flat_within_groups_and_rise_then_fall(
    count: int, group: int, rise: int, fall: int
) -> None:
    groups = [staircase(count, group, rise, fall)[i : i + group] for i in range(0, count, group)]
    assert sum(map(len, groups)) == count
    assert all(len(set(each)) == 1 for each in groups)
    heights = [each[0] for each in groups]
    if rise + fall <= len(groups):
        full = len(heights) - fall
        assert heights[rise:full] == [1.0] * (full - rise)
        assert all(a < b for a, b in pairwise([*heights[:rise], 1.0]))
        assert all(a > b for a, b in pairwise([1.0, *heights[full:]]))
    assert min(heights) >= min(FIRST_GROUP, LAST_GROUP)


@examples(500)
@given(fillings())
def test_samples_go_where_most_is_lacking(filling: Filling) -> None:
    work = filling.objective()
    expected = scan(filling)
    slots = fill_slots(filling.costliest_first(), filling.sizes, work)
    assert slots == (None if expected is None else settle(expected, work.problem.costs))


@examples(500)
@given(fillings(), st.integers(0, 4), st.none() | st.integers(2, 5))
def test_filled_slots_are_legal(filling: Filling, swaps: int, most: int | None) -> None:
    work = filling.objective(max_samples_per_row=most)
    before = work.effort
    slots = fill_slots(filling.costliest_first(), filling.sizes, work, swaps=swaps)
    at_most = 4 * len(filling.lengths) + EFFORT_OF_SWAPS * swaps * len(filling.sizes)
    assert before - at_most <= work.effort <= before - 4 * len(filling.lengths)
    if slots is None:
        assert filling.lengths
        return
    assert len(slots) == len(filling.sizes)
    assert sorted(s for samples in slots for s in samples) == list(range(len(filling.lengths)))
    for samples in slots:
        tokens = sum(max(filling.lengths[sample], 1) for sample in samples)
        assert tokens <= filling.cap or len(samples) == 1
        assert most is None or len(samples) <= most
    if [] in slots:
        assert max(map(len, slots)) <= 1
    assert slots[-1] or not any(slots)


@examples(300)
@given(fillings(longest=0.5))
def test_slots_that_have_room_for_all_are_filled(filling: Filling) -> None:
    """No sample is over half the cap: were there room in no slot, all would be over half full."""
    tokens = sum(max(length, 1) for length in filling.lengths)
    slots = fill_slots(filling.costliest_first(), filling.sizes, filling.objective())
    if 2 * tokens <= filling.cap * len(filling.sizes):
        assert slots is not None


@pytest.mark.parametrize(("rise", "lowest"), [(0, 1.0), (3, 1.0), (0, 0.3), (3, 0.1), (11, 0.5)])
def test_small_samples_follow_the_profile(rise: int, lowest: float) -> None:
    """With the overhead of a micro-batch, and to within two samples."""
    filling = Filling([1] * 2000, 2000, profile(12, 4, rise, lowest))
    problem = filling.problem()
    slots = fill_slots(filling.costliest_first(), filling.sizes, filling.objective())
    assert slots is not None
    costs = [problem.cost(samples) for samples in slots]
    wanted = [sum(costs) * size / sum(filling.sizes) for size in filling.sizes]
    smallest = problem.cost([0])
    assert costs == pytest.approx([max(size, smallest) for size in wanted], abs=2)


@pytest.mark.parametrize("seed", range(4))
def test_swapped_samples_bring_slots_closer_to_their_sizes(seed: int) -> None:
    generator = random.Random(seed)
    lengths = [int(300 * generator.lognormvariate(0, 0.3)) + 1 for _ in range(60)]
    filling = Filling(lengths, 100_000, profile(20, 4, 3, 0.3))

    def off(swaps: int) -> float:
        slots = fill_slots(
            filling.costliest_first(), filling.sizes, filling.objective(), swaps=swaps
        )
        assert slots is not None
        costs = [filling.problem().cost(samples) for samples in slots]
        wanted = [sum(costs) * size / sum(filling.sizes) for size in filling.sizes]
        return sum((cost - size) ** 2 for cost, size in zip(costs, wanted, strict=True))

    assert off(1) < 0.7 * off(0)
    assert off(3) < 0.5 * off(0)


def swapped(
    over: list[float], room: list[int], *, most: int | None = None, turn: int = 0
) -> list[list[int]]:
    """Slots of samples of 60, 20 and 30, of 20 and 10, and of 40 tokens."""
    filling = Filling([60, 20, 30, 20, 10, 40], 1000, [1.0] * 3)
    slots = [[0, 1, 2], [3, 4], [5]]
    problem = filling.problem(max_samples_per_row=most)
    before = sum(over), sum(room)
    swap(slots, over, room, problem, turn)
    assert (sum(over), sum(room)) == (pytest.approx(before[0]), before[1])
    return [sorted(samples) for samples in slots]


def test_samples_are_swapped_where_slots_may_hold_them() -> None:
    """Of the slot that is most over its size to the one that lacks most: half of the difference is
    the sample of 20 tokens, or that of 30 for that of 10."""
    as_they_were = [[0, 1, 2], [3, 4], [5]]
    assert swapped([20.0, -20.0, 0.0], [500, 500, 500]) != as_they_were
    assert swapped([24.0, -24.0, 0.0], [500, 500, 500]) == [[0, 2], [1, 3, 4], [5]]
    # No further sample; then neither slot may change, and none is given away that is alone.
    assert swapped([24.0, -24.0, 0.0], [500, 500, 500], most=3) == [[0, 1, 4], [2, 3], [5]]
    assert swapped([24.0, -24.0, 0.0], [500, -1, 500]) == as_they_were
    assert swapped([24.0, -24.0, 0.0], [-1, 500, 500]) == as_they_were
    assert swapped([0.0, -45.0, 45.0], [500, 500, 500]) == [[0, 1, 2], [3, 5], [4]]
    assert [] not in swapped([0.0, -56.0, 56.0], [500, 500, 500])
    assert swapped([24.0, -24.0, 0.0], [500, 10, 500]) == as_they_were
    assert swapped([24.0, -24.0, 0.0], [500, 500, 500], turn=1) == as_they_were


def test_a_full_slot_is_passed_over_for_the_next_that_lacks() -> None:
    """Slot 1 lacks most, and again once it is full."""
    filling = Filling([8, 8, 8, 1], 10, [0.2, 1.0, 0.4])
    slots = fill_slots(filling.costliest_first(), filling.sizes, filling.objective())
    assert slots == [[2], [0, 3], [1]]


def test_empty_slots_take_the_cheapest_of_the_costliest() -> None:
    work = Filling([5, 4, 3, 9, 1], 100, [1.0] * 4).problem()
    # 5 + 4 + 3 costs more than 9 + 1, and 5 + 4 less.
    assert settle([[0, 1, 2], [], [3, 4], []], work.costs) == [[0, 1], [2], [3], [4]]


def test_empty_slots_that_stay_empty_come_first() -> None:
    work = Filling([5, 4, 3], 100, [1.0] * 5).problem()
    assert settle([[0, 1], [], [], [2], []], work.costs) == [[], [], [0], [1], [2]]
    assert settle([[], [], []], work.costs) == [[], [], []]
