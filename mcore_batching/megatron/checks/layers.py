"""Layers that would mix the samples of packed rows or raise in mid-forward, and layers for which
stock Megatron computes wrong gradients, packed or not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention
from megatron.core.utils import get_model_config, unwrap_model

from mcore_batching.megatron import compat
from mcore_batching.megatron.errors import one_of_each_problem
from mcore_batching.planning import ParallelDims

_EXCHANGES = {"p2p": (0, 0), "a2a": (2, 10), "all_gather": (2, 18), "a2a+p2p": (2, 19)}
"""By ``cp_comm_type`` the first Transformer Engine that exchanges a packed row's keys."""
_TO_NOW = "of which Megatron (0.16 to 0.19) computes wrong"
_LATER = "install a later one, or a model without (--experimental-attention-variant)"


def layer_problems(
    chunks: list[Any], dims: ParallelDims, *, pads_rows: bool, row_ranks: int | None = None
) -> list[str]:
    """Reasons why layers cannot run packed rows, one of each kind, with the setting that mends it.

    Args:
        chunks: this rank's model chunks.
        dims: of the job.
        pads_rows: samples, or rows, are padded.
        row_ranks: most ranks that share a row; None: the context-parallel ones.
    """
    row_ranks = row_ranks or dims.context_parallel
    found = (
        (name, problem)
        for chunk in chunks
        for name, layer in chunk.named_modules()
        for problem in (
            _problem(layer, get_model_config(chunk), dims.context_parallel, pads_rows),
            _wrong_gradient(layer, dims),
            *_engine_problems(layer, get_model_config(chunk), row_ranks),
        )
    )
    problems = one_of_each_problem((name, problem) for name, problem in found if problem)
    return [*problems, *_gradients_of_experts(chunks), *_recomputed_adapters(chunks)]


def _problem(layer: Any, config: Any, context_parallel: int, pads_rows: bool) -> str:
    # The class that runs counts: a subclass with a forward pass of its own may handle packed rows.
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
                f"is a GatedDeltaNet with {layer.activation}; its kernel has silu alone: set "
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


def _engine_problems(layer: Any, config: Any, row_ranks: int) -> Iterator[str]:
    """What Transformer Engine's attention lacks for packed rows; it asserts in the first step,
    while the other stages wait. Read in its releases 2.9 to 2.19."""
    if not compat.layers.is_engines_attention(layer):
        return
    version, cudnn = compat.layers.engine_versions()
    engine = f"Transformer Engine {'.'.join(map(str, version))}"
    mend = "build the model with mcore_batching.megatron.packed_layer_spec(config)"
    softmax = config.softmax_type
    if softmax != "vanilla" and (version < (2, 12) or cudnn < (9, 18)):
        yield (
            f"has softmax_type {softmax}, which packed rows have from Transformer Engine 2.12 with "
            f"cuDNN 9.18 on, not in {engine} with cuDNN {'.'.join(map(str, cudnn))}: install these,"
            f" or {mend}"
        )
    if row_ranks == 1:
        return
    exchange = layer.cp_comm_type or "p2p"
    is_windowed = layer.window_size not in (None, (-1, 0), (-1, -1))
    if version < _EXCHANGES.get(exchange, (0, 0)):
        since = ".".join(map(str, _EXCHANGES[exchange]))
        yield (
            f"exchanges packed rows by {exchange} from Transformer Engine {since} on, not in "
            f"{engine}: set --cp-comm-type p2p"
        )
    if is_windowed and exchange not in ("a2a", "all_gather"):
        yield (
            f"has a window, which context-parallel ranks do not have under {exchange}: set "
            f"--cp-comm-type a2a with Transformer Engine 2.10 or later, or {mend}"
        )
    if softmax != "vanilla" and exchange != "a2a":
        yield (
            f"has softmax_type {softmax}, which context-parallel ranks do not have under "
            f"{exchange}: set --cp-comm-type a2a, or {mend}"
        )
    if config.multi_latent_attention and version < (2, 15) and exchange in ("a2a", "all_gather"):
        yield (
            f"is multi-latent, which {engine} does not exchange by {exchange}: set --cp-comm-type "
            "p2p"
        )
    if config.fp8 and (config.fp8_dot_product_attention or config.fp8_multi_head_attention):
        yield (
            "computes in FP8, which no Transformer Engine does for packed rows of context-parallel "
            "ranks: unset --fp8-dot-product-attention and --fp8-multi-head-attention"
        )


def _wrong_gradient(layer: Any, dims: ParallelDims) -> str:
    """Weights that all heads share, if tensor-parallel ranks do not add up their gradients."""
    if dims.tensor_parallel == 1:
        return ""
    if isinstance(layer, MultiLatentAttention):
        # All heads share one rotary key, and each rank has the gradient of its own heads.
        projection = getattr(layer, "linear_kv_down_proj", None)
        columns = layer.config.kv_lora_rank + layer.config.qk_pos_emb_head_dim
        if projection is not None and projection.weight.shape[0] != columns:
            return (
                f"is multi-latent attention of Megatron's local layers, {_TO_NOW} gradients under "
                "tensor parallelism: set --tensor-model-parallel-size 1, or build the model with "
                "Transformer Engine's spec and set --sequence-parallel"
            )
        if not dims.sequence_parallel:
            return (
                f"is multi-latent attention, {_TO_NOW} gradients under tensor parallelism without "
                "sequence parallelism: set --sequence-parallel"
            )
    runs = compat.layers.class_of_forward(layer)
    if runs.startswith("GatedDeltaNet") and not dims.sequence_parallel:
        return (
            f"is a GatedDeltaNet, {_TO_NOW} gradients of its output norm under tensor parallelism "
            "without sequence parallelism: set --sequence-parallel"
        )
    return ""


def _recomputed_adapters(chunks: list[Any]) -> Iterator[str]:
    """Fully recomputed layers that get no gradient, as their input needs none."""
    for chunk in chunks:
        model = unwrap_model(chunk)
        embedding = getattr(model, "embedding", None)
        if embedding is None or get_model_config(chunk).recompute_granularity != "full":
            continue
        frozen = not any(each.requires_grad for each in embedding.parameters())
        trained = any(each.requires_grad for each in model.decoder.parameters())
        # A hook, or a decoder that was given another forward pass, may well set it.
        is_set = embedding._forward_hooks or "forward" in vars(model.decoder)
        if frozen and trained and not is_set:
            yield (
                "full recomputation leaves layers behind a frozen embedding without gradients "
                "(Megatron 0.16 to 0.19): set --recompute-granularity selective, or let the "
                "embedding's output require a gradient: model.embedding.register_forward_hook("
                "lambda module, inputs, output: output.requires_grad_())"
            )
            return


def _gradients_of_experts(chunks: list[Any]) -> Iterator[str]:
    """Experts that all tensor-parallel ranks hold, without adding up their gradients."""
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
