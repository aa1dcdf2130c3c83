"""Gradients that Megatron gets wrong, or not at all.

Packed or not, from 0.16 to main. Under tensor parallelism, of what all heads share:

- All heads of multi-latent attention share one rotary key. Each rank's heads send back their part
  of its gradient, and the parts are not added up: on Megatron's own layers, and without sequence
  parallelism on Transformer Engine's. With two ranks what makes the key was two thirds off.
- Without sequence parallelism every rank has the whole gradient of the norm of latent queries, and
  ``qk_layernorm`` has them added up as if it were a norm of heads: too large by the ranks.
- All heads of GatedDeltaNet share the norm of outputs. Without sequence parallelism each rank has
  the gradient of its own heads, and nothing adds them up: with two ranks 79 % off.

Under full recomputation, of adapters beside frozen weights: recomputed layers have no gradients
where their input needs none, as where the embedding is frozen.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.utils import get_model_config, unwrap_model

from mcore_batching.megatron import compat

_MARK = "_mcore_batching_mended"


def mend_gradients(chunks: list[Any]) -> None:
    """Let what heads share have the gradients of all ranks' heads, and adapters have theirs."""
    for chunk in chunks:
        if get_model_config(chunk).recompute_granularity == "full":
            _mend_recomputed(unwrap_model(chunk))
    for layer in (layer for chunk in chunks for layer in chunk.modules()):
        is_latent = getattr(layer, "linear_kv_down_proj", None) is not None
        is_delta_net = compat.layers.class_of_forward(layer).startswith("GatedDeltaNet")
        if not (is_latent or is_delta_net):
            continue
        # With one rank there is nothing to add up; a second hook would add it up twice.
        group, _ = compat.packed_rows.attention_groups(getattr(layer, "pg_collection", None))
        if group.size() == 1 or hasattr(layer, _MARK):
            continue
        setattr(layer, _MARK, True)
        if is_latent:
            _mend_latent(layer, group)
        elif not layer.config.sequence_parallel:
            for parameter in layer.out_norm.parameters():
                if parameter.requires_grad:
                    # Each rank's part times the ranks, whose mean is the sum.
                    parameter.register_hook(functools.partial(torch.mul, other=group.size()))
                    parameter.average_gradients_across_tp_domain = True


def _mend_recomputed(model: Any) -> None:
    embedding = getattr(model, "embedding", None)
    if embedding is None or hasattr(embedding, _MARK):
        return
    if not any(each.requires_grad for each in embedding.parameters()):
        setattr(embedding, _MARK, True)
        embedding.register_forward_hook(lambda module, inputs, output: output.requires_grad_())


def _mend_latent(layer: Any, group: dist.ProcessGroup) -> None:
    # The gradients of all heads come back through this output: the last place where they are apart
    # from the latent values'.
    layer.linear_kv_down_proj.register_forward_hook(
        functools.partial(_whole_keys, layer.config, group)
    )
    # Whole on every rank, so the sum that Megatron makes is to be a mean.
    if not layer.config.sequence_parallel and hasattr(layer, "q_layernorm"):
        for parameter in layer.q_layernorm.parameters():
            parameter.average_gradients_across_tp_domain = True


def _whole_keys(
    config: Any, group: dist.ProcessGroup, projection: Any, inputs: Any, output: Any
) -> tuple[Any, Any]:
    """Latent keys and the rotary key with all columns, as Transformer Engine's layer makes them."""
    keys, bias = output
    sizes = [config.kv_lora_rank, config.qk_pos_emb_head_dim]
    if keys.size(-1) != sum(sizes):  # a local layer has a slice of the columns on each rank
        keys = gather_from_tensor_model_parallel_region(keys, group=group)
        if config.sequence_parallel:
            keys = scatter_to_sequence_parallel_region(keys, group=group)
    if not config.sequence_parallel:
        latent, rotary = torch.split(keys, sizes, dim=-1)
        # Forward as it is; backward it adds up the gradients of all ranks' heads.
        rotary = copy_to_tensor_model_parallel_region(rotary, group=group)
        keys = torch.cat((latent, rotary), dim=-1)
    # Otherwise Megatron gathers the rotary key over the sequence next, whose backward adds up.
    return keys, bias
