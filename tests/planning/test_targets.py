"""Target sizes of slots."""

from __future__ import annotations

from mcore_batching.planning import CostModel, ParallelDims, PlannerConfig, Problem
from mcore_batching.planning.search.targets import (
    Targets,
)


def targets_of(dims: ParallelDims, count: int, model: CostModel | None = None) -> Targets:
    config = PlannerConfig(max_tokens_per_gpu=100_000)
    return Targets(Problem.of([100], dims, config, model), count, 300.0)


def test_a_late_fall_is_made_of_any_number_of_slots() -> None:
    """The powers of its decay are 0 from some thousand slots on, and were divided by."""
    layers = (("a", 1.0, 0.0, 0.0, 1.0), ("V", 4.0, 0.0, 0.0, 2.0))
    model = CostModel(layers="aaaV", layer_costs=layers)
    sizes = targets_of(ParallelDims(pipeline_parallel=2), 1200, model).usual
    assert max(sizes) == sizes[600] == 1.0 > sizes[-1]


def test_sizes_are_reversed_where_backward_passes_are_the_cheaper_ones() -> None:
    """A step run backwards is one with forward and backward exchanged."""

    def sizes(ratio: float) -> list[float]:
        model = CostModel(per_micro_batch=0.0, backward_ratio=ratio)
        dims, config = ParallelDims(pipeline_parallel=4), PlannerConfig(max_tokens_per_gpu=100)
        problem = Problem.of([100], dims, config, model)
        return Targets(problem, 12, 1.0).of_rank(40_000.0, 0.0)[0]

    assert sizes(0.5) == sizes(2.0)[::-1] != sizes(2.0)
