"""Samples assigned to targets, against the same rule stated as a scan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_cases import examples

from mcore_batching.planning import CostModel, ParallelDims, PlannerConfig, Problem
from mcore_batching.planning.search.assign import Slots, assign, by_cost, fill_empty_slots


@dataclass(frozen=True)
class Filling:
    """Samples of one rank, and relative sizes for its slots."""

    lengths: list[int]
    cap: int
    sizes: list[float]

    def problem(self, **options: Any) -> Problem:
        return Problem.of(
            self.lengths,
            ParallelDims(),
            PlannerConfig(max_tokens_per_gpu=self.cap, **options),
            CostModel(quadratic=0.01, per_micro_batch=3.0),
        )

    def targets(self) -> list[float]:
        problem = self.problem()
        work = sum(problem.costs) + problem.cost_model.per_micro_batch * len(self.sizes)
        return [work * size / sum(self.sizes) for size in self.sizes]

    def assigned(self, **options: Any) -> Slots | None:
        problem = self.problem(**options)
        order = by_cost(range(problem.num_samples), problem.costs)
        assigned = assign(order, [self.targets()], problem)
        return assigned and assigned[0]


@st.composite
def fillings(draw: st.DrawFn, longest: float = 1.5) -> Filling:
    """Up to 30 samples, the longest so many caps long, for up to 10 slots."""
    cap = draw(st.sampled_from([10, 40, 1000]))
    count = draw(st.integers(1, 10))
    sizes = draw(st.lists(st.sampled_from([0.1, 0.5, 0.7, 1.0]), min_size=count, max_size=count))
    lengths = draw(st.lists(st.integers(0, int(longest * cap)), max_size=30))
    return Filling(lengths, cap, sizes)


def scan(filling: Filling, most: int | None) -> list[list[int]] | None:
    """Each sample to the slot that lacks most of those that have room."""
    problem, targets = filling.problem(), filling.targets()
    fixed = problem.cost_model.per_micro_batch
    may_hold = [slot for slot, size in enumerate(targets) if size > fixed] or range(len(targets))
    lack = [size - fixed for size in targets]
    slots: list[list[int]] = [[] for _ in targets]
    for sample in sorted(range(len(lack and problem.costs)), key=lambda i: -problem.costs[i]):
        tokens = max(filling.lengths[sample], 1)
        held = [sum(max(filling.lengths[other], 1) for other in own) for own in slots]
        has_room = [
            slot
            for slot in may_hold
            if not slots[slot]
            or (held[slot] + tokens <= filling.cap and len(slots[slot]) < (most or 99))
        ]
        if not has_room:
            return None
        chosen = max(has_room, key=lambda slot: (lack[slot], -slot))
        slots[chosen].append(sample)
        lack[chosen] -= problem.costs[sample]
    return slots


@examples(500)
@given(fillings(), st.none() | st.integers(1, 5))
def test_samples_go_where_most_is_lacking(filling: Filling, most: int | None) -> None:
    """Within the cap and the most samples of a micro-batch; then no empty slot is needless."""
    assigned = filling.assigned(max_samples_per_row=most)
    assert assigned == scan(filling, most)
    if assigned is None:
        return
    slots = fill_empty_slots(assigned, filling.problem().costs)
    assert sorted(s for samples in slots for s in samples) == list(range(len(filling.lengths)))
    assert [] not in slots or max(map(len, slots)) <= 1
    assert slots[-1] or not any(slots)


@examples(300)
@given(fillings(longest=0.5))
def test_slots_that_have_room_for_all_are_filled(filling: Filling) -> None:
    """No sample is over half the cap: were there room in no slot, all would be over half full.
    Slots whose target is no more than their overhead are to stay empty."""
    tokens = sum(max(length, 1) for length in filling.lengths)
    fixed = filling.problem().cost_model.per_micro_batch
    may_hold = sum(size > fixed for size in filling.targets()) or len(filling.sizes)
    if 2 * tokens <= filling.cap * may_hold:
        assert filling.assigned() is not None


@pytest.mark.parametrize("smallest", [1.0, 0.3, 0.1])
def test_small_samples_follow_the_targets(smallest: float) -> None:
    """With the overhead of a micro-batch, and to within two samples."""
    filling = Filling([1] * 2000, 2000, [smallest, 0.4, 0.7, *[1.0] * 8, 0.5])
    problem, slots = filling.problem(), filling.assigned()
    assert slots is not None
    costs = [problem.cost(samples) for samples in slots]
    wanted = [sum(costs) * size / sum(filling.sizes) for size in filling.sizes]
    assert costs == pytest.approx([max(size, problem.cost([0])) for size in wanted], abs=2)


def test_nothing_is_assigned_where_a_target_is_negative() -> None:
    filling = Filling([5, 4, 3], 100, [1.0])
    problem = filling.problem()
    assert assign([0, 1, 2], [[-1.0, 1.0], [-1.0, -1.0]], problem) == [[[], [0, 1, 2]], [[], []]]
    assert assign([0], [[-1.0]], problem) is None


@pytest.mark.parametrize(
    ("slots", "filled"),
    [
        # 5 + 4 + 3 costs more than 9 + 1, and 5 + 4 less: the cheapest of the costliest slot.
        ([[0, 1, 2], [], [3, 4], []], [[0, 1], [2], [3], [4]]),
        ([[0, 1], [], [], [2], []], [[0], [1], [], [], [2]]),  # the last slot is real
        ([[], [], []], [[], [], []]),
    ],
)
def test_empty_slots_are_filled(slots: Slots, filled: Slots) -> None:
    costs = Filling([5, 4, 3, 9, 1], 100, [1.0] * 4).problem().costs
    assert fill_empty_slots(slots, costs) == filled
