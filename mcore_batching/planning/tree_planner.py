"""Plans of samples that begin alike: which parts of their prefix trees are computed together.

Larger parts save more tokens, smaller ones leave the search more to choose from. So several ways to
cut the trees are planned, and the plan with the least predicted step is taken. One of the ways is
not to share any branches, and one not to share anything, so a step never ends later for them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence

from mcore_batching.planning.config import PlannerConfig
from mcore_batching.planning.costs.cost import CostModel, ordered_sum
from mcore_batching.planning.errors import LengthError
from mcore_batching.planning.groups import steps_of_batch
from mcore_batching.planning.integers import check_lengths, one_per_sample
from mcore_batching.planning.packing.bounds import step_time_floor
from mcore_batching.planning.parallel_dims import ParallelDims
from mcore_batching.planning.planner import check_search, plan_samples, plan_steps, renamed
from mcore_batching.planning.plans.plan import Plan, StepPlan
from mcore_batching.planning.plans.statistics import WeighedStep
from mcore_batching.planning.prefix_trees import (
    Forest,
    PrefixTree,
    forest_of_groups,
    most_tokens_of_part,
    parts_of,
)
from mcore_batching.planning.problem import Problem


def plan_forest(
    forest: Forest,
    dims: ParallelDims,
    config: PlannerConfig,
    cost_model: CostModel | None = None,
    *,
    forward_only: bool = False,
) -> StepPlan:
    """Plan one optimizer step of samples that begin alike; arguments and errors as `plan_step`.

    Returns:
        The plan that ends first of those tried; its `trees` are samples to be computed together.
    """
    costs = CostModel() if cost_model is None else cost_model
    settings = dims, config, costs
    # What is wrong with a sample is named by its own number.
    Problem.of(forest.lengths, *settings, forward_only=forward_only)
    best: tuple[float, StepPlan] | None = None
    ways = list[tuple[float, Problem, list[PrefixTree]]]()
    for trees in _candidates(forest, *settings):
        check_search(config, len(trees))
        sizes = [tree.size for tree in trees]
        problem = Problem.of(sizes, *settings, forward_only=forward_only, trees=trees)
        ways.append((step_time_floor(problem), problem, trees))
    # The most promising first: those that cannot end sooner are not planned.
    for floor, problem, trees in sorted(ways, key=lambda way: way[0]):
        if best is not None and floor >= best[0]:
            continue
        plan = plan_samples(problem, range(len(trees)))
        end = WeighedStep(plan, problem, plan.micro_batches).end
        if best is None or end < best[0]:
            best = end, _of_samples(plan, trees)
    assert best is not None
    return best[1]


def plan_groups(
    lengths: Sequence[int],
    prompts: Sequence[int],
    groups: Sequence[Hashable],
    dims: ParallelDims,
    config: PlannerConfig,
    cost_model: CostModel | None = None,
    *,
    samples_per_step: int | None = None,
    forward_only: bool = False,
    on_step: Callable[[int, int], None] | None = None,
) -> Plan:
    """Plan the steps of a batch in which samples of a group have their prompt in common.

    Args:
        lengths: total length of each sample [samples], in tokens.
        prompts: tokens of each sample's prompt [samples]; what its group has in common.
        groups: the group of each sample [samples].
        dims, config, cost_model, samples_per_step, forward_only, on_step: as in `plan_batch`.

    Raises:
        As `plan_batch`; LengthError also for prompts that are longer than their samples.
    """
    lengths, prompts = check_lengths(lengths), check_lengths(prompts)
    groups = one_per_sample("groups", groups, len(lengths))
    one_per_sample("prompts", prompts, len(lengths))
    for sample, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        if prompt > length:
            raise LengthError(
                f"sample {sample} has {length} tokens, its prompt {prompt}; give total lengths",
                index=sample,
            )

    def plan_samples_of(samples: Sequence[int]) -> StepPlan:
        forest = forest_of_groups(
            [lengths[i] for i in samples],
            [prompts[i] for i in samples],
            [groups[i] for i in samples],
        )
        plan = plan_forest(forest, dims, config, cost_model, forward_only=forward_only)
        return dataclasses.replace(
            plan,
            micro_batches=tuple(renamed(rank, samples) for rank in plan.micro_batches),
            sample_indices=tuple(samples),
            trees=tuple(tree.renumbered(samples) for tree in plan.trees),
        )

    samples_of_steps = steps_of_batch(len(lengths), samples_per_step, None, None)
    return plan_steps(samples_of_steps, plan_samples_of, on_step)


def _candidates(
    forest: Forest, dims: ParallelDims, config: PlannerConfig, costs: CostModel
) -> list[list[PrefixTree]]:
    """Ways to cut the trees, each as units that cover all samples."""
    empty = [(sample,) for sample, leaf in enumerate(forest.last) if leaf < 0]
    chains = [*forest.samples_of_leaves.values()]
    ways = [chains]
    if len(forest.nodes) > len(chains):  # there are branches
        cap = most_tokens_of_part(dims, config)
        whole = parts_of(forest, costs, cap)
        work = ordered_sum(forest.tree(samples).cost(costs) for samples in whole)
        # At most half of what a stage of the pipeline would take if work were even.
        share = work / (2 * dims.data_parallel * dims.pipeline_parallel)
        ways += [whole, parts_of(forest, costs, cap // 2), parts_of(forest, costs, cap, share)]
    distinct = {tuple(sorted((*way, *empty))) for way in ways}
    trees = [[*map(forest.tree, way)] for way in sorted(distinct, key=len)]
    if len(chains) + len(empty) < len(forest.lengths):  # else chains are single samples
        trees.append([PrefixTree((i,), ((0, n),)) for i, n in enumerate(forest.lengths)])
    return trees


def _of_samples(plan: StepPlan, trees: list[PrefixTree]) -> StepPlan:
    """The plan of trees as one of their samples."""
    micro_batches = tuple(
        tuple(tuple(sorted(i for unit in row for i in trees[unit].samples)) for row in rank)
        for rank in plan.micro_batches
    )
    return dataclasses.replace(
        plan,
        micro_batches=micro_batches,
        sample_indices=tuple(range(sum(len(tree.samples) for tree in trees))),
        trees=tuple(tree for tree in trees if len(tree.samples) > 1),
    )
