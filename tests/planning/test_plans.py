"""Plans are frozen data with a stable digest, a JSON form with its inverse and a readable text;
`validate` refuses each way in which one can be broken, and names it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from planning_cases import (
    SIX_LENGTHS,
    SIX_SAMPLES,
    Case,
    broken_invariants,
    cases,
    examples,
    planned,
)
from refusals import rows

from mcore_batching import planning
from mcore_batching.planning import (
    CostModel,
    InvariantError,
    ParallelDims,
    Plan,
    PlannerConfig,
    StepPlan,
    plan_batch,
    plan_step,
    validate_plan,
)
from mcore_batching.planning.forest import PrefixTree

SIX = Plan(steps=(SIX_SAMPLES,), num_samples=6)
ROWS = SIX_SAMPLES.micro_batches
FOUR_LENGTHS = [100, 60, 7, 3]
SHARED = StepPlan(
    micro_batches=(((2,), (1,), (0,)), ((3,), (1,), (0,)), ((), (), (0,)), ((), (), (0,))),
    num_microbatches=3,
    sample_indices=(0, 1, 2, 3),
    dims=ParallelDims(data_parallel=4),
    config=PlannerConfig(max_tokens_per_gpu=32, max_context_parallel=4),
    context_parallel=((1, 2, 4), (1, 2, 4), (1, 1, 4), (1, 1, 4)),
)
"""Under dynamic CP: two of the rows are shared by two and by four ranks."""
FOUR = Plan(steps=(SHARED,), num_samples=4)
TREE_LENGTHS = [20, 21, 22, 9]
TREES = plan_batch(
    TREE_LENGTHS,
    ParallelDims(),
    PlannerConfig(max_tokens_per_gpu=64),
    groups=list("aaab"),
    prompts=[15, 15, 15, 4],
)
(GROUP,) = TREES.steps
(TREE,) = GROUP.trees
"""The first three samples share 14 tokens, and all four a micro-batch."""


DOCUMENT = (
    '{"format": "mcore-batching/plan", "version": 1, "layout": {"data_parallel": 2, '
    '"pipeline_parallel": 1, "virtual_pipeline": 1, "context_parallel": 1, "tensor_parallel": 1, '
    '"expert_parallel": 1, "sequence_parallel": false, "microbatch_group_size": null}, "config": '
    '{"max_tokens_per_gpu": 10, "packing": "auto", "balance": "auto", "fill": "split", '
    '"on_oversize": "own-bin", "pad_each_to": null, "pad_total_to": null}, "scope": "global", '
    '"num_samples": 6, "digest": '
    '"26a8244ebcda641777ce1ddfc9aa2faefac927c45951c2882fb7d682ad01ffd0", "steps": '
    '[{"num_microbatches": 2, "ranks": [[[0, 1], [3]], [[2, 4], [5]]]}]}'
)


def test_json_is_the_documented_format() -> None:
    """Without newer options, which are at their default: older plans keep their digests. What a
    person looks for comes before the steps."""
    assert SIX.to_json() == DOCUMENT
    # Ranks on other platforms and Python versions must get the same digest.
    document = json.loads(DOCUMENT)
    digest = document.pop("digest")
    assert SIX_SAMPLES.digest() == SIX.digest() == digest
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"))
    assert digest == hashlib.sha256(canonical.encode()).hexdigest()
    shared = json.loads(FOUR.to_json())
    assert shared["config"]["max_context_parallel"] == 4
    assert shared["steps"][0]["context_parallel"] == [[1, 2, 4], [1, 2, 4], [1, 1, 4], [1, 1, 4]]
    assert json.loads(TREES.to_json())["steps"][0]["trees"] == [
        [[0, 1, 2], [0, 14, 14, 20, 14, 21, 14, 22]]
    ]
    # Its lengths may be noted beside a plan, and are no part of it.
    bound = json.loads(SIX.to_json(SIX_LENGTHS))
    noted = hashlib.sha256(b"6,4,3,9,2,14").hexdigest()
    assert bound == json.loads(DOCUMENT) | {"lengths_digest": noted}
    assert Plan.from_json(json.dumps(bound)) == SIX


@pytest.mark.parametrize(
    "changes",
    [
        {"micro_batches": (((0, 1), (3,)), ((2,), (4, 5)))},
        {"micro_batches": (((3,), (0, 1)), ((2, 4), (5,)))},
        {"dims": ParallelDims(data_parallel=2, tensor_parallel=2)},
        {"config": PlannerConfig(max_tokens_per_gpu=11)},
        # Newer options are written where they are not at their default.
        {"dims": ParallelDims(data_parallel=2, waits_for_sends=False)},
        {"config": PlannerConfig(max_tokens_per_gpu=10, max_samples_per_row=3)},
        {"scope": "local"},
        {"num_microbatches": 3},
        {"sample_indices": (0, 1, 2, 3, 4, 6)},
        {"context_parallel": ((1, 1, 4),) * 4},
        {"trees": ()},
    ],
)
def test_digest_and_equality_see_every_field(changes: dict[str, Any]) -> None:
    step = {"context_parallel": SHARED, "trees": GROUP}.get(next(iter(changes)), SIX_SAMPLES)
    changed = replace(step, **changes)
    assert changed != step
    assert changed.digest() != step.digest()
    plan = Plan(steps=(changed,), num_samples=step.num_samples)
    assert "sample_indices" in changes or Plan.from_json(plan.to_json()) == plan
    other = replace(step, cost_model=CostModel(linear=7))  # no part of the identity
    assert (other, other.digest()) == (step, step.digest())


def edited(plan: Plan = SIX, **changes: Any) -> str:
    """A plan's document with other values; of its step, where they are `step`."""
    document = json.loads(plan.to_json())
    document["steps"][0] |= changes.pop("step", {})
    return json.dumps(document | changes)


@pytest.mark.parametrize(("call", "error", "text"), rows(__file__, planning, globals()))
def test_what_is_no_plan_is_refused(
    call: Callable[[], Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text) as caught:
        call()
    assert len(str(caught.value)) < 400


def test_the_digest_check_can_be_left_out() -> None:
    assert Plan.from_json(edited(num_samples=7), verify_digest=False).num_samples == 7
    assert Plan.from_json(edited(digest=None), verify_digest=False) == SIX


def test_text_shows_every_micro_batch_of_a_small_plan_and_is_short_for_a_large_one() -> None:
    assert str(SIX_SAMPLES) == (
        "StepPlan: 6 samples on 2 data-parallel ranks, 2 micro-batches per rank, global scope, "
        f"digest {SIX.digest()[:12]}\n"
        "  rank 0: [0 1] [3]\n"
        "  rank 1: [2 4] [5]"
    )
    assert str(SIX) == (
        "Plan: 6 samples in 1 step on 2 data-parallel ranks, global scope, "
        f"digest {SIX.digest()[:12]}\n"
        "  step 0: 6 samples, 2 micro-batches per rank, 0 placeholders"
    )
    assert "[0]×4" in str(SHARED)
    assert "on 4 ranks" in str(SHARED)
    lengths, config = [1] * 20_000, PlannerConfig(max_tokens_per_gpu=10, balance="tokens")
    step = plan_step(lengths, ParallelDims(data_parallel=64), config)
    plan = plan_batch(lengths, ParallelDims(), config, samples_per_step=100)
    for large, characters, more in ((step, 20_000, "48 more ranks"), (plan, 5000, "184 more step")):
        assert len(str(large)) < characters
        assert f"and {more}" in str(large)
        assert str(large).count("\n") == 1 + 16


def test_a_row_that_ranks_share_is_counted_once_and_has_a_size() -> None:
    assert (SHARED.row_size(3, 2), SHARED.row_size(3, 1)) == (4, 1)
    assert [row for row in SHARED.rows() if row.size > 1] == [(0, 1, 2, (1,)), (0, 2, 4, (0,))]
    fixed = plan_step([9, 9], ParallelDims(context_parallel=2), PlannerConfig(max_tokens_per_gpu=8))
    assert {row.size for row in fixed.rows()} == {2}


def six(*ranks: tuple[tuple[int, ...], ...], **changes: Any) -> StepPlan:
    """A plan of six samples with the given micro-batches."""
    given = {"micro_batches": ranks, "num_microbatches": len(ranks[0])}
    return replace(SIX_SAMPLES, **given | changes)


def with_config(step: StepPlan = SIX_SAMPLES, **changes: Any) -> StepPlan:
    return replace(step, config=replace(step.config, **changes))


def sizes(*of_ranks: tuple[int, ...]) -> StepPlan:
    return replace(SHARED, context_parallel=of_ranks)


def with_trees(*trees: PrefixTree) -> StepPlan:
    return replace(GROUP, trees=trees)


VPP2 = ParallelDims(data_parallel=2, pipeline_parallel=3, virtual_pipeline=2)
HELD = six(((3,), (), (5,)), ((0,), (), (1, 2, 4)))
"""With a placeholder beside a micro-batch of three."""
ALONE = replace(
    SHARED,
    micro_batches=tuple(((sample,),) for sample in range(4)),
    num_microbatches=1,
    context_parallel=((1,),) * 4,
)
BESIDE = replace(
    SHARED,
    micro_batches=(((1, 3), (2,), (0,)), ((1, 3), (), (0,)), ((), (), (0,)), ((), (), (0,))),
    context_parallel=((2, 1, 4), (2, 1, 4), (1, 1, 4), (1, 1, 4)),
)
"""Two samples share the row of two ranks, beside a placeholder."""


def test_a_shared_row_of_samples_may_stand_beside_a_placeholder() -> None:
    """One of the ranks alone cannot split it."""
    validate_plan(BESIDE, FOUR_LENGTHS)


def refusal(plan: StepPlan | Plan, lengths: list[int]) -> InvariantError:
    with pytest.raises(InvariantError) as caught:
        validate_plan(plan, lengths)
    return caught.value


SHORT = "share tokens, but"
BROKEN = {
    "exact cover None None (1,): samples 1 are in the step not at all": six(
        ((0,), (3,)), ((2, 4), (5,))
    ),
    "exact cover None None (1,): samples 1 are in the step more than once": six(
        ((0, 1), (3,)), ((1, 2, 4), (5,))
    ),
    "exact cover None None (7,): samples 7 are in the step though they are not part of it": six(
        ((0, 1), (3,)), ((2, 4, 7), (5,))
    ),
    # A sample listed twice would count twice in every figure.
    "exact cover None None (): the samples that the step must cover do not ascend": six(
        *ROWS, sample_indices=(0, 0, 1, 2, 3, 4, 5)
    ),
    "exact cover None None (): the samples that the step must cover do not": six(
        *ROWS, sample_indices=(1, 0, 2, 3, 4, 5)
    ),
    "exact cover None None (6,): samples 6 have none of the 6 lengths": six(
        *ROWS, sample_indices=(0, 1, 2, 3, 4, 5, 6)
    ),
    "cap 0 0 (0, 2, 1): samples 0, 2, 1 take 13 padded tokens, the cap is 10": six(
        ((0, 2, 1), (3,)), ((4,), (5,))
    ),
    "cap 0 0 (0, 1): samples 0, 1 share a row, max_samples_per_row=1": with_config(
        max_samples_per_row=1
    ),
    "cap 1 1 (5,): samples 5 take 14 padded tokens": with_config(on_oversize="error"),
    "equal count 1 None (2, 4, 5): every rank must have 2 micro-batches, this one has 3": six(
        ((0, 1), (3,)), ((2,), (4,), (5,))
    ),
    "equal count None None (): the layout has 2 data-parallel ranks, the plan 1": six(
        ((0, 1), (3,), (2, 4), (5,))
    ),
    "equal count None None (): the interleaved schedule cannot run 2 micro-batches per rank; it "
    "can run 3": six(*ROWS, dims=VPP2),
    "split before placeholder 1 2 (1, 2, 4): slot 1 is a placeholder": HELD,
    # Under dynamic CP the ranks of a block agree.
    "blocks 2 1 (): a placeholder has the context-parallel size 2, expected 1": sizes(
        (1, 2, 4), (1, 2, 4), (1, 2, 4), (1, 2, 4)
    ),
    "blocks 0 1 (1,): the context-parallel size 3 is none of 1, 2, 4": sizes(
        (1, 3, 4), (1, 3, 4), (1, 3, 4), (1, 1, 4)
    ),
    "blocks 0 1 (1,): ranks 0 to 1 must share its micro-batch": sizes(
        (1, 2, 4), (1, 1, 4), (1, 1, 4), (1, 1, 4)
    ),
    "blocks 1 1 (1,): it must share what rank 0 has there, 2 ranks in all": sizes(
        (1, 1, 4), (1, 2, 4), (1, 1, 4), (1, 1, 4)
    ),
    "blocks None None (): there must be a size for each micro-batch": sizes(*((1, 2, 4),) * 3),
    "blocks None None (): max_context_parallel=4, but context-parallel sizes are left out": replace(
        SHARED, context_parallel=None
    ),
    # A sample that fits on several ranks may not be over the cap of one.
    "cap 0 0 (0,): samples 0 take 100 padded tokens, the cap is 32": ALONE,
    "split before placeholder 0 0 (2, 3): slot 1 is a placeholder, but samples 2, 3 share": replace(
        BESIDE,
        micro_batches=(((2, 3), (), (0,)), ((), (), (0,)), ((), (1,), (0,)), ((), (1,), (0,))),
        context_parallel=((1, 1, 4), (1, 1, 4), (1, 2, 4), (1, 2, 4)),
    ),
    # Samples of a tree are in one micro-batch, with tokens that they may share.
    "prefix trees None None (0, 1, 2, 0, 1, 2): a sample is in two trees": with_trees(TREE, TREE),
    f"prefix trees None None (0, 1, 5): samples 0, 1, 5 {SHORT} not a micro-batch": with_trees(
        replace(TREE, samples=(0, 1, 5))
    ),
    **{
        f"prefix trees None None (0, 1, 2): samples 0, 1, 2 {SHORT} their nodes are {nodes}": (
            with_trees(replace(TREE, nodes=nodes))
        )
        for nodes in ((), ((0, 22), (22, 3)), ((0, 21),))
    },
    "prefix trees None None (0, 1, 2): samples 0, 1, 2 have 63 tokens, 22 the longest, but as a "
    "tree 66": with_trees(replace(TREE, nodes=((0, 22),) * 3)),
    f"prefix trees None None (0, 1, 2): samples 0, 1, 2 {SHORT} not a micro-batch": replace(
        GROUP, micro_batches=(((0, 1), (2, 3)),), num_microbatches=2
    ),
    "cap 0 0 (0, 1, 2, 3): samples 0, 1, 2, 3 take 44 padded tokens": with_config(
        GROUP, max_tokens_per_gpu=30
    ),
}
"""Steps by what their refusal begins with: the invariant, rank, slot, samples, and the text."""


@pytest.mark.parametrize("text", BROKEN)
def test_what_is_broken_is_named(text: str) -> None:
    step, lengths = BROKEN[text], SIX_LENGTHS
    if step.num_samples == 4:
        lengths = TREE_LENGTHS if step.trees else FOUR_LENGTHS
    error = refusal(step, lengths)
    said = str(error).partition(": ")[2]
    where = f"{error.invariant} {error.rank} {error.slot} {error.indices}"
    assert f"{where}: {said}".startswith(text)


def test_a_plan_covers_its_batch_over_all_steps_and_names_the_step() -> None:
    lengths = [5, 6, 7, 4]
    plan = plan_batch(lengths, ParallelDims(), SIX_SAMPLES.config, samples_per_step=2)
    first, second = plan.steps
    merged = replace(second, micro_batches=(((2, 3), ()),), num_microbatches=2)
    error = refusal(replace(plan, steps=(first, merged)), lengths)
    assert (error.invariant, error.step, error.rank, error.slot) == ("cap", 1, 0, 0)
    assert "invariant 'cap' is broken at step 1, rank 0, slot 0: " in str(error)
    for steps, indices in (((first, first), (0, 1)), ((first,), (2, 3))):
        error = refusal(replace(plan, steps=steps), lengths)
        assert (error.invariant, error.indices) == ("exact cover", indices)
    for other in (lengths[:3], [*lengths, 8]):
        error = refusal(plan, other)
        assert (error.invariant, error.indices) == ("exact cover", ())
        assert f"4 samples, but {len(other)} lengths" in str(error)


@examples(1400)
@given(cases(dynamic=True), st.randoms(use_true_random=False))
def test_validate_agrees_with_the_independent_checker_on_corrupted_plans(
    case: Case, random: Random
) -> None:
    """Move, drop, double, merge or resize things at random: what breaks is what is named."""
    step = planned(case)
    ranks = [[list(samples) for samples in rank] for rank in step.micro_batches]
    of_ranks = step.context_parallel and [list(of_rank) for of_rank in step.context_parallel]
    kinds = ["move", "merge", "drop", "double"]
    kinds += ["resize", "replace"] if of_ranks else ["shorten", "lengthen", "lose rank"]
    for _ in range(random.randint(1, 2)):
        rank = random.choice(ranks)
        if not rank:
            continue
        slot = random.randrange(len(rank))
        source, target = rank[slot], random.choice(random.choice(ranks) or rank)
        kind = random.choice(kinds)
        if kind == "move" and source:
            target.append(source.pop())
        elif kind == "merge" and source is not target:
            target.extend(source)
            source.clear()
        elif kind == "drop" and source:
            source.pop()
        elif kind == "double" and source:
            target.append(source[0])
        elif kind == "shorten":
            rank.pop()
        elif kind == "lengthen":
            rank.append([])
        elif kind == "lose rank" and len(ranks) > 1:
            ranks.remove(rank)
        elif kind == "resize" and of_ranks:
            random.choice(of_ranks)[slot] = random.randint(1, len(ranks) + 1)
        elif kind == "replace" and case.lengths:
            source[:] = random.choices(range(len(case.lengths)), k=random.randrange(3))
    corrupted = replace(
        step,
        micro_batches=tuple(tuple(map(tuple, rank)) for rank in ranks),
        context_parallel=of_ranks and tuple(map(tuple, of_ranks)),
    )
    assume(corrupted != step)
    broken = broken_invariants(corrupted, case.lengths)
    if not broken:
        validate_plan(corrupted, case.lengths)
        return
    error = refusal(corrupted, case.lengths)
    assert error.invariant in broken
