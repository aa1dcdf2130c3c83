"""Layers that would mix the samples of packed rows, or raise in mid-forward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.utils import get_model_config

from mcore_batching.megatron import compat
from mcore_batching.megatron.errors import one_of_each_problem
from mcore_batching.planning import ParallelDims

_LATER = "install a later one, or a model without (--experimental-attention-variant)"


def layer_problems(chunks: list[Any], dims: ParallelDims, *, pads_rows: bool) -> list[str]:
    """Reasons why layers cannot run packed rows, one of each kind, with the setting that mends it.

    ``pads_rows`` says that samples, or rows, are padded.
    """
    found = (
        (name, _problem(layer, get_model_config(chunk), dims.context_parallel, pads_rows))
        for chunk in chunks
        for name, layer in chunk.named_modules()
    )
    problems = one_of_each_problem((name, problem) for name, problem in found if problem)
    return [*problems, *_gradients_of_experts(chunks)]


def _problem(layer: Any, config: Any, context_parallel: int, pads_rows: bool) -> str:
    # Of the class that runs: a subclass with a forward pass of its own may well know packed rows.
    runs = compat.layers.class_of_forward(layer)
    # Not isinstance, likewise.
    if type(layer) is DotProductAttention:
        return (
            "is Megatron's local DotProductAttention, which mixes packed samples: build the model "
            "with mcore_batching.megatron.packed_layer_spec(config), or Transformer Engine's spec"
        )
    if runs.startswith("GatedDeltaNet"):
        if not compat.layers.packs_gated_delta_net(layer):
            return f"is a GatedDeltaNet, which runs packed rows from Megatron-LM 0.18 on: {_LATER}"
        if config.deterministic_mode:
            return (
                "is a GatedDeltaNet, not deterministic on packed rows: unset --deterministic-mode"
            )
        if layer.activation not in ("silu", "swish"):
            return (
                f"is a GatedDeltaNet with {layer.activation}, whose kernel has silu alone: set "
                "--swiglu (activation_func=torch.nn.functional.silu)"
            )
    if runs == "DSAttention":
        if not compat.layers.packs_sparse_attention():
            return f"is sparse attention, which runs packed rows from Megatron-LM 0.19 on: {_LATER}"
        if config.dsa_indexer_loss_coeff and pads_rows:
            return (
                "has an indexer loss, in which padding would count: set "
                "dsa_indexer_loss_coeff=0, or pad neither samples nor rows"
            )
    if runs == "MultimodalRotaryEmbedding" and context_parallel > 1:
        return (
            "cuts positions that are cut for context-parallel ranks already: set "
            "--context-parallel-size 1 with --position-embedding-type mrope"
        )
    # Its state runs on from token to token: it must end with each sample.
    lacks = compat.layers.what_mamba_lacks(context_parallel) if runs == "MambaMixer" else ""
    return f"is a Mamba layer, and packed rows need {lacks}" if lacks else ""


def _gradients_of_experts(chunks: list[Any]) -> Iterator[str]:
    """Experts that tensor-parallel ranks all hold, and whose gradients they do not add up."""
    # With as many expert- as tensor-parallel ranks each holds a part, and adds up nothing.
    config = get_model_config(chunks[0])
    size = config.tensor_model_parallel_size
    if not config.num_moe_experts or config.expert_tensor_parallel_size == size:
        return
    for name, parameter in ((n, p) for chunk in chunks for n, p in chunk.named_parameters()):
        # True: Megatron adds it up over the data-parallel ranks that parameters of all layers have.
        if ".mlp.experts." in name and getattr(parameter, "allreduce", True):
            yield (
                f"before 0.19 megatron-core leaves gradients of {name} apart on tensor-parallel "
                f"ranks: set --expert-tensor-parallel-size {size}, or --expert-model-parallel-size "
                "above 1"
            )
            return
