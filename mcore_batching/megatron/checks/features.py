"""Models that dynamic CP, shared prefixes and multi-token prediction cannot run on.

Each refusal names what to set instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron.core.transformer.attention import Attention, SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.utils import get_model_config, unwrap_model

from mcore_batching.flags import FLAGS
from mcore_batching.megatron import compat
from mcore_batching.megatron.attention import CAUSAL, PackedAttention
from mcore_batching.megatron.errors import DynamicBatchArgumentError, one_of_each_problem, refuse
from mcore_batching.megatron.prefix_attention import why_no_branches
from mcore_batching.megatron.topology import prediction_depths
from mcore_batching.planning import PlannerConfig

_DYNAMIC_CP = FLAGS["max_context_parallel"]
_SHARE_PREFIXES = FLAGS["share_prefixes"]
_STATE_SPACE_LAYERS = ("MambaMixer", "GatedDeltaNet", "GatedDeltaNet2", "GatedDeltaProductMixer")
# Others slice by the group that Megatron began with, whatever the row's.
_POSITIONS_OF_SHARED_ROWS = ("rope", "learned_absolute", "none")


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
            if compat.layers.class_of_forward(module) in _STATE_SPACE_LAYERS:
                raise DynamicBatchArgumentError(
                    f"{name} is a state-space layer of a fixed parallel group: unset {_DYNAMIC_CP}"
                )
            if not isinstance(module, Attention):
                continue
            core = module.core_attention
            known = isinstance(core, PackedAttention) or compat.layers.is_engines_attention(core)
            # Not isinstance: a subclass may well slice by itself.
            if type(module) is not SelfAttention or not known:
                raise DynamicBatchArgumentError(
                    f"{name}, a {type(module).__name__} with {type(core).__name__}, is not known "
                    f"to follow a row's own group: unset {_DYNAMIC_CP}, or build the model with "
                    "mcore_batching.megatron.packed_layer_spec(config)"
                )
            compat.packed_rows.let_rows_have_groups(module)


def shared_row_problems(
    config: Any, planner: PlannerConfig, *, has_auxiliary_loss: bool
) -> Iterator[str]:
    """Settings that do not go with a context-parallel size for every row."""
    if planner.max_context_parallel is None:
        return
    # Megatron divides by ranks or by micro-batches, which rows of several sizes count unevenly.
    if not config.calculate_per_token_loss:
        yield (
            f"under {_DYNAMIC_CP} Megatron averages over a fixed number of ranks: set "
            "--calculate-per-token-loss"
        )
    if has_auxiliary_loss:
        yield (
            "auxiliary losses of experts have a fixed context-parallel group: set "
            f"--moe-aux-loss-coeff 0 and no --moe-z-loss-coeff, or unset {_DYNAMIC_CP}"
        )


_POSITIONS = ("rope", "mrope", "yarn", "learned_absolute", "none")
"""Embeddings by a token's place alone. YaRN and RoPE's scalings read configured lengths."""


def check_shared_prefixes(chunks: list[Any]) -> None:
    """Refuse models whose samples cannot share tokens."""
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
    lacks = compat.layers.what_multi_token_prediction_lacks()
    if lacks:
        yield f"multi-token prediction {lacks}: unset --mtp-num-layers"
    if getattr(config, "mtp_standalone", False):
        # It would send the next stage several rows at once.
        yield (
            "multi-token prediction has a stage of its own: put its layers on the last stage "
            "(--pipeline-model-parallel-layout)"
        )
    is_recomputed = config.recompute_granularity == "full" and config.recompute_method == "uniform"
    if is_recomputed and not compat.layers.recomputes_multi_token_rows():
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
    # With this function later stages reduce when it is called, whatever gradients they have.
    if overlaps and config.grad_sync_func is None:
        yield from _weights_without_gradient(model, config)
    if getattr(model, "position_embedding_type", None) == "learned_absolute":
        # The first stage has one, and the last stage one for later tokens.
        yield (
            "Megatron-LM leaves gradients of two stages' position embeddings apart: set "
            "--position-embedding-type rope"
        )


def _weights_without_gradient(model: Any, config: Any) -> Iterator[str]:
    """Weights without a gradient that overlapped reduction waits for (Megatron asserts, step 2)."""
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
