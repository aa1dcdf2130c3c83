"""Other frameworks' packing rules, of the package and of benchmarks: pinned against the originals,
and where they fail."""

from __future__ import annotations

import hashlib
import pickle
import random
from typing import Any

import pytest
from dynamic_cp_rule import megatron_dynamic_plan, megatron_dynamic_slots
from hypothesis import given
from hypothesis import strategies as st
from megatron_dev import CHECKOUT, scheduling_file, scheduling_module
from other_rules import ALL_RULES
from planning_cases import examples, megatron_runs, row_tokens

from mcore_batching.planning import (
    LengthError,
    ParallelDims,
    PlannerConfig,
    Problem,
    validate_plan,
)
from mcore_batching.tools.rules import (
    Rule,
    RuleFailureError,
    megatron_dp_balanced,
    rule_plan,
)

CONFIG = PlannerConfig(max_tokens_per_gpu=100)

PLAIN = ParallelDims(data_parallel=2)
INTERLEAVED = ParallelDims(data_parallel=2, pipeline_parallel=2, virtual_pipeline=2)


def problem_of(
    lengths: list[int], ranks: int, cap: int, stages: int = 2, group: int | None = None
) -> Problem:
    dims = ParallelDims(
        data_parallel=ranks,
        pipeline_parallel=stages,
        virtual_pipeline=2 if group else 1,
        microbatch_group_size=group,
    )
    config = PlannerConfig(max_tokens_per_gpu=cap, on_oversize="own-bin")
    return Problem.of(lengths, dims, config)


def random_problem(seed: int) -> Problem:
    """Log-normal lengths under a cap, mostly a multiple of the ranks."""
    generator = random.Random(seed)
    cap, ranks = generator.choice([64, 1000, 16384]), generator.choice([1, 2, 4, 8])
    stages, count = generator.choice([1, 2, 4]), generator.choice([5, 16, 64, 200])
    if generator.random() < 0.8:
        count = -(-count // ranks) * ranks
    longest = generator.choice([cap // 8, cap // 2, cap])
    lengths = [
        max(1, min(longest, int(generator.lognormvariate(0, 1) * longest / 4)))
        for _ in range(count)
    ]
    group = generator.choice([None, None, 4]) if stages > 1 else None
    return problem_of(lengths, ranks, cap, stages, group)


def digest_of(plans: list[Any]) -> str:
    return hashlib.sha256(repr(plans).encode()).hexdigest()[:12]


DIGESTS = {
    "first-fit in order": "909ab301ed51",
    "slime": "757eab310a42",
    "verl 0.9": "f1a086606052",
    "NeMo-RL": "d7996473276d",
    "AReaL": "ecd838b978f5",
    "Megatron dp_balanced": "d0424b9eb942",
}
"""Of 60 random problems' plans, made when rules and originals agreed on all of them."""


@pytest.mark.parametrize("name", ALL_RULES)
def test_random_plans_stay_the_originals(name: str) -> None:
    plans: list[Any] = []
    for seed in range(60):
        try:
            plans.append(ALL_RULES[name](random_problem(seed)))
        except RuleFailureError:
            plans.append("none")
    assert plans.count("none") < 40
    assert digest_of(plans) == DIGESTS[name]


@pytest.mark.parametrize("name", ALL_RULES)
@given(data=st.data())
@examples(60)
def test_a_plan_covers_every_sample_under_the_cap_with_equal_counts(
    name: str, data: st.DataObject
) -> None:
    stages = data.draw(st.sampled_from([1, 2, 4]))
    dims = ParallelDims(
        data_parallel=data.draw(st.sampled_from([1, 2, 3])),
        pipeline_parallel=stages,
        virtual_pipeline=data.draw(st.sampled_from([1, 1, 2])) if stages > 1 else 1,
        context_parallel=data.draw(st.sampled_from([1, 1, 2])),
    )
    config = PlannerConfig(max_tokens_per_gpu=data.draw(st.sampled_from([32, 40, 100])))
    lengths = data.draw(st.lists(st.integers(0, 45), max_size=40))
    try:
        plan = rule_plan(ALL_RULES[name], lengths, dims, config)
    except RuleFailureError:
        return
    placed = sorted(s for rank in plan.micro_batches for held in rank for s in held)
    assert placed == list(range(len(lengths)))
    assert {len(rank) for rank in plan.micro_batches} == {plan.num_microbatches}
    assert len(plan.micro_batches) == dims.data_parallel
    assert megatron_runs(plan.num_microbatches, dims)
    several = [held for rank in plan.micro_batches for held in rank if len(held) > 1]
    cap = config.cap_tokens(dims)
    assert all(row_tokens(held, lengths, plan) <= cap for held in several)


@pytest.mark.parametrize(
    ("name", "lengths", "dims", "message"),
    [
        ("slime", [5] * 3, INTERLEAVED, "3 samples cannot fill 4 micro-batches"),
        ("verl 0.9", [5] * 3, PLAIN, "3 samples do not divide by 2"),
        ("verl 0.9", [101, 5], PLAIN, "verl asserts that max_token_len"),
        ("verl 0.9", [5, 5], INTERLEAVED, "1 samples cannot fill 2 micro-batches"),
        ("NeMo-RL", [5], PLAIN, "1 samples cannot fill 2 micro-batches"),
        ("NeMo-RL", [101, 5], PLAIN, "NeMo-RL's packer raises; set max_tokens_per_gpu"),
        ("NeMo-RL", [60, 60], INTERLEAVED, "cannot run 1 micro-batches per rank"),
        ("AReaL", [5] * 6, INTERLEAVED, "3 samples cannot fill 4 micro-batches"),
        ("AReaL", [5] * 3, PLAIN, "3 samples do not divide by 2"),
        ("Megatron dp_balanced", [5], PLAIN, "1 samples cannot fill 2 micro-batches"),
        ("Megatron dp_balanced", [101, 5], PLAIN, "or an empty row first"),
        ("first-fit in order", [60, 60], INTERLEAVED, "it can run 2"),
    ],
)
def test_failures_say_why(name: str, lengths: list[int], dims: ParallelDims, message: str) -> None:
    with pytest.raises(RuleFailureError) as caught:
        rule_plan(ALL_RULES[name], lengths, dims, CONFIG)
    assert message in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize("rule", ALL_RULES.values(), ids=ALL_RULES)
def test_no_samples_and_bad_lengths(rule: Rule) -> None:
    with pytest.raises(RuleFailureError, match="pass one or more"):
        rule_plan(rule, [], PLAIN, CONFIG)
    with pytest.raises(LengthError):
        rule_plan(rule, [5, -1], PLAIN, CONFIG)


def megatron_original(name: str) -> Any:
    """A module with rules, of Megatron's dev branch."""
    path = scheduling_file(name)
    if path is None:
        pytest.skip(f"{CHECKOUT} names no checkout of Megatron-LM's dev branch")
    return scheduling_module(path)


@examples(300)
@given(
    st.lists(st.integers(1, 100), min_size=1, max_size=60),
    st.integers(1, 8),
    st.integers(100, 300),
    st.sampled_from([None, 2, 4]),
)
def test_megatron_dp_balanced_is_the_original_rule(
    lengths: list[int], ranks: int, cap: int, group: int | None
) -> None:
    scheduler = megatron_original("data_schedule").DpBalancedScheduler(cap, 1, ranks, group, None)
    problem = problem_of(lengths, ranks, cap, group=group)
    try:
        expected = scheduler.get_groups_and_subsamples(list(enumerate(lengths)))
    except AssertionError:
        with pytest.raises(RuleFailureError):
            megatron_dp_balanced(problem)
        return
    assert megatron_dp_balanced(problem) == [
        list(of_rank) for of_rank in zip(*expected, strict=True)
    ]


@examples(300)
@given(
    st.lists(st.integers(1, 700), min_size=1, max_size=40),
    st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16]),
    st.integers(20, 200),
)
def test_megatron_dynamic_cp_is_the_original_rule(lengths: list[int], ranks: int, cap: int) -> None:
    step_of = megatron_original("data_schedule_utils").next_hdp_group_packing_aware
    left = sorted(enumerate(lengths), key=lambda sample: -sample[1])
    try:
        expected = []
        while left:
            _, left, _, of_ranks = step_of(left, ranks, cap)
            expected.append(of_ranks)
    except (AssertionError, IndexError):
        with pytest.raises(RuleFailureError):
            megatron_dynamic_slots(lengths, ranks, cap)
        return
    slots = megatron_dynamic_slots(lengths, ranks, cap)
    assert [[g.samples for g in groups for _ in range(g.size)] for groups in slots] == expected


def test_random_steps_of_megatron_dynamic_cp_stay_the_original_s() -> None:
    generator, steps = random.Random(0), list[Any]()
    for _ in range(100):
        lengths = [generator.randint(1, 150) for _ in range(generator.randint(1, 30))]
        ranks, cap = generator.choice([2, 4, 8]), generator.choice([60, 120])
        try:
            slots = megatron_dynamic_slots(lengths, ranks, cap)
            steps.append([[(group.size, group.samples) for group in each] for each in slots])
        except RuleFailureError:
            steps.append("none")
    assert steps.count("none") < 40
    assert digest_of(steps) == "40c4e5459a49"


def test_megatron_dynamic_cp() -> None:
    """What the original makes of them: the longest on the ranks that it needs, short ones beside
    it on more than they need, and no rank without samples."""
    slots = megatron_dynamic_slots([100, 90, 10, 6, 60], 4, 50)
    assert [[(group.size, group.samples) for group in groups] for groups in slots] == [
        [(2, [0]), (2, [1, 2])],
        [(2, [4]), (2, [3])],
    ]
    # Of three ranks the one that is left over joins, and the group keeps the samples it has.
    slots = megatron_dynamic_slots([100, 60], 3, 54)
    assert [[(g.size, g.samples) for g in groups] for groups in slots] == [[(3, [0])], [(3, [1])]]
    dims = ParallelDims(data_parallel=4, pipeline_parallel=2)
    config = PlannerConfig(max_tokens_per_gpu=56, max_context_parallel=4)
    plan = megatron_dynamic_plan([100, 90, 10, 6, 60], dims, config)
    validate_plan(plan, [100, 90, 10, 6, 60])
    with pytest.raises(RuleFailureError, match="need more than 4 ranks; set max_tokens_per"):
        megatron_dynamic_slots([500], 4, 50)
    for lengths, ranks in (([100, 100], 5), ([200, 100], 7)):
        with pytest.raises(RuleFailureError, match=f"do not fill {ranks} ranks; use 2, 4, 8"):
            megatron_dynamic_slots(lengths, ranks, 50)
    with pytest.raises(RuleFailureError, match="without samples"):
        megatron_dynamic_plan([], dims, config)
