"""The packed forward-backward function: calls and losses that it refuses, padding in routers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packed_row_cases import rows

from mcore_batching.batch import PackedMicroBatch, SchemaError
from mcore_batching.integrations.megatron_lm import forward_backward, with_batching_statistics
from mcore_batching.integrations.megatron_lm.forward_backward import check_loss, row_given
from mcore_batching.integrations.megatron_lm.stock_steps import StockSteps
from mcore_batching.megatron import DynamicBatchArgumentError
from mcore_batching.planning import (
    CostModel,
    ParallelDims,
    PlannerConfig,
    plan_step,
    step_statistics,
)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"collect_non_loss_data": True}, "process_non_loss_data_func runs the model on one rank"),
        ({"adjust_tensor_shapes_fn": print}, "adjust_tensor_shapes_fn"),
    ],
)
def test_refused_calls(options: dict[str, Any], message: str) -> None:
    args: Any = SimpleNamespace()
    call = dict.fromkeys(
        ("forward_step_func", "data_iterator", "model", "num_microbatches", "micro_batch_size")
    )
    with pytest.raises(DynamicBatchArgumentError, match=message):
        forward_backward.run_packed(print, args, StockSteps(args), **call | options)


def test_a_step_that_megatron_reruns_is_planned_by_the_same_costs() -> None:
    """What was learnt meanwhile would change its rounding, which Megatron compares."""
    steps = StockSteps(SimpleNamespace())
    planned = CostModel(per_micro_batch=7.0)
    assert steps._cost_model_of_rerun(3) is None
    steps._last_planned = 3, planned
    assert steps._cost_model_of_rerun(3) is planned
    assert steps._cost_model_of_rerun(4) is None
    assert steps._cost_model_of_rerun(None) is None


def test_labels_that_are_trained_are_of_the_vocabulary() -> None:
    steps = StockSteps(SimpleNamespace())
    batch = {
        "tokens": torch.tensor([[1, 2, 3]]),
        "labels": torch.tensor([[2, -100, 64]]),
        "loss_mask": torch.tensor([[1.0, 0.0, 1.0]]),
        "position_ids": torch.arange(3)[None],
    }
    model: Any = SimpleNamespace(vocab_size=65)
    assert steps._read([model], [batch])
    model.vocab_size = 64
    with pytest.raises(SchemaError, match=r"'labels', sample 0: .* found 64 at place 2"):
        steps._read([model], [batch])


def test_rows_that_routers_losses_are_means_over() -> None:
    """Of each replica: a row on several ranks is one."""
    plan = SimpleNamespace(
        dims=ParallelDims(data_parallel=2, context_parallel=2),
        context_parallel=[[4, 2], [4, 2], [4, 1], [4, 1]],
    )
    schedule: Any = SimpleNamespace(steps=[[(), ()]], step_plan=lambda step: (plan, []))
    for most, expected in ((None, 2), (4, (1 + 3) / 2)):
        schedule.config = SimpleNamespace(max_context_parallel=most)
        assert forward_backward._rows_of_replica(schedule) == expected


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ((torch.ones(()), {}), "got a tuple of 2"),
        (torch.ones(()), "got Tensor"),
        (
            (torch.ones(()), torch.ones(()), {"accuracy": torch.ones(1)}),
            r"must report accuracy as \[sum, number of tokens\]",
        ),
        ((torch.tensor(0), torch.ones(()), {}), r"one value, got .* and type torch.int64"),
        ((torch.ones(2), torch.ones(()), {}), r"tensor of one value, got a Tensor of shape \[2\]"),
        ((0.0, torch.ones(()), {}), r"a float tensor of one value, got 0.0"),
        ((torch.ones(()), torch.ones(()), None), "as a dict .*, got NoneType"),
    ],
)
def test_refused_losses(result: Any, message: str) -> None:
    check_loss((torch.ones(()), torch.ones(()), {"lm loss": torch.ones(2)}))
    with pytest.raises(DynamicBatchArgumentError, match=message):
        check_loss(result)


@pytest.mark.parametrize(
    ("value", "count", "requires_grad", "failure"),
    [
        (2.0, 3, True, "the loss is detached from the logits"),
        (0.0, 3, True, None),  # what a loss function leaves out
        (2.0, 0, True, None),  # of no trained tokens
        (2.0, 3, False, None),  # evaluation
    ],
)
def test_a_detached_loss_trains_nothing(
    value: float, count: int, requires_grad: bool, failure: str | None
) -> None:
    """Stages before waited for a gradient, or momentum alone moved the weights."""
    output = torch.ones(2, requires_grad=requires_grad)
    failed: list[Exception] = []
    job: Any = SimpleNamespace(defer=lambda failed, error, row: failed.append(error))
    given = torch.tensor(value), torch.tensor(count), {}
    step = forward_backward.with_deferred_errors(
        lambda *_: (output, lambda tensor: given), failed, job, nothing_later
    )
    _, loss = step(rows(), Chunk(None))
    share, _, _ = loss(output)
    assert [str(error).partition(",")[0] for error in failed] == ([failure] if failure else [])
    assert share.requires_grad == requires_grad
    assert failed or float(share) == value


def nothing_later(row: PackedMicroBatch) -> None: ...


class Chunk(torch.nn.Module):
    """Returns what it is given."""

    def __init__(self, num_moe_experts: int | None) -> None:
        super().__init__()
        self.config = SimpleNamespace(
            num_moe_experts=num_moe_experts,
            sequence_parallel=False,
            apply_rope_fusion=False,
            mtp_num_layers=None,
        )

    def forward(self, **inputs: Any) -> dict[str, Any]:
        return inputs


def test_a_model_gets_the_rows_own_parameters_in_place_of_the_scripts() -> None:
    """Of padding routers learn by a mask; in a placeholder all is padding."""
    experts, dense, iterator = Chunk(4), Chunk(None), rows()
    scripts = {"packed_seq_params": "the script's", "labels": 1}
    with row_given(iterator, experts, nothing_later):
        assert experts(**scripts) == scripts  # before the row is drawn
        next(iterator)
        given = experts(**scripts)
    params = given["packed_seq_params"]
    assert params.host_cu_seqlens == (0, 4, 8)
    mask = [[False] * 3 + [True] + [False] * 2 + [True] * 2]
    assert params.own_padding_mask.tolist() == mask
    assert given["labels"] == 1
    with row_given(iterator, dense, nothing_later):
        assert not hasattr(dense()["packed_seq_params"], "own_padding_mask")
    with pytest.raises(TypeError), row_given(iterator, dense, nothing_later):
        dense("takes keywords alone")
    assert dense() == {}
    placeholder = rows(is_placeholder=True)
    with row_given(placeholder, experts, nothing_later):
        next(placeholder)
        assert experts()["packed_seq_params"].own_padding_mask.all()


def test_losses_are_joined_by_the_last_steps_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_backward, "_last_step", {})
    losses, lengths = {"lm loss": torch.tensor([2.0])}, [9, 6, 4, 2]
    assert with_batching_statistics(losses) == losses
    plan = plan_step(lengths, ParallelDims(data_parallel=2), PlannerConfig(max_tokens_per_gpu=8))
    schedule: Any = SimpleNamespace(step_plan=lambda step: (plan, lengths))
    made = step_statistics(plan, lengths)
    values = {
        "fill": made.fill,
        "padding": made.padding,
        "micro-batches a rank": made.num_microbatches,
        "time over floor": made.time_over_floor,
        "plan seconds": 0.5,
    }
    # Rows of fine-tuning alone can be truncated; the last step's are not this one's.
    for truncated, more in ((3, {"truncated": 3}), (None, {})):
        forward_backward.record_step(schedule, plan_seconds=0.5, truncated=truncated)
        logged = with_batching_statistics(losses)
        assert logged.pop("lm loss") is losses["lm loss"]
        assert {name: value.tolist() for name, value in logged.items()} == {
            f"batching/{name}": [pytest.approx(value)] for name, value in (values | more).items()
        }
    assert list(losses) == ["lm loss"]
    assert with_batching_statistics({}) == {}  # ranks without losses
