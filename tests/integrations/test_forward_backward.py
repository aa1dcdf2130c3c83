"""Calls and losses that the packed forward-backward function refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mcore_batching.integrations.megatron_lm.forward_backward import (
    PackedForwardBackward,
    _check_loss,
)
from mcore_batching.megatron import DynamicBatchArgumentError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"collect_non_loss_data": True}, "process_non_loss_data_func runs forward passes on the"),
        ({"adjust_tensor_shapes_fn": print}, "a function that adjusts tensor shapes"),
    ],
)
def test_refused_calls(options: dict[str, Any], message: str) -> None:
    schedule = PackedForwardBackward(lambda **_: None, SimpleNamespace())
    with pytest.raises(DynamicBatchArgumentError, match=message):
        schedule(
            forward_step_func=print,
            data_iterator=None,
            model=[],
            num_microbatches=1,
            micro_batch_size=1,
            **options,
        )


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ((torch.ones(()), {}), "it returned a tuple of 2"),
        (torch.ones(()), "it returned Tensor"),
        (
            (torch.ones(()), torch.ones(()), {"accuracy": torch.ones(1)}),
            r"must give accuracy as \[sum, number of tokens\]",
        ),
    ],
)
def test_refused_losses(result: Any, message: str) -> None:
    with pytest.raises(DynamicBatchArgumentError, match=message):
        _check_loss(result)


def test_a_loss_as_a_sum_with_its_count_passes() -> None:
    _check_loss((torch.ones(()), torch.ones(()), {"lm loss": torch.ones(2)}))
