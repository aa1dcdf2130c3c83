"""Local scope: ranks that see only their own shard reach the plan that sees all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from planning_cases import Case, cases, examples

from mcore_batching.planning import (
    CostModel,
    LengthError,
    ParallelDims,
    PlannerConfig,
    Problem,
    fill_shard,
    pack_local,
    plan_step,
    shard_ends,
    soonest_count,
)
from mcore_batching.planning.pipeline import Clock
from mcore_batching.planning.search import best_slots, ends_by_count


@examples(300)
@given(cases())
def test_ranks_on_their_own_reach_the_plan_of_all(case: Case) -> None:
    owners = case.owners
    if owners is None:
        owners = [index % case.dims.data_parallel for index in range(len(case.lengths))]
    ranks = range(case.dims.data_parallel)
    shards = [[i for i, owner in enumerate(owners) if owner == rank] for rank in ranks]
    problems = [
        Problem.of([case.lengths[i] for i in shard], case.dims, case.config) for shard in shards
    ]
    bins = list(map(pack_local, problems))
    ends = [shard_ends(problem, packed) for problem, packed in zip(problems, bins, strict=True)]
    latest = [max(each) for each in zip(*ends, strict=True)]
    count = soonest_count(latest, case.dims)
    filled = [fill_shard(problems[rank], bins[rank], count) for rank in ranks]
    step = plan_step(case.lengths, case.dims, case.config, owners=owners)
    assert step.scope == "local"
    for rank in ranks:
        renamed = tuple(tuple(shards[rank][i] for i in samples) for samples in filled[rank])
        assert step.micro_batches[rank] == renamed


def _uneven_ranks(seed: int, ranks: int, stages: int, samples: int) -> list[Problem]:
    """Ranks of log-normal lengths, the first with one very long sample, which wants fewer
    micro-batches than the others."""
    random = Random(seed)
    dims = ParallelDims(data_parallel=ranks, pipeline_parallel=stages)
    config = PlannerConfig(max_tokens_per_gpu=16384)
    problems = []
    for rank in range(ranks):
        lengths = [min(16384, int(random.lognormvariate(7.6, 0.8))) for _ in range(samples)]
        lengths[0] = 16000 if rank == 0 else lengths[0]
        problems.append(Problem.of(lengths, dims, config))
    return problems


def _latest_end(problems: list[Problem], bins: list[list[list[int]]], count: int) -> float:
    filled = [fill_shard(*each, count) for each in zip(problems, bins, strict=True)]
    return max(map(end_of, problems, filled))


def end_of(problem: Problem, rows: Sequence[Sequence[int]]) -> float:
    return Clock(problem.slot_costs(rows), problem.schedule).end


@pytest.mark.parametrize(("seed", "ranks", "stages", "samples"), [(0, 4, 4, 16), (7, 4, 4, 16)])
def test_the_count_is_the_one_at_which_the_latest_rank_ends_soonest(
    seed: int, ranks: int, stages: int, samples: int
) -> None:
    """Not the most that any rank would choose for itself, nor the fewest that hold the samples."""
    problems = _uneven_ranks(seed, ranks, stages, samples)
    bins = list(map(pack_local, problems))
    ends = list(map(shard_ends, problems, bins))

    def agreed(of: list[list[float]]) -> int:
        return soonest_count([max(each) for each in zip(*of, strict=True)], problems[0].dims)

    fewest = max(map(len, bins))
    most_wanted = max(agreed([own]) for own in ends)
    chosen = agreed(ends)
    assert fewest < chosen < most_wanted
    by_count = {
        count: _latest_end(problems, bins, count) for count in range(fewest, most_wanted + 1)
    }
    best = min(by_count.values())
    assert by_count[chosen] <= 1.005 * best
    assert min(by_count[fewest], by_count[most_wanted]) > 1.01 * best


def test_the_fewest_are_taken_where_more_only_cost_more() -> None:
    """15 is none of the counts that ends are told for, and 16 the next."""
    config = PlannerConfig(max_tokens_per_gpu=200)
    problem = Problem.of([100] * 30, ParallelDims(pipeline_parallel=2), config)
    ends = shard_ends(problem, pack_local(problem))
    assert soonest_count(ends, problem.dims) == 15


@examples(100)
@given(cases())
def test_ranks_tell_as_many_ends_whatever_they_hold(case: Case) -> None:
    problem = Problem.of(case.lengths, case.dims, case.config)
    bins = pack_local(problem)
    ends = shard_ends(problem, bins)
    empty = shard_ends(Problem.of([], case.dims, case.config), [])
    assert len(ends) == len(empty)
    assert ends[0] == len(bins)
    count = soonest_count(ends, case.dims)
    assert count >= len(bins)
    # Whoever holds nothing is no reason for another count.
    both = [max(each) for each in zip(ends, empty, strict=True)]
    assert count == soonest_count(both, case.dims)


def test_single_samples_are_moved_in_a_rank() -> None:
    [problem, *_] = _uneven_ranks(0, 4, 4, 16)
    count = 8
    dealt = best_slots(problem, count)
    assert dealt is not None
    filled = fill_shard(problem, pack_local(problem), count)
    assert end_of(problem, filled) < 0.9995 * end_of(problem, dealt)


CONFIG = PlannerConfig(max_tokens_per_gpu=10)


def test_the_costliest_is_split_into_even_halves_first() -> None:
    lengths = [5, 4, 3, 3, 3, 1]
    dims = ParallelDims()
    config = PlannerConfig(max_tokens_per_gpu=100)
    bins = [[0, 1, 2, 3, 4], [5]]
    assert fill_shard(Problem.of(lengths, dims, config), bins, 2) == ((0, 1, 2, 3, 4), (5,))
    # 5, 4, 3, 3, 3 dealt to the lighter side: 5+3 against 4+3+3. Then 4 against 3+3.
    assert fill_shard(Problem.of(lengths, dims, config), bins, 3) == ((1, 2, 4), (0, 3), (5,))
    assert fill_shard(Problem.of(lengths, dims, config), bins, 4) == ((0, 3), (2, 4), (1,), (5,))
    assert fill_shard(Problem.of(lengths, dims, config), bins, 8) == (
        (0,),
        (1,),
        (2,),
        (3,),
        (4,),
        (),
        (),
        (5,),
    )


def test_the_heavier_of_two_is_split_first() -> None:
    bins = [[0, 1], [2, 3], [4, 5]]
    lengths = [2, 2, 5, 5, 3, 3]
    config = PlannerConfig(max_tokens_per_gpu=100)
    assert set(fill_shard(Problem.of(lengths, ParallelDims(), config), bins, 4)) == {
        (0, 1),
        (2,),
        (3,),
        (4, 5),
    }
    halved_twice = {(0, 1), (2,), (3,), (4,), (5,)}
    assert set(fill_shard(Problem.of(lengths, ParallelDims(), config), bins, 5)) == halved_twice


def test_halves_are_even_in_cost_and_not_in_tokens() -> None:
    """Under a steep quadratic term one 8 outweighs everything else."""
    lengths = [8, 4, 4, 4, 4]
    steep = CostModel(linear=0, quadratic=1)
    by_cost = PlannerConfig(max_tokens_per_gpu=100)
    by_tokens = PlannerConfig(max_tokens_per_gpu=100, balance="tokens")
    bins = [[0, 1, 2, 3, 4]]
    assert fill_shard(Problem.of(lengths, ParallelDims(), by_cost, steep), bins, 2) == (
        (1, 2, 3, 4),  # in tokens the largest
        (0,),
    )
    assert fill_shard(Problem.of(lengths, ParallelDims(), by_tokens, steep), bins, 2) == (
        (0, 3),
        (1, 2, 4),
    )


def test_samples_of_no_tokens_are_split_too() -> None:
    filled = fill_shard(Problem.of([0, 0, 0, 0], ParallelDims(), CONFIG), [[0, 1, 2, 3]], 4)
    assert sorted(filled) == [(0,), (1,), (2,), (3,)]


def test_order_is_by_descending_cost_with_placeholders_before_the_last_real_one() -> None:
    lengths = [2, 9, 4]
    bins = [[0], [1], [2]]
    assert fill_shard(Problem.of(lengths, ParallelDims(), CONFIG), bins, 5) == (
        (1,),
        (2,),
        (),
        (),
        (0,),
    )
    none = PlannerConfig(max_tokens_per_gpu=10, balance="none")
    assert fill_shard(Problem.of(lengths, ParallelDims(), none), bins, 5) == (
        (0,),
        (1,),
        (),
        (),
        (2,),
    )
    assert fill_shard(Problem.of([1, 9, 2], ParallelDims(), none), [[0, 1, 2]], 3) == (
        (1,),
        (2,),
        (0,),
    )
    assert fill_shard(Problem.of([], ParallelDims(), CONFIG), [], 3) == ((), (), ())
    assert fill_shard(Problem.of([3], ParallelDims(), CONFIG), [[0]], 3) == ((), (), (0,))


def test_placeholder_fill_leaves_micro_batches_whole() -> None:
    config = PlannerConfig(max_tokens_per_gpu=10, fill="placeholder")
    assert fill_shard(Problem.of([1, 1, 1], ParallelDims(), config), [[0, 1, 2]], 3) == (
        (),
        (),
        (0, 1, 2),
    )


def test_more_micro_batches_than_the_count_is_refused() -> None:
    with pytest.raises(LengthError) as caught:
        fill_shard(Problem.of([9, 9], ParallelDims(), CONFIG), [[0], [1]], 1)
    assert str(caught.value) == (
        "num_microbatches must be at least this rank's 2, got 1; set the maximum over all ranks"
    )


def test_splitting_many_samples_stays_fast() -> None:
    """20 000 samples of one micro-batch are split down to single ones within a test."""
    lengths = [1 + index % 7 for index in range(20_000)]
    config = PlannerConfig(max_tokens_per_gpu=10**6, balance="cost")
    dims = ParallelDims(data_parallel=2, pipeline_parallel=2, virtual_pipeline=2)
    bins = pack_local(Problem.of(lengths, dims, config))
    filled = fill_shard(Problem.of(lengths, dims, config), bins, 20_000)
    assert all(len(samples) == 1 for samples in filled)
    weights = [lengths[sample] for (sample,) in filled]
    assert all(before >= after for before, after in pairwise(weights))


def test_a_number_of_slots_that_only_even_slots_hold_the_samples_in_has_an_end() -> None:
    """290 tokens in three slots of 100, without room for a rise."""
    config = PlannerConfig(max_tokens_per_gpu=100)
    dims = ParallelDims(pipeline_parallel=3)
    problem = Problem.of([30, 50, 90, 40, 20, 40, 20], dims, config)
    assert ends_by_count(problem, [3])[0] < math.inf
