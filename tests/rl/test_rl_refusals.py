"""What the helpers of reinforcement learning refuse: the rows of `REFUSALS.md`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import batch_cases
import numpy as np
import pytest
import torch
from batch_cases import make_samples
from test_advantages import turns_of
from torch import tensor

from mcore_batching import batch, rl
from mcore_batching.batch import DEFAULT_SCHEMA, Kind
from mcore_batching.rl import LeftPadded, compute_advantages, left_pad, sample_metrics
from mcore_batching.rl.real_samples import real_indices

ONE = make_samples([(2, 1)])
TWO = make_samples([(3, 2), (2, 1)])
SIZES = {"data_parallel_size": 2, "samples_per_prompt": 8, "actor_mini_batch_size": 15}
NO_TOKENS: list[Any] = [True, 1.0, None, "1", math.nan, 2**63, tensor(True)]


def advantages(changed: dict[str, Any] | None = None, **options: Any) -> Any:
    return compute_advantages(turns_of(0) | (changed or {}), **{"step_wise": True} | options)


def blocks_of(**blocks: torch.Tensor) -> Any:
    """Blocks of two samples, of 2 and 4 tokens."""
    others = {"total_lengths": [2, 4], "response_lengths": [1, 2]}
    return LeftPadded(
        blocks=blocks,
        others=others,
        total_lengths=(2, 4),
        response_lengths=(1, 2),
        schema=DEFAULT_SCHEMA,
    )


def left_padded(values: Any) -> Any:
    batch = make_samples([(3, 1), (3, 2)]) | {"x": values}
    return left_pad(batch, DEFAULT_SCHEMA.declare("x", Kind.PER_RESPONSE_TOKEN), pad_token_id=0)


def tagged(**fields: Any) -> dict[str, Any]:
    return make_samples([(2, 1)] * 3) | {"rewards": [1.0] * 3} | fields


def metrics_of(values: Any) -> Any:
    return sample_metrics({"total_lengths": [2, 2], "rewards": values}, ["rewards"])


REFUSALS = batch_cases.refusals(__file__, torch, batch, rl, batch_cases, globals())


@pytest.mark.parametrize(("call", "error", "text"), REFUSALS)
def test_refused(call: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()


def test_what_resembles_it_passes() -> None:
    rewards = [True, tensor([0.0]), 1.0, 0.0, 0.0, 0.0]
    compute_advantages(turns_of(0) | {"rewards": rewards}, step_wise=True, outcome="sum")
    for seven in (7, np.int64(7), tensor(7)):
        assert left_pad(TWO, pad_token_id=seven).tokens[1, 0] == 7
    assert real_indices(tagged(is_padding=[tensor(True), None, False])) == [1, 2]
