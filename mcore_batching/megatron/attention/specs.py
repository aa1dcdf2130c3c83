"""Layer specs whose attention keeps the sequences of a packed row apart.

Transformer Engine's own spec does. Without it, `packed_layer_spec` takes Megatron's local spec with
`PackedAttention` in it and, under sequence parallelism, with norms whose gradients Megatron sums
over tensor-parallel ranks.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from megatron.core.transformer import transformer_block
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig

from mcore_batching.megatron import compat, cpu_emulation
from mcore_batching.megatron.attention.packed_attention import PackedAttention
from mcore_batching.megatron.errors import DynamicBatchArgumentError
from mcore_batching.megatron.topology import prediction_depths


def uses_transformer_engine() -> bool:
    """True if `packed_layer_spec` takes Transformer Engine's layers, and RoPE is to be fused."""
    # Unfused, packed rotary embeddings read the offsets back from the device in every layer.
    return compat.layers.HAVE_TRANSFORMER_ENGINE and not cpu_emulation.is_enabled()


def packed_layer_spec(config: TransformerConfig) -> ModuleSpec:
    """A GPT layer spec for packed rows, dense or mixture of experts.

    With Transformer Engine installed, Megatron's spec for it, unchanged. Without it, and on the CPU
    stand-in, Megatron's local spec, changed by `use_packed_attention`.
    """
    if uses_transformer_engine():
        from megatron.core.models.gpt.gpt_layer_specs import (
            get_gpt_layer_with_transformer_engine_spec,
        )

        return get_gpt_layer_with_transformer_engine_spec(
            num_experts=config.num_moe_experts,
            moe_grouped_gemm=config.moe_grouped_gemm,
            qk_layernorm=config.qk_layernorm,
            multi_latent_attention=config.multi_latent_attention,
        )
    return use_packed_attention(compat.layers.local_gpt_layer_spec(config), config)


def packed_mtp_block_spec(
    config: TransformerConfig, spec: ModuleSpec | None = None, vp_stage: int | None = None
) -> Any:
    """The ``mtp_block_spec`` of a `GPTModel` for packed rows.

    Args:
        config: the model's.
        spec: of the layer that it repeats; None: `packed_layer_spec`.
        vp_stage: number of the model chunk, where there are several.

    Returns:
        None where the model predicts one token alone, and on other stages than the last.
    """
    if not prediction_depths(config):
        return None
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    block = get_gpt_mtp_block_spec(
        config,
        packed_layer_spec(config) if spec is None else spec,
        use_transformer_engine=uses_transformer_engine(),
        vp_stage=vp_stage,
    )
    if block is not None and config.sequence_parallel and not uses_transformer_engine():
        norms = dict.fromkeys(("enorm", "hnorm", "layer_norm"), SequenceParallelNorm)
        for layer in block.layer_specs:
            layer.submodules = dataclasses.replace(layer.submodules, **norms)
    return block


def use_packed_attention(spec: ModuleSpec, config: TransformerConfig) -> ModuleSpec:
    """A copy of a local layer spec with `PackedAttention` as its core attention.

    Under ``config.sequence_parallel``, which Megatron's torch norms refuse, the layer norms are
    replaced as well, and so is the final norm of transformer blocks built from then on.
    """
    attention = spec.submodules.self_attention
    inner: dict[str, Any] = {"core_attention": PackedAttention}
    norms: dict[str, Any] = {}
    if config.sequence_parallel:
        transformer_block.LayerNormImpl = SequenceParallelNorm
        norms = dict.fromkeys(("input_layernorm", "pre_mlp_layernorm"), SequenceParallelNorm)
        for name in ("q_layernorm", "k_layernorm", "kv_layernorm"):
            if getattr(attention.submodules, name, None) is WrappedTorchNorm:
                inner[name] = SequenceParallelNorm
    inner = dataclasses.replace(attention.submodules, **inner)
    attention = dataclasses.replace(attention, submodules=inner)
    submodules = dataclasses.replace(spec.submodules, self_attention=attention, **norms)
    return dataclasses.replace(spec, submodules=submodules)


class SequenceParallelNorm:
    """Builds torch's LayerNorm or RMSNorm with parameters marked for sequence parallelism."""

    def __new__(
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any
    ) -> Any:
        """Return the torch module (never an instance of this class)."""
        del unused
        if config.layernorm_zero_centered_gamma:
            raise DynamicBatchArgumentError(
                "torch norms have no zero-centered gamma: unset --apply-layernorm-1p"
            )
        norms = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}
        if config.normalization not in norms:
            raise DynamicBatchArgumentError(
                f"normalization={config.normalization!r} has no torch norm: set --normalization "
                "to LayerNorm or RMSNorm"
            )
        # Not an instance of this class: the layer is to hold, and save, torch's own module.
        module = norms[config.normalization](hidden_size, eps=eps)
        # Each rank normalises its own tokens: Megatron adds up the gradients that carry this mark.
        for parameter in module.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return module
