"""Parts of prefix trees fit a micro-batch however it is padded, on however few ranks it lies."""

from __future__ import annotations

import pytest

from mcore_batching.planning import (
    CostModel,
    ParallelDims,
    PlannerConfig,
    step_statistics,
    validate_plan,
)
from mcore_batching.planning.prefix_trees import forest_of_groups, parts_of
from mcore_batching.planning.tree_planner import plan_forest

ROWS_ON_ONE_RANK = {"max_tokens_per_gpu": 45, "max_context_parallel": 1}


@pytest.mark.parametrize(
    ("dims", "options"),
    [
        (ParallelDims(), {"max_tokens_per_gpu": 52, "pad_total_to": 16}),
        (ParallelDims(), {"max_tokens_per_gpu": 52, "pad_each_to": 16}),
        (ParallelDims(context_parallel=2), ROWS_ON_ONE_RANK),
        (ParallelDims(context_parallel=3), ROWS_ON_ONE_RANK | {"max_context_parallel": 3}),
    ],
)
@pytest.mark.parametrize("on_oversize", ["own-bin", "error"])
def test_no_part_is_over_the_cap(
    dims: ParallelDims, options: dict[str, int], on_oversize: str
) -> None:
    lengths = [35] * 4
    forest = forest_of_groups(lengths, [28] * 4, "aaaa")
    config = PlannerConfig(**options, on_oversize=on_oversize)  # type: ignore[arg-type]
    plan = plan_forest(forest, dims, config)
    validate_plan(plan, lengths)
    statistics = step_statistics(plan, lengths)
    assert plan.trees
    assert statistics.num_oversize == 0


def test_no_part_gathers_more_keys_than_its_room_holds() -> None:
    """Short answers to a long prompt: few tokens, of which each node gathers the prompt's keys."""
    lengths = [1000] * 64
    forest = forest_of_groups(lengths, [991] * 64, [0] * 64)
    assert forest.tokens == 990 + 64 * 10 < 2000
    trees = [forest.tree(part) for part in parts_of(forest, CostModel(), 2000)]
    assert max(tree.size for tree in trees) <= 2000
    assert len(trees) == 5  # of 15 samples and a prompt each: 15,990 keys of 16,000
