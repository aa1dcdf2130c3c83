"""Errors keep their type, text and attributes through pickling."""

from __future__ import annotations

import pickle

import pytest

from mcore_batching.batch.consensus import CollectiveError
from mcore_batching.megatron.errors import (
    CollationFailedError,
    DynamicBatchArgumentError,
    ForwardFailedError,
    PlanMismatchError,
    PlanningFailedError,
)


@pytest.mark.parametrize(
    "kind", [CollationFailedError, ForwardFailedError, PlanMismatchError, PlanningFailedError]
)
def test_collective_errors_survive_pickling(kind: type[CollectiveError]) -> None:
    error = kind({3: "KeyError: 'tokens'", 1: "no memory"})
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert str(again) == str(error)
    assert again.failures == {3: "KeyError: 'tokens'", 1: "no memory"}
    assert isinstance(error, RuntimeError)
    assert str(error).startswith(kind.headline)
    assert str(error).index("rank 1: no memory") < str(error).index("rank 3: KeyError")


def test_argument_error_is_a_value_error() -> None:
    assert issubclass(DynamicBatchArgumentError, ValueError)
    assert str(pickle.loads(pickle.dumps(DynamicBatchArgumentError("set --x")))) == "set --x"
