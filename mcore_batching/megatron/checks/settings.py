"""Settings under which dynamic micro-batches would hang or train wrongly, refused at the start.

All problems are listed at once, each with the setting that solves it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron.core.utils import get_model_config

from mcore_batching.flags import FLAGS, PREFIX
from mcore_batching.megatron import compat
from mcore_batching.megatron.checks.layers import (
    check_shared_prefixes,
    layer_problems,
    let_rows_have_groups,
    multi_token_problems,
    unfit_for_later_tokens,
)
from mcore_batching.megatron.errors import DynamicBatchArgumentError, refuse
from mcore_batching.megatron.logits import why_not_fused
from mcore_batching.megatron.options import Options
from mcore_batching.megatron.topology import current_dims, model_chunks
from mcore_batching.planning import (
    ParallelDims,
    PlannerConfig,
    row_multiple_tokens,
    sample_multiple_tokens,
)

_DYNAMIC_CP = FLAGS["max_context_parallel"]
_PACKED_ROWS = "dynamic micro-batches"
"""The subject of messages about settings that packed rows cannot run with."""
_REFUSED = {
    "defer_embedding_wgrad_compute": "deferred gradients take all rows for as long as the first",
    "overlap_moe_expert_parallel_comm": "rows have no schedule plans to overlap",
    "sequence_packing_scheduler": "Megatron would pack a second time",
    "tp_comm_overlap": "overlapped communication has buffers of seq_length tokens",
}
_ALL_TOKENS = "routes a token by all tokens of its micro-batch, padding included"
_REFUSED_ROUTING = {
    "global_aux_loss": "averages over micro-batches, placeholders included",
    "sinkhorn": _ALL_TOKENS,
    "quantile_balancing": _ALL_TOKENS,
}
_PACKED_VARIANTS = (None, "gated_delta_net", "gdn", "dsa")
"""Kinds of attention; `layer_problems` has the versions."""


def check_settings(args: Any, model: Any) -> None:
    """Refuse flags and model settings under which training would hang or be wrong.

    For the start of a job, once the model is built; `get_data_iterator` checks again.

    Args:
        args: Megatron's arguments.
        model: this rank's model chunks.

    Raises:
        DynamicBatchArgumentError: listing every problem with what to set instead.
    """
    options, chunks = Options.of(args), model_chunks(model)
    options.checked_timeout_seconds()
    check_logits(options, chunks)
    dims = current_dims(chunks)
    prepare_model(chunks, dims, options.planner_config(dims))
    if options.share_prefixes:
        check_shared_prefixes(chunks)


def check_logits(options: Options, chunks: list[Any]) -> None:
    """Refuse ``--dynamic-batch-fuse-output-layer`` where a last layer is more than a product."""
    for chunk in chunks if options.fuse_output_layer else ():
        reason = why_not_fused(chunk)
        if reason:
            raise DynamicBatchArgumentError(
                f"the output layer {reason}, so it cannot be fused with log-probs: unset "
                "--dynamic-batch-fuse-output-layer"
            )


def prepare_model(model: list[Any], dims: ParallelDims, config: PlannerConfig) -> None:
    """Check that the model can run packed rows of varying length, and let its schedule do so."""
    model_config = get_model_config(model[0])
    pads_rows = max(sample_multiple_tokens(dims, config), row_multiple_tokens(dims, config)) > 1
    refuse(
        _PACKED_ROWS,
        [
            *_config_problems(model_config, dims, config),
            *unfit_for_later_tokens(model),
            *layer_problems(
                model, dims, pads_rows=pads_rows, row_ranks=config.max_context_parallel
            ),
        ],
    )
    if config.max_context_parallel is not None:
        let_rows_have_groups(model)
    # megatron.training forces it off: pipeline stages would wait for rows of seq_length tokens.
    model_config.variable_seq_lengths = True


def prepare_packed_model(model: Any) -> None:
    """Check that a model can run packed rows of any origin, and end Mamba's state in them.

    For frameworks that make rows, which they pad, and take the loss themselves: nothing is required
    of the loss.

    Args:
        model: this rank's model chunks.

    Raises:
        DynamicBatchArgumentError: listing every problem with what to set instead.
    """
    chunks = model_chunks(model)
    config, dims = get_model_config(chunks[0]), current_dims(chunks)
    refuse(
        _PACKED_ROWS,
        [*_row_problems(config, dims), *layer_problems(chunks, dims, pads_rows=True)],
    )
    compat.end_states_with_samples()


def check_model_config(config: Any, dims: ParallelDims, planner: PlannerConfig) -> None:
    """Refuse a model's `TransformerConfig` that would hang, crash or bias the gradients."""
    refuse(_PACKED_ROWS, _config_problems(config, dims, planner))


def _config_problems(config: Any, dims: ParallelDims, planner: PlannerConfig) -> Iterator[str]:
    yield from _row_problems(config, dims)
    yield from multi_token_problems(config)
    has_loss, mend = has_auxiliary_loss(config), "set --calculate-per-token-loss"
    if not config.calculate_per_token_loss:
        if has_loss:
            yield f"auxiliary losses of experts would be means over micro-batches: {mend}"
        if config.dsa_indexer_loss_coeff:
            yield f"sparse attention's indexer loss would be a mean over micro-batches: {mend}"
    ranks = dims.tensor_parallel * (planner.max_context_parallel or dims.context_parallel)
    is_too_weak = ranks > 1 and not compat.multiplies_by_ranks()
    if has_loss and config.moe_z_loss_coeff and is_too_weak:
        yield (
            f"before 0.19 megatron-core makes the z-loss of experts {ranks} times too weak on "
            f"{ranks} tensor- and context-parallel ranks: unset --moe-z-loss-coeff, or install "
            "megatron-core 0.19 or later"
        )
    most = planner.max_context_parallel
    if most is not None:
        # Megatron divides by ranks or by micro-batches, which rows of several sizes count unevenly.
        if not config.calculate_per_token_loss:
            yield f"under {_DYNAMIC_CP} Megatron averages over a fixed number of ranks: {mend}"
        if config.multi_latent_attention:
            yield (
                "Megatron's multi-latent attention asserts that rows have no context-parallel "
                "group of their own (0.16 to 0.19 and main at d98e8a64d; its dev branch follows "
                f"one, which is untried here): unset {_DYNAMIC_CP}"
            )
        # Experts that are computed anew by themselves no longer have the row's group.
        is_selective = config.recompute_granularity == "selective"
        if has_loss and is_selective and "moe" in config.recompute_modules:
            yield (
                "auxiliary losses of recomputed experts have a fixed context-parallel group: leave "
                f"moe out of --recompute-modules, or unset {_DYNAMIC_CP}"
            )
    # By each size that a row may have: what a rank holds of it depends on it.
    for size in (dims.context_parallel,) if most is None else dims.row_sizes(most):
        yield from _low_precision_problems(config, dims.for_rows_on(size), planner)


def _row_problems(config: Any, dims: ParallelDims) -> Iterator[str]:
    """Settings that rows of varying length, or samples that share a row, do not go with."""
    if dims.virtual_pipeline > 1 and (config.batch_p2p_comm or not config.overlap_p2p_comm):
        yield (
            "the interleaved schedule deadlocks with batched sends of varying lengths (upstream): "
            "drop --no-overlap-p2p-communication (overlap_p2p_comm=True, batch_p2p_comm=False)"
        )
    if config.enable_cuda_graph or config.external_cuda_graph or config.cuda_graph_impl != "none":
        yield (
            "CUDA graphs replay fixed shapes and counts: set --cuda-graph-impl none (and unset "
            "--enable-cuda-graph, --external-cuda-graph)"
        )
    for name, reason in _REFUSED.items():
        if getattr(config, name, None):  # some releases lack some of the fields
            yield f"{reason}: unset --{name.replace('_', '-')}"
    if config.num_moe_experts:
        yield from _expert_problems(config)
    variant = config.experimental_attention_variant
    if variant not in _PACKED_VARIANTS:
        yield (
            f"attention of the variant {variant} is not known to keep packed samples apart: unset "
            "--experimental-attention-variant"
        )


def has_auxiliary_loss(config: Any) -> bool:
    """True if routers add a load-balancing loss or a z-loss."""
    if not config.num_moe_experts:
        return False
    # One of each, or a list of several with a coefficient for each.
    coefficient = config.moe_aux_loss_coeff
    coefficients = coefficient if isinstance(coefficient, list | tuple) else [coefficient]
    balancing = any("aux_loss" in each for each in _load_balancing_types(config))
    return bool((balancing and any(coefficients)) or config.moe_z_loss_coeff)


def _expert_problems(config: Any) -> Iterator[str]:
    dispatcher, backend = config.moe_token_dispatcher_type, config.moe_flex_dispatcher_backend
    if dispatcher == "allgather":
        yield (
            "the allgather token dispatcher needs equal lengths on all ranks: set "
            "--moe-token-dispatcher-type alltoall"
        )
    if dispatcher == "flex" and backend == "ncclep":
        yield (
            "the NCCL expert dispatcher sizes its buffers by the first row: set "
            "--moe-flex-dispatcher-backend deepep"
        )
    pads = getattr(config, "moe_hybridep_pad_uneven_dispatch_inputs", False)  # from 0.19 on
    if dispatcher == "flex" and backend == "hybridep" and not pads:
        yield (
            "HybridEP expects equally many tokens on all ranks: set "
            "--moe-hybridep-pad-uneven-dispatch-inputs (from Megatron-LM 0.19 on), or "
            "--moe-flex-dispatcher-backend deepep"
        )
    for routing, effect in _REFUSED_ROUTING.items():
        if routing in _load_balancing_types(config):
            yield f"{routing} {effect}: set --moe-router-load-balancing-type aux_loss or none"
    # A factor of 0 would be a capacity, too.
    if config.moe_expert_capacity_factor is not None:
        yield (
            "an expert capacity drops tokens by what shares their micro-batch: unset "
            "--moe-expert-capacity-factor"
        )


def _load_balancing_types(config: Any) -> list[str]:
    kind = config.moe_router_load_balancing_type
    return [str(each) for each in kind] if isinstance(kind, list | tuple) else [str(kind)]


def _low_precision_problems(
    config: Any, dims: ParallelDims, planner: PlannerConfig
) -> Iterator[str]:
    """Padding that FP8 or FP4 kernels cannot take: their scales are of blocks of tokens."""
    if config.fp4:
        name, tokens = "FP4", 32
    elif not config.fp8:
        return
    elif config.fp8_recipe == "blockwise" and dims.sequence_parallel:
        name, tokens = "FP8", 128  # activations are quantized in blocks before they are gathered
    else:
        name, tokens = "FP8", 32 if config.fp8_recipe == "mxfp8" else 16
    # Each rank's part of a row must fill its blocks.
    shards = dims.context_parallel * (dims.tensor_parallel if dims.sequence_parallel else 1)
    wanted, row = tokens * shards, row_multiple_tokens(dims, planner)
    if row % wanted:
        yield (
            f"{name} rows must divide by {tokens} on each rank, so by {wanted} in all, and are "
            f"padded to a multiple of {row}: set {PREFIX}pad-total-to {wanted}"
        )
