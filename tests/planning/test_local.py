"""Micro-batches without a search: packed as a scan over all bins would pack them; of samples that
stay on their rank, what the rule plans and how soon that ends; of all ranks, where they are placed.

That its plans keep the invariants is shown with those of others, in test_plan_invariants.
"""

from __future__ import annotations

from itertools import pairwise, product
from random import Random
from statistics import mean
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from planning_cases import (
    Case,
    cases,
    examples,
    least_count,
    plan_locally,
)

from mcore_batching.planning import (
    CostModel,
    ParallelDims,
    PlannerConfig,
    Problem,
    local,
    micro_batch_lower_bound,
    plan_step,
    predicted_step_time,
)
from mcore_batching.planning.local import fill_local, pack_local
from mcore_batching.planning.placement import largest_first, place

CONFIG = PlannerConfig(max_tokens_per_gpu=10)


@examples(200)
@given(cases())
@example(Case([1] * 24, ParallelDims(pipeline_parallel=2), CONFIG, None))  # 8, fewer than pairs
@example(Case([1] * 7, ParallelDims(pipeline_parallel=2), CONFIG, None))  # 6, more than pairs
def test_the_count_is_the_least_legal_one_that_packing_or_the_pipeline_needs(case: Case) -> None:
    problem = Problem.of(case.lengths, case.dims, case.config)
    packed = pack_local(problem)
    needed = len(packed)
    if case.config.searches and case.dims.pipeline_parallel > 1:
        stages, samples = case.dims.pipeline_parallel, len(case.lengths)
        needed = max(needed, min(3 * stages, samples), min(4 * stages, samples // 2))
    assert local.least_count(problem, packed) == least_count(needed, case.dims)


@pytest.mark.parametrize(("stages", "chunks", "most"), [(2, 1, 1.04), (4, 1, 1.04), (4, 2, 1.08)])
def test_steps_end_soon_beside_the_plan_that_is_searched(
    stages: int, chunks: int, most: float
) -> None:
    """The mean ratio to `plan_step` of the same 48 log-normal lengths, over five draws."""
    dims = ParallelDims(pipeline_parallel=stages, virtual_pipeline=chunks)
    config = PlannerConfig(max_tokens_per_gpu=16384, plan_effort=50)
    ratios = []
    for seed in range(5):
        random = Random(seed)
        lengths = [min(16384, int(random.lognormvariate(7.6, 0.8))) for _ in range(48)]
        rule = plan_locally(lengths, dims, config, [0] * len(lengths))
        searched = plan_step(lengths, dims, config)
        ratios.append(predicted_step_time(rule, lengths) / predicted_step_time(searched, lengths))
    assert mean(ratios) < most, ratios


EVEN = [5, 4, 3, 3, 3, 1], [[0, 1, 2, 3, 4], [5]], {"max_tokens_per_gpu": 100}
STEEP = [8, 4, 4, 4, 4], [[0, 1, 2, 3, 4]]
TENS = [1, 10, 20, 30, 40, 50], [[1], [2], [3], [4], [5]]


@pytest.mark.parametrize(
    ("lengths", "packed", "options", "count", "expected"),
    [
        # 5, 4, 3, 3, 3 dealt to the lighter side: 5+3 against 4+3+3. Then 4 against 3+3.
        (*EVEN, 2, ((0, 1, 2, 3, 4), (5,))),
        (*EVEN, 3, ((1, 2, 4), (0, 3), (5,))),
        (*EVEN, 4, ((0, 3), (2, 4), (1,), (5,))),
        (*EVEN, 8, ((0,), (1,), (2,), (3,), (4,), (), (), (5,))),
        ([2, 9, 4], [[0], [1], [2]], {}, 5, ((1,), (2,), (), (), (0,))),
        ([2, 9, 4], [[0], [1], [2]], {"balance": "none"}, 5, ((0,), (1,), (), (), (2,))),
        ([1, 9, 2], [[0, 1, 2]], {"balance": "none"}, 3, ((1,), (2,), (0,))),
        ([], [], {}, 3, ((), (), ())),
        ([3], [[0]], {}, 3, ((), (), (0,))),
        ([1, 1, 1], [[0, 1, 2]], {"fill": "placeholder"}, 3, ((), (), (0, 1, 2))),
        # Samples without tokens are split, too.
        ([0, 0, 0, 0], [[0, 1, 2, 3]], {}, 4, ((0,), (1,), (2,), (3,))),
        # Under a steep quadratic term one 8 outweighs everything else; in tokens the largest is
        # first.
        (*STEEP, {"cost_model": CostModel(linear=0, quadratic=1)}, 2, ((1, 2, 3, 4), (0,))),
        (*STEEP, {"balance": "tokens"}, 2, ((0, 3), (1, 2, 4))),
        # Placeholders and small ones while the pipeline fills, small ones while it drains.
        (*TENS, {"pipeline_parallel": 2}, 6, ((), (2,), (4,), (5,), (3,), (1,))),
        (
            *TENS,
            {"pipeline_parallel": 2, "virtual_pipeline": 2},
            6,
            ((), (1,), (2,), (3,), (4,), (5,)),
        ),
        # Ranks that wait for each other have slots of about the same weight.
        (
            *TENS,
            {"pipeline_parallel": 2, "data_parallel": 2, "expert_parallel": 2},
            6,
            ((5,), (4,), (3,), (2,), (), (1,)),
        ),
        # What a rule of the user's packed stays as it is.
        (
            [5, 5, 1, 1],
            [[0, 1], [2, 3]],
            {"pipeline_parallel": 2, "packing": "first-fit"},
            2,
            ((0, 1), (2, 3)),
        ),
    ],
)
def test_filling(
    lengths: list[int],
    packed: list[list[int]],
    options: dict[str, Any],
    count: int,
    expected: tuple[tuple[int, ...], ...],
) -> None:
    """The heaviest is split in even halves first; the largest runs first where order takes no time;
    placeholders come just before the last."""
    options = {"max_tokens_per_gpu": 50} | options
    cost_model = options.pop("cost_model", None)
    sizes = {name: options.pop(name) for name in [*options] if name.endswith("_parallel")}
    dims = ParallelDims(**sizes, virtual_pipeline=options.pop("virtual_pipeline", 1))
    problem = Problem.of(lengths, dims, PlannerConfig(**options), cost_model)
    assert fill_local(problem, packed, count) == expected


def test_splitting_many_samples_stays_fast() -> None:
    """20,000 samples of one micro-batch are split down to single ones within a test."""
    lengths = [1 + index % 7 for index in range(20_000)]
    problem = Problem.of(lengths, ParallelDims(), PlannerConfig(max_tokens_per_gpu=10**6))
    filled = fill_local(problem, pack_local(problem), 20_000)
    assert all(len(samples) == 1 for samples in filled)
    weights = [lengths[sample] for (sample,) in filled]
    assert all(before >= after for before, after in pairwise(weights))


def test_a_rank_may_take_more_micro_batches_where_that_evens_out_ranks() -> None:
    """In folds of two the rank of the 5 gets two of the 1s, at least."""
    config, costs = PlannerConfig(max_tokens_per_gpu=5), CostModel(quadratic=0, per_micro_batch=0)
    problem = Problem.of([5, 1, 1, 1, 1, 1], ParallelDims(data_parallel=2), config, costs)
    ranks = place(problem, [(sample,) for sample in range(6)], 5)
    assert sorted(len(list(filter(None, rank))) for rank in ranks) == [1, 5]


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ((((0,), (2,), (4,)), ((1,), (3,), (5,))), (((2,), (0,), (4,)), ((3,), (1,), (5,)))),
        # A rank does not end with a placeholder for the largest to come first.
        ((((0,), (1,)), ((), (3,))), (((0,), (1,)), ((), (3,)))),
    ],
)
def test_in_lockstep_the_slot_with_the_largest_micro_batch_comes_first_on_all_ranks(
    ranks: Any, expected: Any
) -> None:
    dims = ParallelDims(data_parallel=2, expert_parallel=2)
    problem = Problem.of([40, 50, 10, 60, 30, 45], dims, PlannerConfig(max_tokens_per_gpu=100))
    assert largest_first(problem, ranks) == expected


def scan(sizes: list[int], capacity: int, order: list[int], most: int | None) -> list[list[int]]:
    bins: list[list[int]] = []
    free: list[int] = []
    for item in order:
        for index, room in enumerate(free):
            if room >= sizes[item] and (most is None or len(bins[index]) < most):
                bins[index].append(item)
                free[index] -= sizes[item]
                break
        else:
            bins.append([item])
            free.append(capacity - sizes[item])
    return bins


PERCENT = st.integers(0, 105) | st.integers(0, 10) | st.integers(33, 50)


@examples(500)
@given(
    st.sampled_from([1, 7, 20, 100, 1000]),
    st.sampled_from([None, 1, 2, 3, 9]),
    st.integers(0, 120).flatmap(lambda count: st.lists(PERCENT, min_size=count, max_size=count)),
)
@example(20, None, [20, 35, 45, 50, 30, 20])  # in order takes fewer
def test_packing_is_bin_for_bin_the_scan(
    capacity: int, most: int | None, percents: list[int]
) -> None:
    """By either rule, or the one that needs fewer, decreasing on a tie; those over the cap last."""
    lengths = [capacity * percent // 100 for percent in percents]
    sizes = [max(1, length) for length in lengths]
    oversize = [[i] for i, size in enumerate(sizes) if size > capacity]
    order = [i for i, size in enumerate(sizes) if size <= capacity]
    expected = {"first-fit": scan(sizes, capacity, order, most)}
    order.sort(key=lambda index: (-sizes[index], index))
    expected["first-fit-decreasing"] = scan(sizes, capacity, order, most)
    expected["auto"] = min(expected["first-fit-decreasing"], expected["first-fit"], key=len)
    for rule, bins in expected.items():
        options: Any = {"packing": rule, "max_samples_per_row": most}
        config = PlannerConfig(max_tokens_per_gpu=capacity, **options)
        packed = pack_local(Problem.of(lengths, ParallelDims(), config))
        assert packed == [*map(sorted, bins), *oversize]


def fewest_bins(sizes: list[int], capacity: int) -> int:
    for count in range(len(sizes) + 1):
        for bins in product(range(count), repeat=len(sizes)):
            room = [capacity] * count
            for size, own in zip(sizes, bins, strict=True):
                room[own] -= size
            if min(room, default=0) >= 0:
                return count
    raise AssertionError("one bin an item always does")


@examples(300)
@given(st.lists(st.integers(0, 30), max_size=5), st.sampled_from([12, 13, 20]))
def test_no_packing_takes_fewer_micro_batches_than_the_lower_bound(
    lengths: list[int], cap: int
) -> None:
    problem = Problem.of(lengths, ParallelDims(), PlannerConfig(max_tokens_per_gpu=cap))
    fitting = [tokens for tokens in problem.tokens if tokens <= cap]
    fewest = len(problem.oversize) + fewest_bins(fitting, cap)
    over_half, total = sum(2 * n > cap for n in problem.tokens), sum(fitting)
    bound = micro_batch_lower_bound(problem)
    assert max(over_half, len(problem.oversize) - (-total // cap)) <= bound <= fewest
