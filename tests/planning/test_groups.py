"""The guarantees of `group_steps`."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_cases import Integer, examples

from mcore_batching.planning import (
    LengthError,
    ParallelDims,
    PlannerConfig,
    group_steps,
    plan_batch,
)

UIDS = st.lists(st.integers(0, 9) | st.sampled_from(["a", "b", ("c", 1)]), max_size=40)


@examples(300)
@given(UIDS, st.integers(1, 5))
def test_steps_hold_so_many_whole_groups_in_order_of_first_appearance(
    groups: list[object], per_step: int
) -> None:
    steps = group_steps(groups, per_step)
    assert sorted(sample for step in steps for sample in step) == list(range(len(groups)))
    assert all(step == sorted(step) for step in steps)
    order = list(dict.fromkeys(groups))
    for index, step in enumerate(steps):
        # Exactly the next groups in line, so none is split and none is out of its turn.
        expected = order[index * per_step : (index + 1) * per_step]
        assert {groups[sample] for sample in step} == set(expected)
    assert len(steps) == -(-len(order) // per_step)
    # Groups left over are a step of their own, are dropped or are an error.
    if len(order) % per_step:
        assert group_steps(groups, per_step, last="drop") == steps[:-1]
        with pytest.raises(LengthError, match=r"over in steps of .*; set groups_per"):
            group_steps(groups, per_step, last="error")
    else:
        assert group_steps(groups, per_step, last="drop") == steps
        assert group_steps(groups, per_step, last="error") == steps


def test_numbers_of_other_libraries_count_by_value() -> None:
    assert group_steps([Integer(4), Integer(7), Integer(4)], 1) == [[0, 2], [1]]
    assert group_steps([4, Integer(4)], 1) == [[0, 1]]
    given = [20, 20], ParallelDims(), PlannerConfig(max_tokens_per_gpu=40)
    shared = plan_batch(*given, groups=[4, 4], prompts=[15, 15])
    assert shared.steps[0].trees
    assert plan_batch(*given, groups=[Integer(4), Integer(4)], prompts=[15, 15]) == shared


def test_padding_samples_are_nobodys_group() -> None:
    """Each was a group of its own: 41 samples, padded to 48, took more optimizer steps."""
    groups = [f"prompt {i // 5}" for i in range(41)] + [f"padding-{i}" for i in range(7)]
    is_padding = [False] * 41 + [True] * 7
    assert len(group_steps(groups, 3)) == 6
    steps = group_steps(groups, 3, is_padding=is_padding)
    assert steps == group_steps(groups[:41], 3)
    assert len(steps) == 3
    # Nor need they have a uid, nor the tags be booleans.
    assert group_steps([None, 5], 1, is_padding=[1, None]) == [[1]]
