"""Arguments of stock scripts that are refused, each by its message; several at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mcore_batching.integrations.megatron_lm import check_arguments
from mcore_batching.megatron import DynamicBatchArgumentError


def arguments(**changes: Any) -> SimpleNamespace:
    """Megatron's arguments as far as they are looked at, without a problem."""
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
        ({"reset_attention_mask": True}, "needs --reset-position-ids"),
        ({"iterations_to_skip": [3]}, "--iterations-to-skip draws batches of a fixed size"),
        ({"logits_load_dir": "/somewhere"}, "unset --logits-load-dir"),
        ({"modelopt_enabled": True}, "ModelOpt expects rows of seq_length"),
        ({"perform_rl_step": True}, "unset --perform-rl-step"),
        ({"dynamic_batch_share_prefixes": True}, "unset --dynamic-batch-share-prefixes"),
        (
            {"moe_expert_rank_capacity_factor": 1.0},
            "unset --moe-expert-rank-capacity-factor",
        ),
        ({"reuse_grad_buf_for_mxfp8_param_ag": True}, "--reuse-grad-buf-for-mxfp8-param-ag"),
        ({"max_tokens_per_gpu": None}, "set --max-tokens-per-gpu"),
        ({"max_tokens_per_gpu": 0}, "--max-tokens-per-gpu must be"),
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
    with pytest.raises(DynamicBatchArgumentError, match="-context-parallel do nothing alone: set"):
        check_arguments(arguments(use_dynamic_batch_size=False, dynamic_batch_exchange=True))
