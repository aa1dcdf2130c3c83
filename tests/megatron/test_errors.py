"""Errors keep their text and attributes through pickling; ranks that differ are named."""

from __future__ import annotations

import pickle

import pytest

from mcore_batching.megatron.consensus import Note, require_equal, require_equal_within_replicas
from mcore_batching.megatron.errors import (
    CollationFailedError,
    CollectiveError,
    DynamicBatchArgumentError,
    PlanMismatchError,
    PlanningFailedError,
)


@pytest.mark.parametrize("kind", [CollationFailedError, PlanMismatchError, PlanningFailedError])
def test_collective_errors_survive_pickling(kind: type[CollectiveError]) -> None:
    error = kind({3: "KeyError: 'tokens'", 1: "no memory"})
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert str(again) == str(error)
    assert again.failures == {3: "KeyError: 'tokens'", 1: "no memory"}
    assert isinstance(error, RuntimeError)
    assert str(error).index("rank 1: no memory") < str(error).index("rank 3: KeyError")


def test_argument_error_is_a_value_error() -> None:
    assert issubclass(DynamicBatchArgumentError, ValueError)
    assert str(pickle.loads(pickle.dumps(DynamicBatchArgumentError("set --x")))) == "set --x"


def notes(*values: dict[str, int]) -> list[Note]:
    """One note a rank; two ranks a replica."""
    return [Note(rank // 2, rank % 2 == 0, value, None) for rank, value in enumerate(values)]


def test_rank_that_differs_is_named_with_a_witness() -> None:
    require_equal(notes({"cap": 8}, {"cap": 8}), lambda note: note.value)
    with pytest.raises(PlanMismatchError) as caught:
        require_equal(notes({"cap": 8}, {"cap": 9}, {"cap": 8}), lambda note: note.value)
    assert caught.value.failures == {1: "cap is 9, on rank 0 it is 8"}


def test_missing_value_counts_as_a_difference() -> None:
    with pytest.raises(PlanMismatchError) as caught:
        require_equal(notes({"a": 1}, {"a": 1, "b": 2}, {"a": 1}), lambda note: note.value)
    assert caught.value.failures == {1: "b is 2, on rank 0 it is None"}


def test_replicas_may_differ_from_each_other_but_not_within() -> None:
    value = {"plan": 1}
    require_equal_within_replicas(notes(value, value, {"plan": 2}, {"plan": 2}), lambda n: n.value)
    with pytest.raises(PlanMismatchError) as caught:
        require_equal_within_replicas(notes(value, value, value, {"plan": 2}), lambda n: n.value)
    assert caught.value.failures == {3: "plan is 2, on rank 2 it is 1"}
