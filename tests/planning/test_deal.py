"""Targets of slots, and samples dealt to them, against the same rule stated as a scan."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_cases import examples

from mcore_batching.planning import CostModel, ParallelDims, PlannerConfig, Problem
from mcore_batching.planning.pipeline import Clock
from mcore_batching.planning.search import Objective
from mcore_batching.planning.search.deal import (
    EFFORT_OF_DEAL,
    deal,
    settle,
    swap,
)
from mcore_batching.planning.search.lockstep_targets import Samples, lockstep_targets
from mcore_batching.planning.search.objective import Slots
from mcore_batching.planning.search.targets import Kind, Targets, all_targets


@dataclass(frozen=True)
class Filling:
    """Samples of one rank, and relative sizes for its slots."""

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

    def targets(self) -> list[float]:
        problem = self.problem()
        work = sum(problem.costs) + problem.cost_model.per_micro_batch * len(self.sizes)
        return [work * size / sum(self.sizes) for size in self.sizes]

    def dealt(self, *, passes: int = 0) -> Slots | None:
        dealt = deal(self.costliest_first(), [self.targets()], self.objective(), passes=passes)
        return dealt and dealt[0]

    def costliest_first(self) -> list[int]:
        costs = self.problem().costs
        return sorted(range(len(costs)), key=lambda sample: (-costs[sample], sample))


@st.composite
def fillings(draw: st.DrawFn, longest: float = 1.5) -> Filling:
    """Up to 30 samples, the longest so many caps long, for up to 10 slots."""
    cap = draw(st.sampled_from([10, 40, 1000]))
    count = draw(st.integers(1, 10))
    sizes = draw(st.lists(st.sampled_from([0.1, 0.5, 0.7, 1.0]), min_size=count, max_size=count))
    return Filling(
        draw(st.lists(st.integers(0, int(longest * cap)), max_size=30)),
        cap,
        sizes,
    )


def scan(filling: Filling) -> list[list[int]] | None:
    """Each sample to the slot that lacks most of those that have room."""
    problem, targets = filling.problem(), filling.targets()
    fixed = problem.cost_model.per_micro_batch
    may_hold = [slot for slot, size in enumerate(targets) if size > fixed] or range(len(targets))
    lack = [size - fixed for size in targets]
    slots: list[list[int]] = [[] for _ in targets]
    for sample in filling.costliest_first():
        tokens = max(filling.lengths[sample], 1)
        held = [sum(max(filling.lengths[other], 1) for other in own) for own in slots]
        has_room = [s for s in may_hold if not slots[s] or held[s] + tokens <= filling.cap]
        if not has_room:
            return None
        # What a slot gets beyond its target is not spread here: slots of one rank, in turn.
        chosen = max(has_room, key=lambda slot: (lack[slot], -slot))
        slots[chosen].append(sample)
        lack[chosen] -= problem.costs[sample]
    return slots


@examples(500)
@given(fillings())
def test_samples_go_where_most_is_lacking(filling: Filling) -> None:
    """Each slot is a rank of its own, so that what it gets beyond its target changes no other's."""
    targets = [[size] for size in filling.targets()]
    dealt = deal(filling.costliest_first(), targets, filling.objective(), passes=0)
    assert (dealt and [samples for (samples,) in dealt]) == scan(filling)


@examples(500)
@given(fillings(), st.integers(0, 4), st.none() | st.integers(1, 5))
def test_filled_slots_are_legal(filling: Filling, swaps: int, most: int | None) -> None:
    work = filling.objective(max_samples_per_row=most)
    before = work.effort
    dealt = deal(filling.costliest_first(), [filling.targets()], work, passes=swaps)
    used = EFFORT_OF_DEAL * (len(filling.lengths) + swaps * len(filling.sizes))
    assert work.effort == before - used
    if dealt is None:
        assert filling.lengths
        return
    (slots,) = dealt
    assert len(slots) == len(filling.sizes)
    assert sorted(s for samples in slots for s in samples) == list(range(len(filling.lengths)))
    for samples in slots:
        tokens = sum(max(filling.lengths[sample], 1) for sample in samples)
        assert tokens <= filling.cap or len(samples) == 1
        assert most is None or len(samples) <= most
    slots = settle(slots, work.problem.costs)
    if [] in slots:
        assert max(map(len, slots)) <= 1
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
        assert filling.dealt() is not None


@pytest.mark.parametrize("smallest", [1.0, 0.3, 0.1])
def test_small_samples_follow_the_targets(smallest: float) -> None:
    """With the overhead of a micro-batch, and to within two samples."""
    filling = Filling([1] * 2000, 2000, [smallest, 0.4, 0.7, *[1.0] * 8, 0.5])
    problem = filling.problem()
    slots = filling.dealt()
    assert slots is not None
    costs = [problem.cost(samples) for samples in slots]
    wanted = [sum(costs) * size / sum(filling.sizes) for size in filling.sizes]
    assert costs == pytest.approx([max(size, problem.cost([0])) for size in wanted], abs=2)


@pytest.mark.parametrize("seed", range(4))
def test_swapped_samples_bring_slots_closer_to_their_sizes(seed: int) -> None:
    generator = random.Random(seed)
    lengths = [int(300 * generator.lognormvariate(0, 0.3)) + 1 for _ in range(60)]
    filling = Filling(lengths, 100_000, [0.2, 0.4, 0.7, *[1.0] * 14, 0.8, 0.6, 0.4])

    def off(swaps: int) -> float:
        slots = filling.dealt(passes=swaps)
        assert slots is not None
        costs = [filling.problem().cost(samples) for samples in slots]
        wanted = [sum(costs) * size / sum(filling.sizes) for size in filling.sizes]
        return sum((cost - size) ** 2 for cost, size in zip(costs, wanted, strict=True))

    assert off(1) < 0.7 * off(0)
    assert off(3) < 0.55 * off(0)


def swapped(over: list[float], room: list[int], *, most: int | None = None) -> list[list[int]]:
    """Slots of samples of 60, 20 and 30, of 20 and 10, and of 40 tokens."""
    filling = Filling([60, 20, 30, 20, 10, 40], 1000, [1.0] * 3)
    slots = [[0, 1, 2], [3, 4], [5]]
    problem = filling.problem(max_samples_per_row=most)
    before = sum(over), sum(room)
    swap(slots, over, room, problem)
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


@pytest.mark.parametrize(
    ("slots", "settled"),
    [
        # 5 + 4 + 3 costs more than 9 + 1, and 5 + 4 less: the cheapest of the costliest slot.
        ([[0, 1, 2], [], [3, 4], []], [[0, 1], [2], [3], [4]]),
        ([[0, 1], [], [], [2], []], [[0], [1], [], [], [2]]),  # the last slot is real
        ([[], [], []], [[], [], []]),
    ],
)
def test_slots_are_settled(slots: Slots, settled: Slots) -> None:
    assert settle(slots, Filling([5, 4, 3, 9, 1], 100, [1.0] * 4).problem().costs) == settled


def targets_of(dims: ParallelDims, count: int, first: float = 0.25, **options: Any) -> Targets:
    config = PlannerConfig(max_tokens_per_gpu=100_000)
    kind = Kind(count, first, **options)
    return Targets(Objective(Problem.of([100], dims, config)), kind, 300.0)


PIPELINES = [
    ParallelDims(pipeline_parallel=2),
    ParallelDims(pipeline_parallel=4),
    ParallelDims(pipeline_parallel=8),
    ParallelDims(pipeline_parallel=4, virtual_pipeline=2),
    # 16 micro-batches in groups of 6: the last has 4.
    ParallelDims(pipeline_parallel=4, virtual_pipeline=2, microbatch_group_size=6),
]


@pytest.mark.parametrize("dims", PIPELINES)
@pytest.mark.parametrize("gentle", [False, True])
@pytest.mark.parametrize("count", [4, 16, 44])
def test_targets_add_up_to_the_work_and_rise_and_fall(
    dims: ParallelDims, gentle: bool, count: int
) -> None:
    count = dims.round_up_num_microbatches(count)
    targets = targets_of(dims, count, gentle=gentle)
    sizes, long = targets.of_rank(10_000.0 * count, 500.0)
    assert not long
    assert sum(sizes) == pytest.approx(10_000.0 * count, rel=1e-6)
    peak = sizes.index(max(sizes))
    assert sizes[: peak + 1] == sorted(sizes[: peak + 1])
    assert sizes[peak:] == sorted(sizes[peak:], reverse=True)


@pytest.mark.parametrize("dims", PIPELINES)
@pytest.mark.parametrize("times", [1.5, 4.0, 20.0])
def test_a_long_sample_is_the_plateau(dims: ParallelDims, times: float) -> None:
    """Others add up to what is left, as long as each has a small sample; then some have none."""
    count = dims.round_up_num_microbatches(24)
    targets = targets_of(dims, count)
    work = 10_000.0 * count
    longest = times * targets.plateau(work)
    sizes, long = targets.of_rank(max(work, longest), longest)
    assert long
    assert max(sizes) == longest
    assert sizes.count(longest) == 1 or dims.virtual_pipeline == 1
    assert sum(sizes) == pytest.approx(max(work, longest + (count - 1) * 256.0), rel=0.05)
    assert min(sizes) >= 300.0 or longest + 300.0 * (count - 1) > work


def test_long_samples_share_a_rank() -> None:
    """The first rank's slots are made for those that are as long as its plateau, or nearly."""
    targets = targets_of(PIPELINES[1], 12)
    work = 12_000.0
    long = 3.0 * targets.plateau(work)
    first, second = all_targets(targets, [work, work], [long, 0.5 * long, 100.0])
    assert max(first) == long
    assert max(second) == pytest.approx(targets.plateau(work), rel=0.05)


def lockstep_samples(alone: list[float], filled: float, ranks: int) -> Samples:
    """Samples of which each fills a micro-batch up to the same cost."""
    shares = [cost / ranks for cost in alone]
    return Samples(alone, [filled] * len(alone), list(itertools.accumulate(shares)))


def lockstep_objective(virtual_pipeline: int = 1) -> Objective:
    dims = ParallelDims(
        data_parallel=4, pipeline_parallel=4, virtual_pipeline=virtual_pipeline, expert_parallel=4
    )
    config = PlannerConfig(max_tokens_per_gpu=100_000)
    model = CostModel(per_micro_batch=0.0)
    return Objective(Problem.of([100], dims, config, model))


def test_slots_in_lockstep_are_as_large_as_their_costliest_sample() -> None:
    """Of 12 samples every rank has one of the four costliest, of the next four, of the last."""
    objective = lockstep_objective()
    samples = lockstep_samples([9000.0] * 4 + [6000.0] * 4 + [2000.0] * 4, 9500.0, 4)
    targets = Targets(objective, Kind(8, 0.25), 300.0)
    sizes = lockstep_targets(targets, 24_000.0, samples, objective)
    assert sum(sizes) == pytest.approx(24_000.0, rel=0.01)
    first, second, third, *_ = sorted(sizes, reverse=True)
    assert first >= 9000.0
    assert second >= 6000.0
    assert third >= 2000.0
    assert max(sizes) <= 9500.0


def test_a_fall_that_fades_is_made_of_any_number_of_slots() -> None:
    """The powers of its decay are 0 from some thousand slots on, and were divided by."""
    sizes = targets_of(ParallelDims(pipeline_parallel=2), 1200, fades=True).relative
    assert max(sizes) == sizes[600] == 1.0 > sizes[-1]


def test_sizes_are_reversed_where_backward_passes_are_the_cheaper_ones() -> None:
    """A step run backwards is one with forward and backward exchanged."""

    def sizes(ratio: float) -> list[float]:
        model = CostModel(per_micro_batch=0.0, backward_ratio=ratio)
        dims, config = ParallelDims(pipeline_parallel=4), PlannerConfig(max_tokens_per_gpu=100)
        objective = Objective(Problem.of([100], dims, config, model))
        return Targets(objective, Kind(12, 0.25), 1.0).of_rank(40_000.0, 0.0)[0]

    assert sizes(0.5) == sizes(2.0)[::-1] != sizes(2.0)


@pytest.mark.parametrize("virtual_pipeline", [1, 2])
def test_fitted_slots_in_lockstep_end_sooner(
    virtual_pipeline: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the largest as large as before, and no slot larger than the cap allows."""
    objective = lockstep_objective(virtual_pipeline)
    schedule = objective.problem.schedule
    samples = lockstep_samples([9000.0, *[2000.0] * 30, *[500.0] * 60], 6000.0, 4)
    targets = Targets(objective, Kind(12, 0.25), 300.0)
    effort = objective.effort
    fitted = lockstep_targets(targets, 40_000.0, samples, objective)
    assert objective.effort < effort
    monkeypatch.setattr("mcore_batching.planning.search.lockstep_targets.FIT_STEPS", 1)
    shaped = lockstep_targets(targets, 40_000.0, samples, objective)
    assert sum(fitted) == pytest.approx(sum(shaped), rel=0.001)
    assert Clock(fitted, schedule).end < 0.998 * Clock(shaped, schedule).end
    assert max(fitted) == 9000.0
    assert sorted(fitted)[-2] <= 6000.0 * (1 + 1e-9)
