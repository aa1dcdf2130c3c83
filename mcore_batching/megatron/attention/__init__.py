"""Attention over packed rows without Transformer Engine, and layer specs with it."""

from mcore_batching.megatron.attention.packed_attention import PackedAttention
from mcore_batching.megatron.attention.specs import (
    packed_layer_spec,
    use_packed_attention,
    uses_transformer_engine,
)

__all__ = [
    "PackedAttention",
    "packed_layer_spec",
    "use_packed_attention",
    "uses_transformer_engine",
]
