import math

import pytest
from batches import group_advantages, groups_of_iteration, rollout_data, share_of_rank
from hypothesis import given
from hypothesis import strategies as st
from rollouts import Rollout

from mcore_batching.batch import DEFAULT_SCHEMA


def group(uid, rewards):
    return [Rollout(uid, f"{uid}?", "x" * i, reward) for i, reward in enumerate(rewards)]


GROUPS = [group(str(i), [0.0] * (1 + i % 3)) for i in range(7)]


def test_iterations_walk_through_the_groups_in_a_circle():
    walked = [g for iteration in range(3) for g in groups_of_iteration(GROUPS, iteration, 5)]
    assert walked == (GROUPS * 3)[:15]


@given(count=st.integers(0, 7), ranks=st.integers(1, 9))
def test_every_group_is_on_exactly_one_rank_and_some_have_none(count, ranks):
    shares = [share_of_rank(GROUPS[:count], rank, ranks) for rank in range(ranks)]
    assert sorted(g[0].uid for share in shares for g in share) == [str(i) for i in range(count)]
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_advantages_are_standard_deviations_from_the_groups_mean():
    assert group_advantages([1.0, 0.0, 0.0, 1.0]) == pytest.approx([1, -1, -1, 1], rel=1e-3)
    assert group_advantages([0.5, 0.5, 0.5]) == [0, 0, 0]
    assert group_advantages([3.0]) == [0]
    values = group_advantages([0.1, 0.9, 0.4])
    assert math.isclose(sum(values), 0, abs_tol=1e-12)
    assert values[1] > values[2] > values[0]


def test_fields_are_what_the_schema_declares_group_by_group():
    data = rollout_data([group("a", [0.0, 1.0]), group("b", [2.0, 2.0])])
    DEFAULT_SCHEMA.validate(data)
    assert data["total_lengths"] == [4, 5, 4, 5]
    assert data["response_lengths"] == [1, 2, 1, 2]
    assert data["rewards"] == [0, 1, 2, 2]
    assert [v.tolist() for v in data["advantages"]] == [
        pytest.approx([-1], rel=1e-3),
        pytest.approx([1, 1], rel=1e-3),
        [0],
        [0, 0],
    ]


def test_a_rank_without_groups_has_the_same_fields():
    assert rollout_data([]).keys() == rollout_data([group("a", [0.0])]).keys()
    assert all(values == [] for values in rollout_data([]).values())
