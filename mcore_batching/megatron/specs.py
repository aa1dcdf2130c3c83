"""Layer specs, of GPT and of hybrid models, that keep the sequences of a packed row apart.

Transformer Engine's own do. Without it they are of Megatron's local layers with `PackedAttention`
and, under sequence parallelism, norms with gradients that Megatron sums over tensor-parallel ranks.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from megatron.core.extensions.transformer_engine import (
    HAVE_TE,
    TEColumnParallelLinear,
    TEDotProductAttention,
    TELayerNormColumnParallelLinear,
    TELinear,
    TENorm,
    TERowParallelLinear,
)
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import transformer_block
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from mcore_batching.megatron import compat, cpu_emulation
from mcore_batching.megatron.attention import PackedAttention
from mcore_batching.megatron.errors import DynamicBatchArgumentError
from mcore_batching.megatron.topology import prediction_depths

Spec = TypeVar("Spec", ModuleSpec, TransformerBlockSubmodules)
NO_HYBRID_MODEL = (
    "Megatron-LM has HybridModel from 0.18 on: install a later one, or build a GPTModel with "
    "packed_layer_spec(config)"
)


def uses_transformer_engine() -> bool:
    """True if `packed_layer_spec` takes Transformer Engine's layers, and RoPE is to be fused."""
    # Unfused, packed rotary embeddings read the offsets back from the device in every layer.
    return bool(HAVE_TE) and not cpu_emulation.is_enabled()


def packed_layer_spec(config: TransformerConfig) -> ModuleSpec:
    """A GPT layer spec for packed rows, dense or mixture of experts, the same for every layer.

    With Transformer Engine installed, Megatron's spec for it, unchanged. Without it, and on the CPU
    stand-in, Megatron's local spec, changed by `use_packed_attention`.

    Raises:
        DynamicBatchArgumentError: the configuration has layers of several kinds.
    """
    # The model would be built, of other layers than the configuration's.
    every, variant = config.moe_layer_freq, config.experimental_attention_variant
    if variant is not None:
        raise DynamicBatchArgumentError(
            f"packed_layer_spec has no experimental_attention_variant={variant}: give the model "
            "Megatron's block spec with Transformer Engine, or unset "
            "--experimental-attention-variant"
        )
    if config.num_moe_experts and every not in (1, [1] * config.num_layers):
        raise DynamicBatchArgumentError(
            f"packed_layer_spec makes all layers alike, not by moe_layer_freq={every}: give "
            "GPTModel and packed_mtp_block_spec get_gpt_decoder_block_spec(config, "
            "use_transformer_engine), through use_packed_attention without Transformer Engine"
        )
    shape = {
        "num_experts": config.num_moe_experts,
        "moe_grouped_gemm": config.moe_grouped_gemm,
        "qk_layernorm": config.qk_layernorm,
        "multi_latent_attention": config.multi_latent_attention,
    }
    if uses_transformer_engine():
        return get_gpt_layer_with_transformer_engine_spec(**shape)
    local = get_gpt_layer_local_spec(**shape, normalization=config.normalization)
    return use_packed_attention(local, config)


def packed_mtp_block_spec(
    config: TransformerConfig,
    spec: ModuleSpec | TransformerBlockSubmodules | None = None,
    vp_stage: int | None = None,
) -> Any:
    """The ``mtp_block_spec`` of a `GPTModel` for packed rows.

    Args:
        config: the model's.
        spec: of the layer that it repeats, or of a block: then it repeats the last layer; None:
            `packed_layer_spec`.
        vp_stage: number of the model chunk, where there are several.

    Returns:
        None where the model predicts one token alone, and on other stages than the last.
    """
    if not prediction_depths(config):
        return None
    block = get_gpt_mtp_block_spec(
        config,
        packed_layer_spec(config) if spec is None else spec,
        use_transformer_engine=uses_transformer_engine(),
        vp_stage=vp_stage,
    )
    needs_norms = config.sequence_parallel and not uses_transformer_engine()
    return _replaced(block, _NORMS) if needs_norms else block


def use_packed_attention(spec: Spec, config: TransformerConfig) -> Spec:
    """A copy of a local spec, of a layer or a block, with `PackedAttention` as core attention.

    Under ``config.sequence_parallel``, which Megatron's torch norms refuse, these are replaced as
    well, and so is the final norm of blocks built from then on.
    """
    classes: list[tuple[Any, Any]] = [(DotProductAttention, PackedAttention)]
    if config.sequence_parallel:
        transformer_block.LayerNormImpl = SequenceParallelNorm
        classes += _NORMS
    replaced: Spec = _replaced(spec, classes)
    return replaced


def _replaced(part: Any, classes: Sequence[tuple[Any, Any]], *, adds_norms: bool = False) -> Any:
    """A copy of a part of a spec with other classes; on request with the norms that Transformer
    Engine's linear layers hold, for which its spec has none."""
    for theirs, ours in classes:
        if part is theirs:
            return ours
    inner = functools.partial(_replaced, classes=classes, adds_norms=adds_norms)
    if isinstance(part, functools.partial):
        return functools.partial(part.func, **{k: inner(v) for k, v in part.keywords.items()})
    if isinstance(part, list):
        return [inner(each) for each in part]
    # A dataclass itself, named in a spec, is a leaf like any class; its instances are walked.
    if isinstance(part, type) or not dataclasses.is_dataclass(part):
        return part
    own = {each.name: getattr(part, each.name) for each in dataclasses.fields(part)}
    changes = {name: inner(value) for name, value in own.items()}
    for name, norm in _NORM_BEFORE.items() if adds_norms else ():
        if isinstance(own.get(name), ModuleSpec | functools.partial):
            changes[norm] = SequenceParallelNorm
    return dataclasses.replace(part, **changes)  # type: ignore[type-var]


class SequenceParallelNorm:
    """Builds torch's LayerNorm or RMSNorm with parameters marked for sequence parallelism."""

    # A class, since functions in a spec are handed on by Megatron without being called.
    def __new__(
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any
    ) -> Any:
        """Return the torch module (never an instance of this class)."""
        if config.layernorm_zero_centered_gamma:
            raise DynamicBatchArgumentError(
                "torch norms have no zero-centered gamma: unset --apply-layernorm-1p, or install "
                "Transformer Engine"
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


_NORMS = [(WrappedTorchNorm, SequenceParallelNorm)]
_LOCAL = (
    (TEColumnParallelLinear, ColumnParallelLinear),
    (TEDotProductAttention, PackedAttention),
    (TELayerNormColumnParallelLinear, ColumnParallelLinear),
    (TELinear, ColumnParallelLinear),
    (TENorm, SequenceParallelNorm),
    (TERowParallelLinear, RowParallelLinear),
)
"""Transformer Engine's classes, or what stands for them where it is missing, and the local ones."""
_NORM_BEFORE = {"self_attention": "input_layernorm", "mlp": "pre_mlp_layernorm", "mixer": "norm"}
"""The module that a layer runs, and the norm before it."""


class _Refused:
    """Raises when it is built."""

    def __init__(self, *unused: Any, instead: str, **options: Any) -> None:
        raise DynamicBatchArgumentError(instead)


def _refused(instead: str) -> ModuleSpec:
    return ModuleSpec(module=_Refused, params={"instead": instead})


@functools.cache
def hybrid_spec() -> ModuleSpec:
    """The layers of a `HybridModel` for packed rows: ``packed_hybrid_stack_spec``.

    With Transformer Engine installed, Megatron's own spec, unchanged. Where Megatron has no
    `HybridModel`, one that raises when it is built.
    """
    if not compat.has_hybrid_model():
        return _refused(NO_HYBRID_MODEL)
    # Only here: versions before 0.18 have no such modules.
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec

    if uses_transformer_engine():
        return hybrid_stack_spec
    # The final norm is no part of the spec: the block builds it by this name.
    hybrid_block.TENorm = SequenceParallelNorm
    ours = _replaced(hybrid_stack_spec.submodules, _LOCAL, adds_norms=True)
    ours.dsa_layer = _refused(
        "DeepSeek sparse attention runs packed rows from Megatron-LM 0.19 on, on Transformer "
        "Engine's layers: install both, or set a --hybrid-layer-pattern without D"
    )
    # The number means only that there are experts: a layer takes its own from the configuration.
    experts = get_moe_module_spec(use_te=False, num_experts=1, moe_grouped_gemm=False)
    ours.moe_layer.submodules.mlp = experts
    return dataclasses.replace(hybrid_stack_spec, submodules=ours)
