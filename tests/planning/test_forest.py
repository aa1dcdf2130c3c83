"""Samples that belong together: prefix trees as units of a plan, groups that steps hold whole."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_cases import Integer, examples

from mcore_batching.planning import (
    CostModel,
    LengthError,
    ParallelDims,
    Plan,
    PlannerConfig,
    group_steps,
    plan_batch,
    plan_step,
    predicted_step_time,
    step_statistics,
    validate_plan,
)
from mcore_batching.planning.forest import (
    KEYS_PER_TOKEN,
    Forest,
    PrefixTree,
    _nodes,
    forest_of_groups,
    parts_of,
)

PP2 = ParallelDims(data_parallel=2, pipeline_parallel=2)
CONFIG = PlannerConfig(max_tokens_per_gpu=64, on_oversize="own-bin", plan_effort=10)
MODEL = CostModel(per_micro_batch=8.0, quadratic=0.01)


def forest_of(lengths: list[int], cuts: list[int], begun: tuple[int, ...] = ()) -> Forest:
    """Samples that share `cuts` tokens with the one before; behind them the first half of each in
    `begun`, and a sample of no tokens."""
    nodes, last = _nodes(lengths, range(len(lengths)), cuts)
    return Forest(
        (*lengths, *(-(-lengths[i] // 2) for i in begun), 0),
        tuple(nodes),
        (*(last[i] for i in range(len(lengths))), *(last[i] for i in begun), -1),
    )


def drawn(seed: int) -> Forest:
    """A forest that branches at several depths."""
    draw = random.Random(seed)
    lengths = [draw.randint(1, 90) for _ in range(draw.randint(1, 20))]
    cuts = [draw.choice([0, draw.randrange(min(pair))]) for pair in itertools.pairwise(lengths)]
    return forest_of(lengths, [0, *cuts], tuple(draw.choices(range(len(lengths)), k=3)))


def tokens_of(forest: Forest, samples: tuple[int, ...]) -> int:
    """Tokens of the nodes on some samples' paths, to their leaves."""
    held = set()
    for sample in samples:
        node = forest.last[sample]
        while node >= 0:
            held.add(node)
            node = forest.nodes[node].parent
    return sum(forest.nodes[node].end - forest.nodes[node].start for node in held)


def test_a_tree_costs_what_its_nodes_add() -> None:
    tree = PrefixTree((0, 1), ((0, 3), (3, 6), (3, 7)))
    assert (tree.tokens, tree.keys, tree.size) == (10, 16, 10)
    of_samples = MODEL.sample(6) + MODEL.sample(7)
    assert tree.cost(MODEL) == pytest.approx(of_samples - MODEL.sample(3))
    # Pairs beyond a window are no more than they are alone.
    windowed = replace(MODEL, window=2)
    expected = windowed.sample(6) + windowed.sample(7) - windowed.sample(3)
    assert tree.cost(windowed) == pytest.approx(expected)
    # Short branches of a long beginning: their keys take the room.
    many = PrefixTree(tuple(range(100)), ((0, 1000), *[(1000, 1001)] * 100))
    assert many.size == -(-(1000 + 100 * 1001) // KEYS_PER_TOKEN) > many.tokens


def test_a_part_has_the_nodes_that_its_samples_would_have_alone() -> None:
    forest = forest_of([9, 10, 9], [0, 5, 3])
    assert forest.tree((0, 1, 2)).nodes == ((0, 3), (3, 5), (5, 9), (5, 10), (3, 9))
    assert forest.tree((0, 1)).nodes == ((0, 5), (5, 9), (5, 10))
    assert forest.tree((1,)).nodes == ((0, 10),)


@given(st.integers(0, 2**32 - 1), st.integers(1, 150))
@examples(300)
def test_parts_cover_all_and_keep_to_their_limits(seed: int, most: int) -> None:
    forest = drawn(seed)
    parts = parts_of(forest, MODEL, most)
    found = sorted(itertools.chain.from_iterable(parts))
    assert found == [i for i, leaf in enumerate(forest.last) if leaf >= 0]
    for part in parts:
        tree = forest.tree(part)
        assert tree.tokens == tokens_of(forest, part)
        is_one_leaf = len({forest.last[i] for i in part}) == 1
        assert is_one_leaf or (tree.tokens <= most and tree.keys <= KEYS_PER_TOKEN * most)
    for part in parts_of(forest, MODEL, float("inf"), float(most)):
        is_one_leaf = len({forest.last[i] for i in part}) == 1
        assert is_one_leaf or forest.tree(part).cost(MODEL) <= most * (1 + 1e-9)
    # Whole trees, where nothing is in the way.
    roots = sum(node.parent < 0 for node in forest.nodes)
    deepest = max(tree.keys for tree in map(forest.tree, parts_of(forest, MODEL, 1e9)))
    assert len(parts_of(forest, MODEL, 1e9)) == roots or deepest > 1e9


def test_parts_of_equal_leaves_are_as_few_as_fit() -> None:
    forest = forest_of_groups([18] * 16, [9] * 16, [0] * 16)  # 8 shared, 10 of its own each
    assert sorted(map(len, parts_of(forest, MODEL, 48))) == [4, 4, 4, 4]
    assert sorted(map(len, parts_of(forest, MODEL, 58))) == [1, 5, 5, 5]


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
    plan = plan_step(lengths, dims, config, forest=forest)
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


@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 2, 4]))
@examples(60)
def test_no_plan_of_trees_ends_later_than_turns_or_samples_apart(seed: int, stages: int) -> None:
    forest, dims = drawn(seed), replace(PP2, pipeline_parallel=stages)
    plan = plan_step(forest.lengths, dims, CONFIG, MODEL, forest=forest)
    validate_plan(plan, forest.lengths)
    whole = Plan(steps=(plan,), num_samples=plan.num_samples)
    assert Plan.from_json(whole.to_json()) == whole
    leaves = sorted(set(forest.last) - {-1})
    turns = [forest.nodes[leaf].end for leaf in leaves] + [0] * forest.last.count(-1)
    ends = predicted_step_time(plan, forest.lengths, MODEL)
    for lengths in (turns, forest.lengths):
        other = predicted_step_time(plan_step(lengths, dims, CONFIG, MODEL), lengths, MODEL)
        assert ends <= other * (1 + 1e-9)
    statistics = step_statistics(plan, forest.lengths)
    assert statistics.sample_tokens == sum(forest.lengths)
    computed = sum(tree.tokens for tree in plan.trees)
    alone = set(range(len(forest.lengths))) - {i for tree in plan.trees for i in tree.samples}
    assert statistics.real_tokens == computed + sum(forest.lengths[i] for i in alone)
    assert forest.tokens <= statistics.real_tokens <= sum(forest.lengths)


def test_a_group_is_planned_as_one_where_that_ends_sooner() -> None:
    lengths, prompts = [900] * 32, [800] * 32
    groups = [i // 8 for i in range(32)]
    config = replace(CONFIG, max_tokens_per_gpu=2000)
    given = lengths, PP2, config, MODEL
    plan = plan_batch(*given, groups=groups, prompts=prompts)
    validate_plan(plan, lengths)
    (step,) = plan.steps
    found = step_statistics(step, lengths)
    assert found.sample_tokens > 3 * found.real_tokens
    # Numbers of other libraries count by value.
    assert plan_batch(*given, groups=list(map(Integer, groups)), prompts=prompts) == plan
    apart = plan_step(*given)
    assert predicted_step_time(step, lengths) < 0.5 * predicted_step_time(apart, lengths)
    # Step by step, each with its own samples' numbers.
    for cuts in ({"samples_per_step": 16}, {"groups_per_step": 2}):
        cut = plan_batch(*given, groups=groups, prompts=prompts, **cuts)
        validate_plan(cut, lengths)
        assert Plan.from_json(cut.to_json()) == cut
        assert {i for tree in cut.steps[1].trees for i in tree.samples} == set(range(16, 32))


UIDS = st.integers(0, 9) | st.sampled_from(["a", "b", ("c", 1)])


@examples(300)
@given(st.lists(st.tuples(UIDS, st.booleans()), max_size=40), st.integers(1, 5))
def test_steps_hold_so_many_whole_groups_in_order_of_first_appearance(
    samples: list[tuple[Any, bool]], per_step: int
) -> None:
    """Padding samples are nobody's group: they need no uid, nor their tags be booleans."""
    padding = [int(is_padding) or None for _, is_padding in samples]
    # Numbers of other libraries count by value.
    groups = [
        None if is_padding else Integer(uid) if isinstance(uid, int) and index % 2 else uid
        for index, (uid, is_padding) in enumerate(samples)
    ]
    steps = group_steps(groups, per_step, is_padding=padding)
    kept = [index for index, (_, is_padding) in enumerate(samples) if not is_padding]
    assert sorted(sample for step in steps for sample in step) == kept
    assert all(step == sorted(step) for step in steps)
    order = list(dict.fromkeys(samples[index][0] for index in kept))
    for index, step in enumerate(steps):
        # Exactly the next groups in line, so none is split and none is out of its turn.
        expected = order[index * per_step : (index + 1) * per_step]
        assert {samples[sample][0] for sample in step} == set(expected)
    assert len(steps) == -(-len(order) // per_step)
    # Groups left over are a step of their own, are dropped or are an error.
    whole = steps[:-1] if len(order) % per_step else steps
    assert group_steps(groups, per_step, last="drop", is_padding=padding) == whole
    if whole == steps:
        assert group_steps(groups, per_step, last="error", is_padding=padding) == steps
        return
    with pytest.raises(LengthError, match=r"over in steps of .*; set groups_per"):
        group_steps(groups, per_step, last="error", is_padding=padding)
