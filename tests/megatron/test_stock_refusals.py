"""Flags that the stock path refuses, each by its message; several at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mcore_batching.integrations.megatron_lm import check_arguments, next_batch
from mcore_batching.integrations.megatron_lm.batch_fields import check_fields, fields_unpacked_by
from mcore_batching.integrations.megatron_lm.forward_backward import (
    PackedForwardBackward,
    _check_loss,
)
from mcore_batching.integrations.megatron_lm.script import use_packed_batches
from mcore_batching.megatron import DynamicBatchArgumentError


def arguments(**changes: Any) -> SimpleNamespace:
    """Megatron's arguments as far as they are looked at, with one problem of their own."""
    return SimpleNamespace(
        **{
            "use_dynamic_batch_size": True,
            "max_tokens_per_gpu": 64,
            "calculate_per_token_loss": True,
            "virtual_pipeline_model_parallel_size": None,
            "data_parallel_size": 1,
            "pipeline_model_parallel_size": 1,
            "context_parallel_size": 1,
            "tensor_model_parallel_size": 1,
            "expert_model_parallel_size": 1,
            "sequence_parallel": False,
        }
        | changes
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"calculate_per_token_loss": False}, "set --calculate-per-token-loss"),
        ({"sft": True}, "unset --sft and give the file with --dynamic-batch-data"),
        (
            {"dataloader_inter_document_masking": True},
            "set --reset-attention-mask and --reset-position-ids instead",
        ),
        ({"hybrid_context_parallel": True}, "unset --hybrid-context-parallel"),
        ({"reset_attention_mask": True}, "set --reset-position-ids as well"),
        ({"iterations_to_skip": [3]}, "--iterations-to-skip draws batches of a fixed size"),
        ({"logits_load_dir": "/somewhere"}, "unset --logits-load-dir"),
        ({"modelopt_enabled": True}, "ModelOpt distillation expects rows of seq_length"),
        ({"perform_rl_step": True}, "unset --perform-rl-step"),
        ({"hybrid_layer_pattern": "M*-"}, "state-space layers carry their state"),
        ({"is_hybrid_model": True}, "state-space layers carry their state"),
        ({"experimental_attention_variant": "dsa"}, "attention variant 'dsa' has not been tried"),
        (
            {"moe_expert_rank_capacity_factor": 1.0},
            "unset --moe-expert-rank-capacity-factor",
        ),
        ({"reuse_grad_buf_for_mxfp8_param_ag": True}, "--reuse-grad-buf-for-mxfp8-param-ag"),
        ({"max_tokens_per_gpu": None}, "set --max-tokens-per-gpu"),
        ({"max_tokens_per_gpu": 0}, "max_tokens_per_gpu must be"),
        ({"dynamic_batch_cost_model": "/nowhere"}, "--dynamic-batch-cost-model /nowhere: "),
        (
            {"virtual_pipeline_model_parallel_size": 2, "microbatch_group_size_per_vp_stage": None},
            "virtual_pipeline=2 needs more than one pipeline stage",
        ),
    ],
)
def test_refused_flags(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DynamicBatchArgumentError) as caught:
        check_arguments(arguments(**changes))
    assert message in str(caught.value)
    assert "--use-dynamic-batch-size cannot run with these settings" in str(caught.value)


def test_all_problems_are_listed_at_once() -> None:
    with pytest.raises(DynamicBatchArgumentError) as caught:
        check_arguments(arguments(sft=True, perform_rl_step=True, calculate_per_token_loss=False))
    assert str(caught.value).count("\n  - ") == 3


def test_nothing_is_refused_without_the_flag_but_exchange() -> None:
    check_arguments(arguments(use_dynamic_batch_size=False, sft=True))
    with pytest.raises(DynamicBatchArgumentError, match="set --use-dynamic-batch-size as well"):
        check_arguments(arguments(use_dynamic_batch_size=False, dynamic_batch_exchange=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"collect_non_loss_data": True}, "process_non_loss_data_func runs forward passes on the"),
        ({"adjust_tensor_shapes_fn": print}, "a function that adjusts tensor shapes"),
    ],
)
def test_refused_calls(options: dict[str, Any], message: str) -> None:
    schedule = PackedForwardBackward(lambda **_: None, arguments())
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


def get_batch(data_iterator: Any) -> Any:
    return next(data_iterator)


def step_of_five(data_iterator: Any, model: Any) -> Any:
    tokens, labels, loss_mask, attention_mask, position_ids = get_batch(data_iterator)
    return model(tokens, labels, loss_mask, attention_mask, position_ids)


def step_of_strangers(data_iterator: Any, model: Any) -> Any:
    tokens, labels, loss_mask, position_ids, packed_seq_params, images = get_batch(data_iterator)
    return model(tokens, labels, loss_mask, position_ids, packed_seq_params, images)


def step_that_keeps_a_dict(data_iterator: Any, model: Any) -> Any:
    batch = get_batch(data_iterator)
    return model(**batch)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (step_of_five, "lacks packed_seq_params"),
        (step_of_strangers, "has images"),
        (step_that_keeps_a_dict, r"does not unpack get_batch\(\.\.\.\) into names"),
    ],
)
def test_refused_scripts(step: Any, message: str) -> None:
    with pytest.raises(DynamicBatchArgumentError, match=message):
        fields_unpacked_by(step)
    with pytest.raises(DynamicBatchArgumentError, match=message):
        use_packed_batches(step)


def test_a_script_without_get_batch_is_refused() -> None:
    with pytest.raises(DynamicBatchArgumentError, match="has no get_batch in its module"):
        use_packed_batches(pytest.importorskip)


def test_fields_may_be_declared() -> None:
    names = ("tokens", "labels", "loss_mask", "position_ids", "packed_seq_params")
    check_fields(names, "here")
    with pytest.raises(DynamicBatchArgumentError, match="lacks labels"):
        check_fields(("tokens", "loss_mask", "position_ids", "packed_seq_params"), "here")


def test_a_stock_iterator_is_left_to_the_script() -> None:
    assert next_batch(iter([1]), 6) is None
    assert next_batch(None, 10) is None
