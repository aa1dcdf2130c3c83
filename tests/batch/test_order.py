"""Invariant 7: what is run in plan order comes back in origin order, nothing lost or doubled."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_batching.batch import OrderError, apply_order, order, restore_order


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 40).flatmap(lambda n: st.permutations(range(n))))
def test_order(plan_order: list[int]) -> None:
    origin = [f"output of {index}" for index in range(len(plan_order))]
    run = [f"output of {index}" for index in plan_order]
    assert apply_order(origin, plan_order) == run
    assert restore_order(run, plan_order, len(plan_order)) == origin
    # Values and indices may come one by one.
    assert apply_order(iter(origin), iter(plan_order)) == run
    assert restore_order(iter(run), iter(plan_order), len(plan_order)) == origin


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(-2, 9), max_size=9), st.integers(0, 9), st.integers(0, 9))
def test_anything_but_a_permutation_is_refused(
    indices: list[int], num_values: int, num_samples: int
) -> None:
    values = list(range(num_values))
    fits = num_values == len(indices) and sorted(indices) == list(range(num_samples))
    if fits:
        assert sorted(restore_order(values, indices, num_samples)) == values
        return
    with pytest.raises(OrderError) as caught:
        restore_order(values, indices, num_samples)
    error = caught.value
    assert error.missing == tuple(sorted(set(range(num_samples)) - set(indices)))
    assert error.extra == tuple(sorted(set(indices) - set(range(num_samples))))
    assert error.doubled == tuple(sorted({i for i in indices if indices.count(i) > 1}))


def test_the_message_names_missing_doubled_and_extra_indices() -> None:
    with pytest.raises(OrderError) as caught:
        restore_order(["a", "b", "c", "d"], [0, 0, 7, 1], 4)
    assert str(caught.value) == (
        "expected one value for each of 4 samples, got 4 values and 4 sample_indices (missing 2, "
        "3; doubled 0; extra 7); pass one output per real sample, none for placeholders"
    )


def test_a_long_list_of_indices_is_cut_in_the_message_but_not_in_the_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(OrderError, match=r"missing 0, 1, .*, 9 and 90 more") as caught:
        restore_order([], [], 100)
    assert caught.value.missing == tuple(range(100))
    monkeypatch.setattr(order, "_MAX_MISSING", 3)  # where millions are missing, in the error too
    with pytest.raises(OrderError) as caught:
        restore_order([], [], 100)
    assert caught.value.missing == (0, 1, 2)
