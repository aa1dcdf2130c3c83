"""Multi-token prediction that cannot be trained on packed rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron.core.utils import get_model_config, unwrap_model

from mcore_batching.megatron import compat
from mcore_batching.megatron.topology import prediction_depths


def multi_token_problems(config: Any) -> Iterator[str]:
    """Why a configuration's multi-token prediction cannot run, with the setting that mends it."""
    if not prediction_depths(config):
        return
    lacks = compat.multi_token.what_multi_token_prediction_lacks()
    if lacks:
        yield f"multi-token prediction {lacks}: unset --mtp-num-layers"
    if getattr(config, "mtp_standalone", False):
        # It would send the next stage several rows at once.
        yield (
            "multi-token prediction has a stage of its own: put its layers on the last stage "
            "(--pipeline-model-parallel-layout)"
        )
    is_recomputed = config.recompute_granularity == "full" and config.recompute_method == "uniform"
    if is_recomputed and not compat.multi_token.recomputes_multi_token_rows():
        yield (
            "multi-token prediction of packed rows is recomputed from Megatron-LM 0.19 on: set "
            "--recompute-granularity selective"
        )
    if getattr(config, "mtp_hsm", False):
        yield "random draws of mixed hidden states follow the packing: unset --mtp-hsm"


def unfit_for_later_tokens(chunks: list[Any]) -> Iterator[str]:
    """Why a model that is said to predict later tokens does not, or would train wrongly."""
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
    # With this function later stages reduce when told, whatever gradients they have.
    if overlaps and config.grad_sync_func is None:
        yield from _weights_without_gradient(model, config)
    if getattr(model, "position_embedding_type", None) == "learned_absolute":
        # Of the first stage, and of the last one for later tokens.
        yield (
            "Megatron-LM leaves gradients of two stages' position embeddings apart: set "
            "--position-embedding-type rope"
        )


def _weights_without_gradient(model: Any, config: Any) -> Iterator[str]:
    """Weights whose gradients overlapped reduction would wait for: Megatron asserts in step 2."""
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
