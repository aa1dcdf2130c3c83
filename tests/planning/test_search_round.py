"""One round of the search: target sizes of slots, and samples assigned to them, against the same
rule stated as a scan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_cases import examples

from mcore_batching.planning import CostModel, ParallelDims, PlannerConfig, Problem
from mcore_batching.planning.search import Objective
from mcore_batching.planning.search.assign import Slots, assign, by_cost, fill_empty_slots
from mcore_batching.planning.search.rounds import Rounds
from mcore_batching.planning.search.targets import Targets, even_ranks

PIPELINES = [
    ParallelDims(pipeline_parallel=4),
    ParallelDims(pipeline_parallel=4, virtual_pipeline=2),
    # 24 micro-batches in groups of 7: the last has 3.
    ParallelDims(pipeline_parallel=4, virtual_pipeline=2, microbatch_group_size=7),
]


def targets_of(dims: ParallelDims, count: int, model: CostModel | None = None) -> Targets:
    config = PlannerConfig(max_tokens_per_gpu=100_000)
    return Targets(Problem.of([100], dims, config, model), count, 300.0)


@pytest.mark.parametrize("dims", PIPELINES)
@pytest.mark.parametrize("times", [1.5, 4.0, 20.0])
def test_a_long_sample_is_the_plateau(dims: ParallelDims, times: float) -> None:
    """Others add up to what is left, as long as each has a small sample; then some have none."""
    count = dims.round_up_num_microbatches(24)
    targets = targets_of(dims, count)
    work = 10_000.0 * count
    longest = times * targets.plateau(work)
    sizes, is_long, _ = targets.of_rank(max(work, longest), longest)
    assert is_long
    assert max(sizes) == longest
    assert sizes.count(longest) == 1 or dims.virtual_pipeline == 1
    assert sum(sizes) == pytest.approx(max(work, longest + (count - 1) * 256.0), rel=0.05)
    assert min(sizes) >= 300.0 or longest + 300.0 * (count - 1) > work


@pytest.mark.parametrize(("times", "ranks_of_their_own"), [(2.0, 1), (3.0, 2)])
def test_ranks_with_longer_samples_have_less_work_so_that_all_end_together(
    times: float, ranks_of_their_own: int
) -> None:
    """Two long samples share a rank where the target beside the longer one is hardly smaller."""
    targets = targets_of(ParallelDims(pipeline_parallel=8), 16)
    work = 4_000.0 * 16
    top = times * targets.plateau(work)
    works, longest = even_ranks(targets, work, 4, [top, 0.9 * top, 300.0])
    assert sum(size > 300.0 for size in longest) == ranks_of_their_own
    assert works == sorted(works)
    assert works[0] < 0.7 * work < works[ranks_of_their_own]
    assert sum(works) == pytest.approx(4 * work, rel=1e-9)
    ends = [targets.of_rank(*each).end for each in zip(works, longest, strict=True)]
    assert ends == pytest.approx([ends[-1]] * 4, rel=0.01)


def test_a_late_fall_is_made_of_any_number_of_slots() -> None:
    """The powers of its decay are 0 from some thousand slots on, and were divided by."""
    layers = (("a", 1.0, 0.0, 0.0, 1.0), ("V", 4.0, 0.0, 0.0, 2.0))
    model = CostModel(layers="aaaV", layer_costs=layers)
    sizes = targets_of(ParallelDims(pipeline_parallel=2), 1200, model).usual
    assert max(sizes) == sizes[600] == 1.0 > sizes[-1]


def test_larger_targets_have_larger_slots() -> None:
    """Of equal targets, those further inside."""
    dims, config = ParallelDims(pipeline_parallel=8), PlannerConfig(max_tokens_per_gpu=100_000)
    problem = Problem.of([1000, 800, 600, 400, 200], dims, config)
    slots = [[0], [1], [2], [3], [4]]
    arranged = Rounds(Objective(problem))._arranged(slots, [300.0, 900.0, 900.0, 900.0, 500.0])
    assert arranged == [[4], [2], [0], [1], [3]]


def test_placeholders_come_first() -> None:
    """With fewer samples than slots, where they delay others least while the pipeline fills."""
    dims = ParallelDims(data_parallel=2, pipeline_parallel=4)
    config = PlannerConfig(max_tokens_per_gpu=100_000)
    rounds = Rounds(Objective(Problem.of([900, 800, 700, 600, 500], dims, config)))
    rounds.make(8)
    for slots in rounds.best[8].ranks:
        assert list(map(bool, slots)) == sorted(map(bool, slots))


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
