"""No plan ends sooner than the bound: every plan of tiny problems is tried."""

from __future__ import annotations

import itertools
import random

import pytest
import step_bound
from chain_weights import even_weight, slot_weights
from hypothesis import given
from hypothesis import strategies as st
from planning_cases import Case, cases, examples
from step_bound import step_time_bound

from mcore_batching.planning import (
    CostModel,
    ParallelDims,
    PlannerConfig,
    Problem,
    plan_step,
)
from mcore_batching.planning.packing.bounds import step_time_floor, way_of_longest
from mcore_batching.planning.pipeline import Clock, Schedule
from mcore_batching.planning.plans.statistics import predicted_step_time


def best_of_all_plans(problem: Problem) -> float:
    """The end of the plan that ends first, whatever it leaves empty, under the cap."""
    ranks, best = problem.dims.data_parallel, float("inf")
    samples = range(problem.num_samples)
    for count in range(1, problem.num_samples + 1):
        # The first sample on the first rank: which is which does not matter.
        others = [range(ranks * count)] * (problem.num_samples - 1)
        for places in itertools.product(range(count), *others):
            slots = [[i for i in samples if places[i] == place] for place in range(ranks * count)]
            if any(problem.row_tokens(row) > problem.capacity for row in slots):
                continue
            costs = [problem.cost(row) for row in slots]
            ends = [
                Clock(
                    costs[first : first + count],
                    Schedule(
                        dims=problem.dims,
                        backward_ratio=problem.cost_model.backward_ratio,
                        forward_only=problem.forward_only,
                    ),
                ).end
                for first in range(0, ranks * count, count)
            ]
            best = min(best, max(ends))
    return best


@pytest.mark.parametrize("seed", range(28))
def test_no_plan_of_a_tiny_problem_ends_sooner(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = random.Random(seed)
    ranks, count = generator.choice([(1, 4), (2, 3), (1, 3), (3, 3)])
    problem = Problem.of(
        [generator.randint(1, 1000) for _ in range(count)],
        ParallelDims(data_parallel=ranks, pipeline_parallel=generator.choice([1, 2, 3, 4])),
        PlannerConfig(max_tokens_per_gpu=generator.choice([1000, 1500, 4000])),
        CostModel(
            per_micro_batch=generator.choice([0.0, 10.0, 300.0]),
            backward_ratio=generator.choice([1.0, 2.0, 3.0]),
        ),
        forward_only=generator.random() < 0.2,
    )
    best = best_of_all_plans(problem)
    assert way_of_longest(problem) <= best * (1 + 1e-9)
    bound = step_time_bound(problem)
    assert step_time_floor(problem) <= bound <= best * (1 + 1e-9)
    monkeypatch.setattr(step_bound, "MOST_SLOTS", 0)
    assert step_time_floor(problem) <= step_time_bound(problem) <= bound


@pytest.mark.parametrize(
    ("lengths", "ranks", "stages", "ratio", "forward_only"),
    [
        ([1000, 400, 250, 50], 1, 2, 1.0, False),
        ([650, 450, 150, 150], 1, 3, 2.0, False),
        ([750, 750, 650, 400], 2, 2, 2.0, False),
        ([650, 650, 600, 450], 2, 3, 2.0, False),
        ([950, 900, 800, 350], 2, 2, 2.0, True),
        ([1000, 1000, 1000, 900], 3, 2, 2.0, False),
    ],
)
def test_no_plan_ends_sooner_where_long_samples_bound_it(
    lengths: list[int], ranks: int, stages: int, ratio: float, forward_only: bool
) -> None:
    """Later than the mean rank and than a sample's own way."""
    problem = Problem.of(
        lengths,
        ParallelDims(data_parallel=ranks, pipeline_parallel=stages),
        PlannerConfig(max_tokens_per_gpu=2000),
        CostModel(per_micro_batch=10.0, backward_ratio=ratio),
        forward_only=forward_only,
    )
    of_mean = min(
        even_weight(count, stages, None if forward_only else ratio)
        * (sum(problem.costs) / ranks + 10.0 * count)
        for count in range(1, len(lengths) + 1)
    )
    bound = step_time_bound(problem)
    assert bound > 1.02 * max(of_mean, step_time_floor(problem))
    assert bound <= best_of_all_plans(problem) * (1 + 1e-9)


def test_the_longest_samples_may_share_a_rank() -> None:
    """The other ranks' longest samples are then shorter than the second longest of all."""
    dims = ParallelDims(data_parallel=2, pipeline_parallel=8)
    config, model = PlannerConfig(max_tokens_per_gpu=800), CostModel(quadratic=0, per_micro_batch=0)
    problem = Problem.of([400, 400] + [40] * 83, dims, config, model)
    ends = [
        Clock([0.0] * 81 + [400.0] * 2, Schedule(dims=dims)).end,
        Clock([40.0] * 83, Schedule(dims=dims)).end,
    ]
    assert max(ends) == 10800.0
    assert step_time_bound(problem) <= 10800.0


@pytest.mark.parametrize("ratio", [0.5, 1.0, 2.0])
@pytest.mark.parametrize(("count", "stages"), [(1, 4), (2, 4), (3, 2), (4, 4), (9, 4), (7, 1)])
def test_the_way_of_the_longest_sample_knows_of_what_is_beside_it(
    count: int, stages: int, ratio: float
) -> None:
    """Micro-batches of next to nothing, the fewest that there can be."""
    dims, config = ParallelDims(pipeline_parallel=stages), PlannerConfig(max_tokens_per_gpu=1000)
    model = CostModel(linear=1e-9, quadratic=1.0, per_micro_batch=10.0, backward_ratio=ratio)
    lengths = [1000] + [1] * 1000 * (count - 1)
    problem = Problem.of(lengths, dims, config, model)
    costs = [[10.0] * count for _ in range(count)]
    for place, slots in enumerate(costs):
        slots[place] += problem.costs[0]
    best = min(Clock(slots, Schedule(dims=dims, backward_ratio=ratio)).end for slots in costs)
    alone = (1 + ratio) * stages * problem.costs[0]
    assert alone + 0.8 * (best - alone) < way_of_longest(problem) <= best * (1 + 1e-9)


def best_of_all_shared_plans(problem: Problem) -> float:
    """Likewise under dynamic CP, one sample in each row, were no rank to wait for another."""
    ranks, best = problem.num_ranks, float("inf")
    blocks = [
        (size, first) for size in problem.row_sizes for first in range(0, ranks - size + 1, size)
    ]
    for count in range(1, problem.num_samples + 1):
        rows = list(itertools.product(range(count), blocks))
        for places in itertools.product(rows, repeat=problem.num_samples):
            costs = [[problem.cost_model.per_micro_batch] * count for _ in range(ranks)]
            taken = set()
            for sample, (slot, (size, first)) in enumerate(places):
                for rank in range(first, first + size):
                    taken.add((rank, slot))
                    costs[rank][slot] = problem.on_ranks[size].cost([sample])
            if len(taken) < sum(size for _, (size, _) in places) or any(
                size < least
                for (_, (size, _)), least in zip(places, problem.least_sizes, strict=True)
            ):
                continue
            ratio = problem.cost_model.backward_ratio
            ends = [
                Clock(
                    of_rank,
                    Schedule(
                        dims=problem.dims, backward_ratio=ratio, forward_only=problem.forward_only
                    ),
                ).end
                for of_rank in costs
            ]
            best = min(best, max(ends))
    return best


@pytest.mark.parametrize("seed", range(12))
def test_no_plan_under_dynamic_cp_of_a_tiny_problem_ends_sooner(seed: int) -> None:
    generator = random.Random(seed)
    ranks, count = generator.choice([(2, 3), (4, 2), (2, 2)])
    lengths = [generator.randint(1, 1000) for _ in range(count)]
    problem = Problem.of(
        lengths,
        ParallelDims(data_parallel=ranks, pipeline_parallel=generator.choice([1, 2, 3, 4])),
        PlannerConfig(
            max_tokens_per_gpu=generator.choice([300, 600, 1000]),
            max_context_parallel=generator.choice([2, ranks]),
            max_samples_per_row=1,
        ),
        CostModel(
            per_micro_batch=generator.choice([0.0, 10.0, 300.0]),
            backward_ratio=generator.choice([1.0, 2.0, 3.0]),
            context_parallel_overhead=generator.choice([0.0, 0.1, 0.5]),
            context_parallel_fixed=generator.choice([0.0, 64.0]),
        ),
        forward_only=generator.random() < 0.2,
    )
    bound = step_time_bound(problem)
    assert step_time_floor(problem) <= bound <= best_of_all_shared_plans(problem) * (1 + 1e-9)


@pytest.mark.parametrize(("stages", "share"), [(2, 0.5), (4, 0.2), (4, 0.3), (8, 0.2)])
def test_the_longest_sample_bounds_steps_under_dynamic_cp(stages: int, share: float) -> None:
    """With that share of the work of all ranks, where communication costs nothing: plans end
    within 3 % of the bound, which is far from the mean rank's end and the sample's own way."""
    long = int(8000 * share)
    lengths = [long, *[10] * ((8000 - long) // 10)]
    model = CostModel(
        quadratic=0, per_micro_batch=0, context_parallel_overhead=0, context_parallel_fixed=0
    )
    dims = ParallelDims(data_parallel=4, pipeline_parallel=stages)
    config = PlannerConfig(max_tokens_per_gpu=8000, max_context_parallel=4, plan_effort=600)
    problem = Problem.of(lengths, dims, config, model)
    end = predicted_step_time(plan_step(lengths, dims, config, model), lengths)
    assert end / 1.03 < step_time_bound(problem) <= end * (1 + 1e-9)
    assert step_time_bound(problem) > 1.1 * step_time_floor(problem)


costs_of_slots = st.lists(st.floats(0.0, 1.0).map(lambda cost: cost**4), min_size=1, max_size=14)


@examples(200)
@given(
    costs_of_slots,
    st.integers(1, 8),
    st.sampled_from([None, 0.0, 0.5, 1.0, 2.0, 3.0]),
    st.integers(0, 3),
    st.sampled_from([0.0, 0.1]),
    st.floats(0.0, 1.0),
)
def test_no_schedule_is_shorter_than_its_slots_weighted(
    costs: list[float], stages: int, ratio: float | None, further: int, overhead: float, part: float
) -> None:
    """Weights of as many slots or of more, for a sample in the costliest slot."""
    end = Clock(
        [overhead + cost for cost in costs],
        Schedule(
            dims=ParallelDims(pipeline_parallel=stages),
            backward_ratio=ratio or 0.0,
            forward_only=ratio is None,
        ),
    ).end
    for others, one, mean in slot_weights(len(costs) + further, stages, ratio):
        overheads = overhead * len(costs) * mean
        longest = part * max(costs)
        weighted = others * (sum(costs) - longest) + one * longest + overheads
        assert weighted <= end * (1 + 1e-9)


@examples(60)
@given(cases(fill=("split",)))
def test_no_plan_ends_sooner(case: Case) -> None:
    step = plan_step(case.lengths, case.dims, case.config, owners=case.owners)
    problem = Problem.of(case.lengths, case.dims, case.config)
    end = predicted_step_time(step, case.lengths)
    assert step_time_floor(problem) <= step_time_bound(problem) <= end * (1 + 1e-9)
