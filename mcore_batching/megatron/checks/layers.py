"""Models that packed rows cannot run on: layers that would mix samples or raise in mid-forward,
layers for which stock Megatron computes wrong gradients, packed or not, and layers that dynamic CP,
shared prefixes or multi-token prediction cannot do with.

Each refusal names what to set instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron.core.transformer.attention import Attention, SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import get_model_config, unwrap_model

from mcore_batching.flags import FLAGS
from mcore_batching.megatron import compat
from mcore_batching.megatron.attention import CAUSAL, PackedAttention
from mcore_batching.megatron.errors import DynamicBatchArgumentError, one_of_each_problem, refuse
from mcore_batching.megatron.prefix_attention import why_no_branches
from mcore_batching.megatron.topology import prediction_depths
from mcore_batching.planning import ParallelDims

_EXCHANGES = {"p2p": (0, 0), "a2a": (2, 10), "all_gather": (2, 18), "a2a+p2p": (2, 19)}
"""By ``cp_comm_type`` the first Transformer Engine that exchanges a packed row's keys."""
_TO_NOW = "of which Megatron (0.16 to 0.19) computes wrong"
_LATER = "install a later one, or a model without (--experimental-attention-variant)"
_DYNAMIC_CP = FLAGS["max_context_parallel"]
_SHARE_PREFIXES = FLAGS["share_prefixes"]
_STATE_SPACE_LAYERS = ("MambaMixer", "GatedDeltaNet", "GatedDeltaNet2", "GatedDeltaProductMixer")
# Others slice by the group that Megatron began with, whatever the row's.
_POSITIONS_OF_SHARED_ROWS = ("rope", "learned_absolute", "none")


def layer_problems(
    chunks: list[Any], dims: ParallelDims, *, pads_rows: bool, row_ranks: int | None = None
) -> list[str]:
    """Reasons why layers cannot run packed rows, one of each kind, with the setting that mends it.

    ``pads_rows``: samples, or rows, are padded; ``row_ranks``: most ranks that share a row, by
    default the context-parallel ones.
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
    runs = compat.class_of_forward(layer)
    # Not isinstance, likewise.
    if type(layer) is DotProductAttention:
        return (
            "is Megatron's local DotProductAttention, which mixes packed samples: build the model "
            "with mcore_batching.megatron.packed_layer_spec(config), or Transformer Engine's spec"
        )
    if runs.startswith("GatedDeltaNet"):
        if not compat.packs_gated_delta_net(layer):
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
        if not compat.packs_sparse_attention():
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
    lacks = compat.what_mamba_lacks(context_parallel) if runs == "MambaMixer" else ""
    return f"is a Mamba layer, and packed rows need {lacks}" if lacks else ""


def _engine_problems(layer: Any, config: Any, row_ranks: int) -> Iterator[str]:
    """List what Transformer Engine's attention lacks for packed rows: it asserts in the first step,
    while the other stages wait. Read in its releases 2.9 to 2.19."""
    if not compat.is_engines_attention(layer):
        return
    version, cudnn = compat.engine_versions()
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
    runs = compat.class_of_forward(layer)
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


def let_rows_have_groups(chunks: list[Any]) -> None:
    """Let every attention layer follow the row's context-parallel group, or refuse the model."""
    for chunk in chunks:
        positions = getattr(unwrap_model(chunk), "position_embedding_type", "of an unknown kind")
        if positions not in _POSITIONS_OF_SHARED_ROWS:
            raise DynamicBatchArgumentError(
                f"position embeddings {positions} slice by a fixed context-parallel group: set "
                f"--position-embedding-type rope, or unset {_DYNAMIC_CP}"
            )
        for name, module in chunk.named_modules():
            if compat.class_of_forward(module) in _STATE_SPACE_LAYERS:
                raise DynamicBatchArgumentError(
                    f"{name} is a state-space layer of a fixed parallel group: unset {_DYNAMIC_CP}"
                )
            router = getattr(getattr(module, "mlp", None), "router", None)
            if isinstance(module, TransformerLayer) and router is not None:
                compat.let_router_have_groups(module, router)
            if not isinstance(module, Attention):
                continue
            core = module.core_attention
            known = isinstance(core, PackedAttention) or compat.is_engines_attention(core)
            # Not isinstance: a subclass may well slice by itself.
            if type(module) is not SelfAttention or not known:
                raise DynamicBatchArgumentError(
                    f"{name}, a {type(module).__name__} with {type(core).__name__}, is not known "
                    f"to follow a row's own group: unset {_DYNAMIC_CP}, or build the model with "
                    "mcore_batching.megatron.packed_layer_spec(config)"
                )
            compat.let_rows_have_groups(module)


_POSITIONS = ("rope", "mrope", "yarn", "learned_absolute", "none")
"""Embeddings by a token's place alone. YaRN and RoPE's scalings read configured lengths."""


def check_shared_prefixes(chunks: list[Any]) -> None:
    """Refuse models that cannot share tokens among samples."""
    refuse(_SHARE_PREFIXES, sharing_problems(chunks))


def check_branches(chunks: list[Any], spare: int) -> None:
    """Refuse models that cannot run rows with branches, as they were planned for another model.

    ``spare``: tokens that shared nodes end short for labels of multi-token prediction.
    """
    reason = why_no_branches(chunks)
    depths = prediction_depths(get_model_config(chunks[0]))
    is_trained = any(chunk.training for chunk in chunks)
    problems = []
    if reason:
        problems.append(f"{reason}: give get_data_iterator this model, or unset {_SHARE_PREFIXES}")
    if is_trained and depths > spare:
        problems.append(
            f"it predicts {depths} further tokens, and the rows were planned for {spare}: give "
            "get_data_iterator this model"
        )
    refuse(_SHARE_PREFIXES, problems)


def sharing_problems(chunks: list[Any]) -> Iterator[str]:
    """Why samples of a model cannot share tokens, each with the setting that mends it."""
    config = get_model_config(chunks[0])
    is_trained = any(chunk.training for chunk in chunks)  # evaluation drops nothing
    for name in ("hidden_dropout", "attention_dropout"):
        if is_trained and getattr(config, name):
            flag = f"--{name.replace('_', '-')}"
            yield (
                f"samples that share tokens would share dropout: set {flag} 0, or unset "
                f"{_SHARE_PREFIXES}"
            )
    for chunk in chunks:
        positions = getattr(unwrap_model(chunk), "position_embedding_type", "of an unknown kind")
        if positions not in _POSITIONS:
            yield (
                f"position embeddings {positions} are not known to go by a token's place alone: "
                f"set --position-embedding-type rope, or unset {_SHARE_PREFIXES}"
            )
        rotary = getattr(unwrap_model(chunk), "rotary_pos_emb", None)
        if rotary is not None and not type(rotary).__module__.startswith("megatron.core."):
            kind = type(rotary).__name__
            yield f"rotary embeddings {kind} may go by a sample's length: unset {_SHARE_PREFIXES}"
        yield from one_of_each_problem(
            (
                name,
                f"lets tokens see later ones (attn_mask_type {module.attn_mask_type.name}): build "
                f"the model with AttnMaskType.causal, or unset {_SHARE_PREFIXES}",
            )
            for name, module in chunk.named_modules()
            if isinstance(getattr(module, "attn_mask_type", None), AttnMaskType)
            and module.attn_mask_type not in CAUSAL
        )


def multi_token_problems(config: Any) -> Iterator[str]:
    """Why a configuration's multi-token prediction cannot run, with the setting that mends it."""
    if not prediction_depths(config):
        return
    lacks = compat.what_multi_token_prediction_lacks()
    if lacks:
        yield f"multi-token prediction {lacks}: unset --mtp-num-layers"
    if getattr(config, "mtp_standalone", False):
        # It would send the next stage several rows at once.
        yield (
            "multi-token prediction has a stage of its own: put its layers on the last stage "
            "(--pipeline-model-parallel-layout)"
        )
    is_recomputed = config.recompute_granularity == "full" and config.recompute_method == "uniform"
    if is_recomputed and not compat.recomputes_multi_token_rows():
        yield (
            "multi-token prediction of packed rows is recomputed from Megatron-LM 0.19 on: set "
            "--recompute-granularity selective"
        )
    if getattr(config, "mtp_hsm", False):
        yield "random draws of mixed hidden states follow the packing: unset --mtp-hsm"


def unfit_for_later_tokens(chunks: list[Any]) -> Iterator[str]:
    """Why a model with depths of prediction lacks their layers, or would train wrongly."""
    config = get_model_config(chunks[0])
    if not prediction_depths(config):
        return
    for chunk in map(unwrap_model, chunks):
        if getattr(chunk, "post_process", False) and not hasattr(chunk, "mtp"):
            yield (
                "the model has no layers for multi-token prediction: build a GPTModel with "
                "mtp_block_spec=packed_mtp_block_spec(config), a HybridModel with a / in its "
                "--hybrid-layer-pattern, or unset --mtp-num-layers"
            )
    # The first stage embeds tokens, the last one later tokens.
    if config.pipeline_model_parallel_size == 1:
        return
    model = unwrap_model(chunks[0])
    overlaps = getattr(getattr(chunks[0], "ddp_config", None), "overlap_grad_reduce", False)
    # Weights without a gradient, for which Megatron waits: it asserts in the second step. With this
    # function later stages reduce when it is called, whatever gradients they have.
    if overlaps and config.grad_sync_func is None:
        mend = "set --align-grad-reduce (config.grad_sync_func), unset --overlap-grad-reduce or"
        lacks = "without the gradient that overlapped reduction waits for"
        if getattr(model, "share_embeddings_and_output_weights", False):
            # The layer reads later tokens' embedding instead of its own weight.
            yield (
                f"tied embeddings leave the last stage's output layer {lacks}: {mend} "
                "set --untie-embeddings-and-output-weights"
            )
        elif getattr(config, "mtp_detach_heads", False):
            yield (
                f"detached heads leave the last stage's embedding {lacks}: {mend} "
                "unset --mtp-detach-heads"
            )
    if getattr(model, "position_embedding_type", None) == "learned_absolute":
        # The first stage has one, and the last stage one for later tokens.
        yield (
            "Megatron-LM leaves gradients of two stages' position embeddings apart: set "
            "--position-embedding-type rope"
        )
