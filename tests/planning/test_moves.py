"""Single samples moved between micro-batches, and the bounds by critical paths."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from planning_cases import broken_invariants
from test_dynamic_cp import LAYOUTS, long_tailed
from test_search import as_tuples

from mcore_batching.planning import (
    CostModel,
    ParallelDims,
    PlannerConfig,
    Problem,
    StepPlan,
    plan_step,
    predicted_step_time,
    validate_plan,
)
from mcore_batching.planning.planner import packed_on_least_ranks
from mcore_batching.planning.search import Objective
from mcore_batching.planning.search.dynamic_cp import shared_objective
from mcore_batching.planning.search.moves import (
    MOST_PATHS,
    NOWHERE,
    SLACK,
    MicroBatch,
    Moves,
    Pipeline,
    improve,
)
from mcore_batching.planning.search.objective import Step as SimulatedStep

LENGTHS = [*long_tailed(50), 5000]
CONFIG = PlannerConfig(max_tokens_per_gpu=2500, max_context_parallel=4, plan_effort=100)


def packed(problem: Problem) -> tuple[SimulatedStep, Objective]:
    """A step made without a search, and what simulates it."""
    if problem.config.max_context_parallel is None:
        plan = plan_step(
            problem.lengths, problem.dims, replace(problem.config, balance="tokens", packing="auto")
        )
        objective = Objective(problem)
        return objective.step(plan.micro_batches), objective
    ranks, sizes = packed_on_least_ranks(problem)
    objective = shared_objective(problem)
    return objective.step(ranks, [list(of_rank) for of_rank in sizes]), objective


def length(weights: list[float], costs: list[float]) -> float:
    return sum(weight * cost for weight, cost in zip(weights, costs, strict=False))


@pytest.mark.parametrize("seed", range(200))
def test_room_is_what_a_micro_batch_may_cost_more(seed: int) -> None:
    """The most is what makes the longest path end in time. Before that, what makes the step end
    soonest; and no less than the least is allowed."""
    generator = random.Random(seed)
    costs = [generator.random() for _ in range(4)]
    weights = [
        [generator.choice((0.0, 1.0, 3.0, 4.0)) for _ in costs]
        for _ in range(generator.randint(1, 5))
    ]
    pipeline = object.__new__(Pipeline)
    pipeline._paths = [[*each, 0.0, length(each, costs)] for each in weights]
    longest = max(weights, key=lambda each: length(each, costs))
    end = length(longest, costs)
    at, place = longest.index(max(longest)), longest.index(min(longest))
    within = at != place and bool(seed % 2)
    slope = longest[at] - longest[place] if within else generator.choice((0.5, 3.0, 7.0))
    end *= 1.0 if within else generator.choice((1.0, 1.2))
    free = generator.choice((0.0, 0.1))
    end += 1e-9

    def room(least: float) -> tuple[float, float] | None:
        where = at if within else NOWHERE
        return pipeline.room(place, where, slope=slope, least=least, free=free, end=end)

    def ends(more: float) -> float:
        changed = costs[:]
        changed[place] += max(0.0, more - free)
        changed[at] -= more if within else 0.0
        return max(length(each, changed) for each in weights)

    found = room(0.0)
    assert found is not None
    best, most = found
    assert best <= most <= end
    assert room(most) == found
    if most < end:
        assert ends(most) <= end * (1 + 1e-9) < ends(most + 1e-6)
        assert room(most + 1e-6) is None
        for other in (0.5 * best, 0.5 * (best + most), most) if not free else ():
            steps = [max(end - slope * each, ends(each)) for each in (best, other)]
            assert steps[0] <= steps[1] + 1e-8


@pytest.mark.parametrize(
    ("samples", "old", "new", "may"),
    [
        ([0, 1], 1, 2, True),  # 60 + 40 tokens fill the cap
        ([0, 1], 1, 3, False),
        ([0, 1], -1, 4, False),  # three samples
        ([0, 1], 1, -1, True),
        ([3], 3, 5, True),  # alone over the cap
        ([3], -1, 5, False),
        ([], -1, 5, True),
    ],
)
def test_samples_are_exchanged_within_the_cap_and_the_bound_on_samples(
    samples: list[int], old: int, new: int, may: bool
) -> None:
    config = PlannerConfig(max_tokens_per_gpu=100, max_samples_per_row=2)
    problem = Problem.of([60, 10, 40, 41, 1, 300], ParallelDims(), config)
    assert MicroBatch(samples, problem, range(1)).may_exchange(old, new, problem) is may


def test_a_sample_that_shared_a_row_goes_where_it_is_alone_only_within_the_cap() -> None:
    problem = Problem.of(
        [900, 10],
        ParallelDims(data_parallel=2),
        replace(CONFIG, max_tokens_per_gpu=500, max_context_parallel=2),
    )
    alone, shared = problem.on_ranks[1], problem.on_ranks[2]
    micro_batch = MicroBatch([1], alone, range(1))
    assert not micro_batch.may_exchange(1, 0, shared)
    assert MicroBatch([1], shared, range(2)).may_exchange(1, 0, alone)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("forward_only", [False, True])
@pytest.mark.parametrize("dims", LAYOUTS)
def test_paths_refuse_only_what_ends_no_sooner(
    dims: ParallelDims, forward_only: bool, shared: bool
) -> None:
    """While moves are made, a pipeline ends as its costs say, its remembered paths are as long as
    they say, no change ends sooner than a path does with it, and few are remembered."""
    config = (
        CONFIG if shared else replace(CONFIG, max_tokens_per_gpu=5000, max_context_parallel=None)
    )
    step, objective = packed(Problem.of(LENGTHS, dims, config, forward_only=forward_only))
    moves = Moves(step, objective)
    for number in range(600):
        moves.try_one(1.0 + SLACK * (1 - number / 600))
        if number % 20:
            continue
        for pipeline in moves._pipelines:
            assert 0 < len(pipeline._paths) <= MOST_PATHS * min(2, pipeline.width)
            for path in pipeline._paths:
                assert path[-1] == pytest.approx(length(path, pipeline._clock_costs), rel=1e-9)
                assert path[-1] <= pipeline.end * (1 + 1e-9)
            assert max(path[-1] for path in pipeline._paths) == pytest.approx(pipeline.end)
    result = moves.result()
    ends = [pipeline.end for pipeline in moves._pipelines]
    assert max(ends) == pytest.approx(result.end, rel=1e-9)
    assert moves.slowest.end == max(ends)
    anew = [pipeline.end for pipeline in Moves(result, objective)._pipelines]
    assert ends == pytest.approx(anew, rel=1e-9)


@pytest.mark.parametrize("dims", LAYOUTS)
@pytest.mark.parametrize("forward_only", [False, True])
def test_moves_between_shared_rows_end_steps_sooner(dims: ParallelDims, forward_only: bool) -> None:
    """In lockstep too. The step is a legal one, the one before is as it was, and its ends are those
    of its rows."""
    problem = Problem.of(LENGTHS, dims, CONFIG, forward_only=forward_only)
    before, objective = packed(problem)
    ends = before.ends[:]
    after = improve(before, objective)
    assert after.end < 0.996 * before.end
    assert before.ends == objective.step(before.ranks, before.sizes).ends == ends
    assert after.sizes is not None
    plan = StepPlan(
        micro_batches=as_tuples(after.ranks),
        num_microbatches=len(after.ranks[0]),
        sample_indices=tuple(range(problem.num_samples)),
        dims=problem.dims,
        config=problem.config,
        cost_model=problem.cost_model,
        forward_only=problem.forward_only,
        context_parallel=tuple(map(tuple, after.sizes)),
    )
    validate_plan(plan, LENGTHS)
    assert broken_invariants(plan, LENGTHS) == set()
    assert predicted_step_time(plan, LENGTHS) == pytest.approx(after.end, rel=1e-12)


def test_ranks_whose_passes_cost_nothing_are_planned_too() -> None:
    """Placeholders alone on uneven stages, where a micro-batch has no fixed cost."""
    layers = (("a", 1.0, 0.0, 0.0, 1.0), ("V", 4.0, 0.0, 0.0, 2.0))
    model = CostModel(per_micro_batch=0.0, layers="aaaV", layer_costs=layers)
    dims = ParallelDims(data_parallel=4, pipeline_parallel=2)
    config, lengths = PlannerConfig(max_tokens_per_gpu=6384, max_context_parallel=2), [5000] * 3
    assert broken_invariants(plan_step(lengths, dims, config, model), lengths) == set()
