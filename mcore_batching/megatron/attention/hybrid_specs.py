"""The layers of a `HybridModel` without Transformer Engine, which Megatron's own spec is of.

Each has Megatron's local linear layers instead, `PackedAttention`, and a norm of its own.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import (
    TEColumnParallelLinear,
    TEDotProductAttention,
    TELayerNormColumnParallelLinear,
    TELinear,
    TENorm,
    TERowParallelLinear,
)
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mcore_batching.megatron import compat, cpu_emulation
from mcore_batching.megatron.attention.packed_attention import PackedAttention
from mcore_batching.megatron.attention.specs import SequenceParallelNorm, uses_transformer_engine
from mcore_batching.megatron.cpu_kernels import stand_in_for_kernels
from mcore_batching.megatron.errors import DynamicBatchArgumentError

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
        del unused, options
        raise DynamicBatchArgumentError(instead)


def _refused(instead: str) -> ModuleSpec:
    return ModuleSpec(module=_Refused, params={"instead": instead})


class _WholeLinear(torch.nn.Linear):
    """A projection of sparse attention's indexer, which all tensor-parallel ranks hold whole."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Callable[[Tensor], Any],
        bias: bool,
        **unused: Any,
    ) -> None:
        del unused
        super().__init__(input_size, output_size, bias, dtype=config.params_dtype)
        if config.perform_initialization:
            init_method(self.weight)

    def forward(self, inputs: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return super().forward(inputs), None


@functools.cache
def hybrid_spec() -> ModuleSpec:
    """The layers of a `HybridModel` for packed rows: ``packed_hybrid_stack_spec``.

    With Transformer Engine installed, Megatron's own spec, unchanged. Where Megatron has no
    `HybridModel`, one that raises when it is built.
    """
    if not compat.layers.has_hybrid_model():
        return _refused(
            "Megatron-LM has HybridModel from 0.18 on: install a later one, or build a GPTModel "
            "with packed_layer_spec(config)"
        )
    # Only here: versions before 0.18 have no such modules.
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec

    if uses_transformer_engine():
        return hybrid_stack_spec
    if cpu_emulation.is_enabled():
        stand_in_for_kernels()
    # The final norm is no part of the spec: the block builds it by this name.
    hybrid_block.TENorm = SequenceParallelNorm
    ours = _local(hybrid_stack_spec.submodules)
    if compat.layers.packs_sparse_attention():
        sparse = ours.dsa_layer.submodules.self_attention.submodules.core_attention
        for name in ("linear_wq_b", "linear_wk", "linear_weights_proj"):
            setattr(sparse.submodules.indexer.submodules, name, _WholeLinear)
    else:
        ours.dsa_layer = _refused(
            "DeepSeek sparse attention runs packed rows from Megatron-LM 0.19 on: install a later "
            "one, or set a --hybrid-layer-pattern without D"
        )
    # The number says only that there are experts: a layer takes its own from the configuration.
    experts = get_moe_module_spec(use_te=False, num_experts=1, moe_grouped_gemm=False)
    ours.moe_layer.submodules.mlp = experts
    return dataclasses.replace(hybrid_stack_spec, submodules=ours)


def _local(part: Any) -> Any:
    """A part of the spec with Transformer Engine's classes replaced."""
    for theirs, ours in _LOCAL:
        if part is theirs:
            return ours
    if isinstance(part, functools.partial):
        return functools.partial(part.func, **{k: _local(v) for k, v in part.keywords.items()})
    if isinstance(part, list):
        return [_local(each) for each in part]
    # A dataclass itself, named in a spec, is a leaf like any class; its instances are walked.
    if isinstance(part, type) or not dataclasses.is_dataclass(part):
        return part
    own = {each.name: getattr(part, each.name) for each in dataclasses.fields(part)}
    changes = {name: _local(value) for name, value in own.items()}
    # Transformer Engine's linear layers hold the norm before them: its spec has none of its own.
    for name, norm in _NORM_BEFORE.items():
        if isinstance(own.get(name), ModuleSpec | functools.partial):
            changes[norm] = SequenceParallelNorm
    replaced: Any = dataclasses.replace(part, **changes)  # type: ignore[type-var]
    return replaced
