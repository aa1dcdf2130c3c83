"""`validate` refuses each way in which a plan can be broken, and names it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from planning_cases import Case, broken_invariants, cases, examples, planned

from mcore_batching.planning import (
    InvariantError,
    ParallelDims,
    Plan,
    PlannerConfig,
    StepPlan,
    plan_batch,
)
from mcore_batching.planning.plans.validation import validate_plan

LENGTHS = [6, 4, 3, 9, 2, 14]
LAYOUT = ParallelDims(data_parallel=2)
CONFIG = PlannerConfig(max_tokens_per_gpu=10)


def step_of(*ranks: tuple[tuple[int, ...], ...], **changes: object) -> StepPlan:
    """A plan over LENGTHS with the given micro-batches."""
    options: dict[str, object] = {
        "micro_batches": ranks,
        "num_microbatches": len(ranks[0]),
        "sample_indices": tuple(range(len(LENGTHS))),
        "dims": LAYOUT,
        "config": CONFIG,
    }
    return StepPlan(**{**options, **changes})  # type: ignore[arg-type]


GOOD = (((0, 1), (3,)), ((2, 4), (5,)))


def refusal(plan: StepPlan | Plan, lengths: list[int] = LENGTHS) -> InvariantError:
    with pytest.raises(InvariantError) as caught:
        validate_plan(plan, lengths)
    return caught.value


def test_a_good_plan_passes() -> None:
    validate_plan(step_of(*GOOD), LENGTHS)
    validate_plan(Plan(steps=(step_of(*GOOD),), num_samples=6), LENGTHS)


def test_a_missing_sample() -> None:
    error = refusal(step_of(((0,), (3,)), ((2, 4), (5,))))
    assert (error.invariant, error.indices) == ("exact cover", (1,))
    assert str(error) == "invariant 'exact cover' is broken: samples 1 are in the step not at all"


def test_a_doubled_sample() -> None:
    error = refusal(step_of(((0, 1), (3,)), ((1, 2, 4), (5,))))
    assert (error.invariant, error.indices) == ("exact cover", (1,))
    assert "samples 1 are in the step more than once" in str(error)


def test_a_sample_of_another_step() -> None:
    error = refusal(step_of(((0, 1), (3,)), ((2, 4, 7), (5,))))
    assert (error.invariant, error.indices) == ("exact cover", (7,))
    assert "samples 7 are in the step though they are not part of it" in str(error)


def test_too_few_lengths() -> None:
    error = refusal(step_of(*GOOD), LENGTHS[:4])
    assert (error.invariant, error.indices) == ("exact cover", (4, 5))
    assert "none of the 4 lengths" in str(error)


@pytest.mark.parametrize("samples", [(0, 0, 1, 2, 3, 4, 5), (1, 0, 2, 3, 4, 5)])
def test_samples_to_cover_that_do_not_ascend(samples: tuple[int, ...]) -> None:
    """A sample listed twice would count twice in every figure."""
    error = refusal(step_of(*GOOD, sample_indices=samples))
    assert error.invariant == "exact cover"
    assert "ascend" in str(error)


def test_a_micro_batch_over_the_cap() -> None:
    error = refusal(step_of(((0, 2), (3,)), ((1, 4), (5,))), [6, 4, 5, 9, 2, 14])
    assert (error.invariant, error.rank, error.slot, error.indices) == ("cap", 0, 0, (0, 2))
    assert str(error) == (
        "invariant 'cap' is broken at rank 0, slot 0: samples 0, 2 take 11 padded tokens, "
        "the cap is 10"
    )


def test_more_samples_in_a_micro_batch_than_may_share_it() -> None:
    config = replace(CONFIG, max_samples_per_row=1)
    error = refusal(step_of(*GOOD, config=config))
    assert (error.invariant, error.rank, error.slot, error.indices) == ("cap", 0, 0, (0, 1))
    assert "samples 0, 1 share a row, max_samples_per_row=1" in str(error)
    validate_plan(step_of(*GOOD, config=replace(config, max_samples_per_row=2)), LENGTHS)


def test_padding_counts_against_the_cap() -> None:
    error = refusal(step_of(*GOOD, config=replace(CONFIG, pad_each_to=5)))
    assert (error.invariant, error.rank, error.slot, error.indices) == ("cap", 0, 0, (0, 1))
    assert "15 padded tokens" in str(error)
    error = refusal(step_of(*GOOD, config=replace(CONFIG, pad_total_to=7)))
    assert (error.invariant, error.indices) == ("cap", (0, 1))
    assert "14 padded tokens" in str(error)
    context = ParallelDims(data_parallel=2, context_parallel=2)
    error = refusal(step_of(*GOOD, dims=context, config=replace(CONFIG, max_tokens_per_gpu=5)))
    assert (error.invariant, error.indices) == ("cap", (0, 1))
    assert "12 padded tokens, the cap is 10" in str(error)


def test_an_oversize_sample_that_is_not_alone() -> None:
    error = refusal(step_of(((0, 1), (3,)), ((2,), (4, 5))))
    assert (error.invariant, error.rank, error.slot, error.indices) == ("cap", 1, 1, (4, 5))


def test_an_oversize_sample_that_should_have_been_refused() -> None:
    error = refusal(step_of(*GOOD, config=replace(CONFIG, on_oversize="error")))
    assert (error.invariant, error.rank, error.slot, error.indices) == ("cap", 1, 1, (5,))


def test_ranks_with_different_counts() -> None:
    error = refusal(step_of(((0, 1), (3,)), ((2,), (4,), (5,))))
    assert (error.invariant, error.rank, error.indices) == ("equal count", 1, (2, 4, 5))
    assert "every rank must have 2 micro-batches, this one has 3" in str(error)


def test_a_rank_too_few() -> None:
    error = refusal(step_of(((0, 1), (3,), (2, 4), (5,))))
    assert error.invariant == "equal count"
    assert "the layout has 2 data-parallel ranks, the plan 1" in str(error)


def test_no_micro_batch_at_all() -> None:
    empty = step_of((), (), num_microbatches=0, sample_indices=())
    assert refusal(empty).invariant == "equal count"


def test_a_count_that_the_interleaved_schedule_refuses() -> None:
    dims = ParallelDims(data_parallel=2, pipeline_parallel=3, virtual_pipeline=2)
    error = refusal(step_of(*GOOD, dims=dims))
    assert error.invariant == "equal count"
    assert "cannot run 2 micro-batches per rank" in str(error)
    assert "it can run 3" in str(error)


def test_a_placeholder_beside_what_could_be_split() -> None:
    ranks = (((3,), (), (5,)), ((0,), (), (1, 2, 4)))
    error = refusal(step_of(*ranks))
    assert (error.invariant, error.rank, error.slot) == ("split before placeholder", 1, 2)
    assert error.indices == (1, 2, 4)
    assert "slot 1 is a placeholder" in str(error)
    validate_plan(step_of(*ranks, config=replace(CONFIG, fill="placeholder")), LENGTHS)


def test_a_plan_names_the_step() -> None:
    plan = plan_batch([5, 6, 7, 4], ParallelDims(), CONFIG, samples_per_step=2)
    second = replace(plan.steps[1], micro_batches=(((2, 3), ()),), num_microbatches=2)
    error = refusal(replace(plan, steps=(plan.steps[0], second)), [5, 6, 7, 4])
    assert (error.invariant, error.step, error.rank, error.slot) == ("cap", 1, 0, 0)
    assert "at step 1, rank 0, slot 0" in str(error)


def test_a_plan_covers_its_batch_over_all_steps() -> None:
    plan = plan_batch([5, 6, 7, 4], ParallelDims(), CONFIG, samples_per_step=2)
    error = refusal(replace(plan, steps=(plan.steps[0], plan.steps[0])), [5, 6, 7, 4])
    assert (error.invariant, error.indices) == ("exact cover", (0, 1))
    error = refusal(replace(plan, steps=plan.steps[:1]), [5, 6, 7, 4])
    assert (error.invariant, error.indices) == ("exact cover", (2, 3))
    error = refusal(plan, [5, 6, 7])
    assert error.invariant == "exact cover"
    assert "4 samples, but 3 lengths" in str(error)


@examples(1000)
@given(cases(), st.randoms(use_true_random=False))
def test_validate_agrees_with_the_independent_checker_on_corrupted_plans(
    case: Case, random: object
) -> None:
    """Move, drop, double or merge things at random: what breaks is what is named."""
    from random import Random

    assert isinstance(random, Random)
    step = planned(case)
    ranks = [[list(samples) for samples in rank] for rank in step.micro_batches]
    for _ in range(random.randint(1, 2)):
        rank = random.choice(ranks)
        if not rank:
            continue
        source, target = random.choice(rank), random.choice(random.choice(ranks) or rank)
        kind = random.choice(
            ["move", "merge", "drop", "double", "shorten", "lengthen", "lose rank"]
        )
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
    corrupted = replace(
        step, micro_batches=tuple(tuple(tuple(samples) for samples in rank) for rank in ranks)
    )
    assume(corrupted.micro_batches != step.micro_batches)
    broken = broken_invariants(corrupted, case.lengths)
    if not broken:
        validate_plan(corrupted, case.lengths)
        return
    error = refusal(corrupted, case.lengths)
    assert error.invariant in broken
