"""Kinds of layers, what they can run, and their specs."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from typing import Any

from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec

try:
    import transformer_engine  # noqa: F401

    HAVE_TRANSFORMER_ENGINE = True
except ImportError:
    HAVE_TRANSFORMER_ENGINE = False


def is_engines_attention(module: Any) -> bool:
    """True if a module is Megatron's wrapper of Transformer Engine's attention."""
    if not HAVE_TRANSFORMER_ENGINE:
        return False
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    return isinstance(module, TEDotProductAttention)


def class_of_forward(layer: Any) -> str:
    """Name of the Megatron class whose forward pass a layer runs; empty where it is another's."""
    forward = type(layer).forward
    if not str(getattr(forward, "__module__", "")).startswith("megatron.core."):
        return ""
    return str(forward.__qualname__.partition(".")[0])


def has_hybrid_model() -> bool:
    """True if this Megatron has `HybridModel` (from 0.18 on)."""
    return importlib.util.find_spec("megatron.core.models.hybrid") is not None


def scatters_padding_mask(model: Any) -> bool:
    """True if a model's first stage scatters its padding mask under sequence parallelism."""
    # GPTModel does, HybridModel hands it on as it is.
    return bool(model.pre_process) and not hasattr(model, "hybrid_layer_pattern")


def packs_gated_delta_net(layer: Any) -> bool:
    """True if this Megatron's GatedDeltaNet runs packed rows (from 0.18 on)."""
    return hasattr(layer, "_resolve_cu_seqlens")


def packs_sparse_attention() -> bool:
    """True if this Megatron's DeepSeek sparse attention runs packed rows (from 0.19 on)."""
    from megatron.core.transformer import experimental_attention_variant

    name = f"{experimental_attention_variant.__name__}.dsa_layout"
    return importlib.util.find_spec(name) is not None


def what_mamba_lacks(context_parallel: int) -> str:
    """The packages that Mamba layers lack to run packed rows; empty if none."""
    from megatron.core.ssm import mamba_context_parallel, mamba_mixer

    check = mamba_mixer._check_mamba_sequence_packing_support
    is_there, lacks = check(for_inference_not_training=False)
    if not is_there:
        return f"more than is installed: {lacks}"
    mend = "install it, or set --context-parallel-size 1"
    if context_parallel > 1 and mamba_context_parallel.tex is None:
        return f"Transformer Engine under context parallelism: {mend}"
    return ""


def why_no_plain_product(layer: Any) -> str:
    """Differences of an output layer from the product with its weight; empty if there are none."""
    if type(layer) is not ColumnParallelLinear:
        return f"is a {type(layer).__name__}"
    if layer.bias is not None:
        return "has a bias"
    if layer.gather_output:
        return "gathers its output (parallel_output=False)"
    if getattr(layer, "gtp_remat_size", 1) > 1:  # from 0.19 on
        return "gathers its weight (generalized tensor parallelism)"
    return ""


def gpt_layer_spec(config: Any, *, use_transformer_engine: bool) -> ModuleSpec:
    """Megatron's own layer spec for this model's shape, with or without Transformer Engine."""
    from megatron.core.models.gpt import gpt_layer_specs as specs

    engines, local = (
        specs.get_gpt_layer_with_transformer_engine_spec,
        specs.get_gpt_layer_local_spec,
    )
    make = engines if use_transformer_engine else local
    options = {
        "num_experts": config.num_moe_experts,
        "moe_grouped_gemm": config.moe_grouped_gemm,
        "qk_layernorm": config.qk_layernorm,
        "multi_latent_attention": config.multi_latent_attention,
        "normalization": config.normalization,  # Transformer Engine's layers read it themselves
    }
    known = inspect.signature(make).parameters
    return make(**{k: v for k, v in options.items() if k in known})
