"""First-fit and first-fit-decreasing are bin for bin the linear scan; the lower bound is one."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st
from planning_cases import examples

from mcore_batching.planning import ParallelDims, PlannerConfig, Problem, micro_batch_lower_bound
from mcore_batching.planning.packing.packing import first_fit, first_fit_decreasing


def scan(
    sizes: list[int], capacity: int, order: list[int], most: int | None = None
) -> list[list[int]]:
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


capacities = st.sampled_from([1, 7, 20, 100, 1000])
problems = capacities.flatmap(
    lambda capacity: st.tuples(
        st.lists(
            st.integers(0, capacity)
            | st.integers(0, max(1, capacity // 10))
            | st.integers(capacity // 3, capacity // 2),
            max_size=120,
        ),
        st.just(capacity),
    )
)


most_items = st.none() | st.integers(1, 9)


@examples(500)
@given(problems, most_items)
def test_both_rules_are_bin_for_bin_the_scan(
    problem: tuple[list[int], int], most: int | None
) -> None:
    sizes, capacity = problem
    order = list(range(len(sizes)))
    assert first_fit(sizes, capacity, max_items=most) == scan(sizes, capacity, order, most)
    order.sort(key=lambda index: (-sizes[index], index))
    found = first_fit_decreasing(sizes, capacity, max_items=most)
    assert found == scan(sizes, capacity, order, most)


def fewest_bins(sizes: list[int], capacity: int) -> int:
    for count in range(len(sizes) + 1):
        for places in itertools.product(range(count), repeat=len(sizes)):
            room = [capacity] * count
            for size, place in zip(sizes, places, strict=True):
                room[place] -= size
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
