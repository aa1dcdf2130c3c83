"""Keyword arguments of a model's forward pass: joined over samples, and masks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_attr_wrapped_model, get_model_config
from torch import Tensor

from mcore_batching.batch import PackedMicroBatch


def joined_multimodal_inputs(inputs: Sequence[Mapping[str, Tensor] | None]) -> dict[str, Tensor]:
    """Multimodal inputs of all samples, concatenated name by name.

    {"pixels": [2, 3]}, None, {"pixels": [1, 3]}  ->  {"pixels": [3, 3]}   (shapes)
    """
    gathered: dict[str, list[Tensor]] = {}
    for sample in inputs:
        # None for a sample without images, beside others that have some.
        for name, tensor in (sample or {}).items():
            gathered.setdefault(name, []).append(tensor)
    return {name: torch.cat(tensors) for name, tensors in gathered.items()}


def padding_mask(chunk: Any, row: PackedMicroBatch) -> Tensor:
    """Bool ``[1, tokens]``, True for padding; a placeholder is padding throughout."""
    model = get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True)
    # A first stage that scatters its input scatters the mask, too, and takes that of all tokens;
    # elsewhere a stage expects the mask of its own.
    # GPTModel does, HybridModel hands it on as it is.
    is_whole = bool(model.pre_process) and not hasattr(model, "hybrid_layer_pattern")
    return own_padding_mask(get_model_config(chunk), row, is_whole=is_whole)


def own_padding_mask(config: Any, row: PackedMicroBatch, *, is_whole: bool = False) -> Tensor:
    """`padding_mask` of the tokens that this tensor-parallel rank holds between layers."""
    mask = torch.ones_like(row.padding_mask) if row.is_placeholder else row.padding_mask
    if is_whole or not config.sequence_parallel:
        return mask
    rank = parallel_state.get_tensor_model_parallel_rank()
    size = parallel_state.get_tensor_model_parallel_world_size()
    own: Tensor = mask.chunk(size, dim=1)[rank].contiguous()
    return own
