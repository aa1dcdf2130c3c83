"""A small `GPTModel` or `HybridModel` as policy, its frozen copy, the optimizer, its scheduler."""

from __future__ import annotations

from typing import Any

import torch
from bootstrap import (
    build_model,
    pipeline_config,
)
from byte_tokens import VOCABULARY
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_model_config

from mcore_batching.megatron.specs import uses_transformer_engine
from mcore_batching.planning import ParallelDims

ATTENTION_HEADS = 4
KEY_VALUE_HEADS = 4


def build_policy_and_reference(
    dims: ParallelDims,
    *,
    num_layers: int,
    hidden_size: int,
    max_sequence_length: int,
    seed: int,
    hybrid_layer_pattern: str | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[list[Any], list[Any]]:
    """This rank's chunks of the policy, ready to train, and of its frozen copy.

    Args:
        dims: of the job.
        num_layers: over all pipeline stages.
        hidden_size: of the residual stream.
        max_sequence_length: longest sample, in tokens.
        seed: of the initial weights; the same seed and layout give the same weights.
        hybrid_layer_pattern: the layers of a `HybridModel`; None: a `GPTModel`.
        dtype: of weights, activations and gradients.

    Returns:
        policy, wrapped in Megatron's DDP; reference, bare.
    """
    # Stages draw different weights, tensor-parallel ranks their parts of the same.
    stage_seed = seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    torch.manual_seed(stage_seed)
    tensor_parallel.model_parallel_cuda_manual_seed(stage_seed)
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "max_sequence_length": max_sequence_length,
        "hybrid_layer_pattern": hybrid_layer_pattern,
    }
    more = {"params_dtype": dtype, "pipeline_dtype": dtype}
    if hybrid_layer_pattern is not None:
        more |= _state_space_settings(hidden_size)
    torch.set_default_dtype(dtype)  # of which Megatron builds norms
    config, frozen = (_transformer_config(dims, num_layers, hidden_size, more) for _ in range(2))
    policy = build_model(
        config, ddp=DistributedDataParallelConfig(grad_reduce_in_fp32=False), **shape
    )
    reference = build_model(frozen, wrap=False, **shape)
    torch.set_default_dtype(torch.float32)
    copy_weights(policy, reference)
    for chunk in reference:
        chunk.requires_grad_(False)
    return policy, reference


def copy_weights(policy: list[Any], reference: list[Any]) -> None:
    """Copy the policy's weights into the reference."""
    for source, chunk in zip(policy, reference, strict=True):
        chunk.load_state_dict(source.module.state_dict())


def build_adam(policy: list[Any], learning_rate: float) -> Any:
    """Megatron's Adam over the policy, gradients clipped to norm 1 if they are float32."""
    is_float32 = get_model_config(policy[0]).params_dtype is torch.float32
    config = OptimizerConfig(
        optimizer="adam",
        lr=learning_rate,
        min_lr=0.0,
        weight_decay=0.0,
        adam_beta1=0.9,
        adam_beta2=0.95,
        # With Adam's usual 1e-8 the first updates are signs of gradients, and the rounding of a
        # gradient near zero becomes a difference of twice the learning rate.
        adam_eps=1e-5,
        clip_grad=1.0 if is_float32 else 0.0,  # Megatron clips no others
    )
    return get_megatron_optimizer(config, policy)


def build_scheduler(optimizer: Any, decay_style: str, num_samples: int) -> OptimizerParamScheduler:
    """Megatron's scheduler: from the optimizer's learning rate to 0, unless it is constant.

    Args:
        optimizer: from `build_adam`.
        decay_style: as in Megatron's ``--lr-decay-style``.
        num_samples: of the whole job, as its steps count them.
    """
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=optimizer.param_groups[0]["max_lr"],
        min_lr=0.0,
        lr_warmup_steps=0,
        lr_decay_steps=num_samples,
        lr_decay_style=decay_style,
        start_wd=0.0,
        end_wd=0.0,
        wd_incr_steps=num_samples,
        wd_incr_style="constant",
    )


def _state_space_settings(hidden_size: int) -> dict[str, Any]:
    """Of a hybrid model: Mamba and GatedDeltaNet layers have heads as large as attention's."""
    head = hidden_size // ATTENTION_HEADS
    return {
        "is_hybrid_model": True,
        "activation_func": torch.nn.functional.silu,
        "mamba_head_dim": head,
        "mamba_num_groups": ATTENTION_HEADS,
        "mamba_state_dim": head,
        "linear_num_key_heads": ATTENTION_HEADS,
        "linear_num_value_heads": ATTENTION_HEADS,
        "linear_key_head_dim": head,
        "linear_value_head_dim": head,
    }


def _transformer_config(
    dims: ParallelDims, num_layers: int, hidden_size: int, more: dict[str, Any]
) -> TransformerConfig:
    return TransformerConfig(
        num_layers=num_layers,
        hidden_size=hidden_size,
        ffn_hidden_size=4 * hidden_size,
        num_attention_heads=ATTENTION_HEADS,
        num_query_groups=KEY_VALUE_HEADS,
        normalization="RMSNorm",
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        # Kernels that come with Apex or Transformer Engine.
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=uses_transformer_engine(),
        # Gradients are divided by the tokens of the step, not averaged over micro-batches.
        calculate_per_token_loss=True,
        **more,
        **pipeline_config(dims),
    )
