"""`validate` refuses each way in which a plan can be broken, and names it."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from planning_cases import SIX_LENGTHS as LENGTHS
from planning_cases import SIX_SAMPLES, Case, broken_invariants, cases, examples, planned

from mcore_batching.planning import (
    InvariantError,
    ParallelDims,
    Plan,
    StepPlan,
    plan_batch,
)
from mcore_batching.planning.plans.validation import validate_plan

CONFIG = SIX_SAMPLES.config


def step_of(*ranks: tuple[tuple[int, ...], ...], **changes: Any) -> StepPlan:
    """A plan over LENGTHS with the given micro-batches."""
    given = {"micro_batches": ranks, "num_microbatches": len(ranks[0])}
    return replace(SIX_SAMPLES, **given | changes)


GOOD = SIX_SAMPLES.micro_batches


def refusal(plan: StepPlan | Plan, lengths: list[int] = LENGTHS) -> InvariantError:
    with pytest.raises(InvariantError) as caught:
        validate_plan(plan, lengths)
    return caught.value


def test_good_plans_pass() -> None:
    validate_plan(step_of(*GOOD), LENGTHS)
    validate_plan(Plan(steps=(step_of(*GOOD),), num_samples=6), LENGTHS)
    for ranks, options in ((GOOD, {"max_samples_per_row": 2}), (HELD, {"fill": "placeholder"})):
        validate_plan(step_of(*ranks, **config(**options)), LENGTHS)


VPP2 = ParallelDims(data_parallel=2, pipeline_parallel=3, virtual_pipeline=2)
HELD = (((3,), (), (5,)), ((0,), (), (1, 2, 4)))
"""With a placeholder beside a micro-batch of three."""


def config(**changes: object) -> dict[str, object]:
    return {"config": replace(CONFIG, **changes)}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("step", "where", "text"),
    [
        (
            step_of(((0,), (3,)), ((2, 4), (5,))),
            ("exact cover", None, None, (1,)),
            "invariant 'exact cover' is broken: samples 1 are in the step not at all",
        ),
        (
            step_of(((0, 1), (3,)), ((1, 2, 4), (5,))),
            ("exact cover", None, None, (1,)),
            "samples 1 are in the step more than once",
        ),
        (
            step_of(((0, 1), (3,)), ((2, 4, 7), (5,))),
            ("exact cover", None, None, (7,)),
            "samples 7 are in the step though they are not part of it",
        ),
        # A sample listed twice would count twice in every figure.
        *(
            (step_of(*GOOD, sample_indices=samples), ("exact cover", None, None, ()), "ascend")
            for samples in ((0, 0, 1, 2, 3, 4, 5), (1, 0, 2, 3, 4, 5))
        ),
        (
            step_of(((0, 2, 1), (3,)), ((4,), (5,))),
            ("cap", 0, 0, (0, 2, 1)),
            "invariant 'cap' is broken at rank 0, slot 0: samples 0, 2, 1 take 13 padded tokens, "
            "the cap is 10",
        ),
        (
            step_of(*GOOD, **config(max_samples_per_row=1)),
            ("cap", 0, 0, (0, 1)),
            "samples 0, 1 share a row, max_samples_per_row=1",
        ),
        (step_of(*GOOD, **config(on_oversize="error")), ("cap", 1, 1, (5,)), "14 padded tokens"),
        (
            step_of(((0, 1), (3,)), ((2,), (4,), (5,))),
            ("equal count", 1, None, (2, 4, 5)),
            "every rank must have 2 micro-batches, this one has 3",
        ),
        (
            step_of(((0, 1), (3,), (2, 4), (5,))),
            ("equal count", None, None, ()),
            "the layout has 2 data-parallel ranks, the plan 1",
        ),
        (
            step_of(*GOOD, dims=VPP2),
            ("equal count", None, None, ()),
            "cannot run 2 micro-batches per rank; it can run 3",
        ),
        (
            step_of(*HELD),
            ("split before placeholder", 1, 2, (1, 2, 4)),
            "slot 1 is a placeholder",
        ),
    ],
)
def test_what_is_broken_is_named(step: StepPlan, where: tuple[object, ...], text: str) -> None:
    error = refusal(step)
    assert (error.invariant, error.rank, error.slot, error.indices) == where
    assert text in str(error)


def test_lengths_and_steps_of_a_batch() -> None:
    """A plan covers its batch over all steps, and names the step."""
    error = refusal(step_of(*GOOD), LENGTHS[:4])
    assert (error.invariant, error.indices) == ("exact cover", (4, 5))
    assert "none of the 4 lengths" in str(error)
    lengths = [5, 6, 7, 4]
    plan = plan_batch(lengths, ParallelDims(), CONFIG, samples_per_step=2)
    first, second = plan.steps
    merged = replace(second, micro_batches=(((2, 3), ()),), num_microbatches=2)
    error = refusal(replace(plan, steps=(first, merged)), lengths)
    assert (error.invariant, error.step, error.rank, error.slot) == ("cap", 1, 0, 0)
    assert "at step 1, rank 0, slot 0" in str(error)
    for steps, indices in (((first, first), (0, 1)), ((first,), (2, 3))):
        error = refusal(replace(plan, steps=steps), lengths)
        assert (error.invariant, error.indices) == ("exact cover", indices)
    error = refusal(plan, lengths[:3])
    assert error.invariant == "exact cover"
    assert "4 samples, but 3 lengths" in str(error)


@examples(1400)
@given(cases(dynamic=True), st.randoms(use_true_random=False))
def test_validate_agrees_with_the_independent_checker_on_corrupted_plans(
    case: Case, random: Random
) -> None:
    """Move, drop, double, merge or resize things at random: what breaks is what is named."""
    step = planned(case)
    ranks = [[list(samples) for samples in rank] for rank in step.micro_batches]
    sizes = step.context_parallel and [list(of_rank) for of_rank in step.context_parallel]
    kinds = ["move", "merge", "drop", "double"]
    kinds += ["resize", "replace"] if sizes else ["shorten", "lengthen", "lose rank"]
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
        elif kind == "resize" and sizes:
            random.choice(sizes)[slot] = random.randint(1, len(ranks) + 1)
        elif kind == "replace" and case.lengths:
            source[:] = random.choices(range(len(case.lengths)), k=random.randrange(3))
    corrupted = replace(
        step,
        micro_batches=tuple(tuple(map(tuple, rank)) for rank in ranks),
        context_parallel=sizes and tuple(map(tuple, sizes)),
    )
    assume(corrupted != step)
    broken = broken_invariants(corrupted, case.lengths)
    if not broken:
        validate_plan(corrupted, case.lengths)
        return
    error = refusal(corrupted, case.lengths)
    assert error.invariant in broken
