"""Settings under which dynamic micro-batches would hang or train wrongly, refused at the start.

All problems are listed at once, each with the setting that solves it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.utils import get_model_config

from mcore_batching.megatron import compat
from mcore_batching.megatron.arguments import (
    PREFIX,
    consensus_timeout_seconds,
    fuses_output_layer,
    log_prob_chunk_tokens,
    planner_config,
)
from mcore_batching.megatron.errors import DynamicBatchArgumentError
from mcore_batching.megatron.fused_output import check_can_be_fused
from mcore_batching.megatron.shared_rows import (
    dims_of_rows,
    let_rows_have_groups,
    shared_row_problems,
)
from mcore_batching.megatron.topology import current_dims, model_chunks
from mcore_batching.megatron.transformer_engine import (
    Versions,
    attention_problems,
    installed_versions,
)
from mcore_batching.megatron.warm_up import check_warm_up
from mcore_batching.planning import ParallelDims, PlannerConfig, row_multiple_tokens

_REFUSED_ROUTING = {
    "global_aux_loss": "averages over micro-batches, placeholders included",
    "sinkhorn": "routes a token by all tokens of its micro-batch, padding included",
    "quantile_balancing": "routes a token by all tokens of its micro-batch, padding included",
}


def check_settings(args: Any, model: Any) -> None:
    """Refuse flags and model settings under which training would hang or be wrong.

    For the start of a job, once the model is built; `get_data_iterator` checks again.

    Args:
        args: Megatron's arguments.
        model: this rank's model chunks.

    Raises:
        DynamicBatchArgumentError: listing every problem with what to set instead.
    """
    consensus_timeout_seconds(args)
    chunks = model_chunks(model)
    check_logits(args, chunks)
    check_warm_up(args, get_model_config(chunks[0]))
    dims = current_dims(chunks)
    prepare_model(chunks, dims, planner_config(args, dims))


def check_logits(args: Any, chunks: list[Any]) -> None:
    """Refuse flags of log-probabilities that this model cannot have.

    Raises:
        DynamicBatchArgumentError: naming what to change.
    """
    log_prob_chunk_tokens(args)
    if fuses_output_layer(args):
        check_can_be_fused(chunks)


def prepare_model(model: list[Any], dims: ParallelDims, config: PlannerConfig) -> None:
    """Check that the model can run packed rows of varying length, and let its schedule do so.

    Sets ``variable_seq_lengths`` on the model's configuration: ``megatron.training`` forces it
    off, and with pipeline stages the schedule would otherwise wait for rows of ``seq_length``.

    Raises:
        DynamicBatchArgumentError: naming what to change.
    """
    model_config = get_model_config(model[0])
    by_engine = any(map(compat.is_engines_attention, _modules(model)))
    check_model_config(model_config, dims, config, installed_versions() if by_engine else None)
    for chunk in model:
        for name, module in chunk.named_modules():
            # Not isinstance: subclasses may well keep packed samples apart.
            if type(module) is DotProductAttention:
                raise DynamicBatchArgumentError(
                    f"{name} is Megatron's local DotProductAttention, which cannot keep packed "
                    "samples apart: build the model with "
                    "mcore_batching.megatron.packed_layer_spec(config), or with Transformer "
                    "Engine's layer spec"
                )
    if model_config.num_moe_experts:
        _check_gradients_of_experts(model, model_config)
        compat.fix_router_masks()
    if config.max_context_parallel is not None:
        let_rows_have_groups(model)
    model_config.variable_seq_lengths = True


def _check_gradients_of_experts(model: list[Any], config: Any) -> None:
    """Refuse experts that tensor-parallel ranks all hold, and whose gradients they do not add up.

    Raises:
        DynamicBatchArgumentError: naming what to change.
    """
    size = config.tensor_model_parallel_size
    if config.expert_tensor_parallel_size == size:
        return
    for name, parameter in ((n, p) for chunk in model for n, p in chunk.named_parameters()):
        # True: Megatron adds it up over the data-parallel ranks that parameters of all layers have.
        if ".mlp.experts." in name and getattr(parameter, "allreduce", True):
            raise DynamicBatchArgumentError(
                f"before 0.19 megatron-core does not add up the gradient of {name} over "
                "tensor-parallel ranks, which see different tokens: set "
                f"--expert-tensor-parallel-size {size}, or --expert-model-parallel-size above 1"
            )


def _modules(chunks: list[Any]) -> Iterator[Any]:
    for chunk in chunks:
        yield from chunk.modules()


def check_model_config(
    config: Any,
    dims: ParallelDims,
    planner: PlannerConfig,
    versions: Versions | None = None,
) -> None:
    """Refuse a model configuration that would hang, crash or bias the gradients.

    Args:
        config: the model's `TransformerConfig`.
        dims: the job's parallel dims.
        planner: the planner's settings.
        versions: of Transformer Engine, if its attention is used.

    Raises:
        DynamicBatchArgumentError: listing every problem with what to set instead.
    """
    problems = [
        *_pipeline_problems(config, dims),
        *_fixed_size_problems(config),
        *_loss_problems(config),
        *_expert_problems(config),
        *shared_row_problems(config, dims, planner, has_auxiliary_loss=has_auxiliary_loss(config)),
    ]
    for rows in dims_of_rows(dims, planner):
        problems += _low_precision_problems(config, rows, planner)
        if versions is not None:
            problems += attention_problems(config, rows, versions)
    problems = list(dict.fromkeys(problems))
    if problems:
        raise DynamicBatchArgumentError(
            "dynamic micro-batches cannot run with these settings:\n"
            + "\n".join(f"  - {problem}" for problem in problems)
        )


def has_auxiliary_loss(config: Any) -> bool:
    """True if routers add a load-balancing loss or a z-loss."""
    if not config.num_moe_experts:
        return False
    coefficient = config.moe_aux_loss_coeff
    coefficients = coefficient if isinstance(coefficient, list | tuple) else [coefficient]
    balancing = any("aux_loss" in each for each in _load_balancing_types(config))
    return bool((balancing and any(coefficients)) or config.moe_z_loss_coeff)


def _pipeline_problems(config: Any, dims: ParallelDims) -> Iterator[str]:
    if dims.virtual_pipeline > 1 and (config.batch_p2p_comm or not config.overlap_p2p_comm):
        yield (
            "the interleaved schedule with variable lengths swaps shapes or deadlocks when sends "
            "and receives are batched (upstream): drop --no-overlap-p2p-communication, that is set "
            "overlap_p2p_comm=True and batch_p2p_comm=False"
        )
    if dims.virtual_pipeline == 1 and dims.pipeline_parallel > 1 and config.overlap_p2p_comm:
        yield (
            "the 1F1B schedule does not overlap point-to-point communication: set "
            "overlap_p2p_comm=False and batch_p2p_comm=True (--no-overlap-p2p-communication), or "
            "turn on virtual pipeline stages"
        )
    if config.overlap_moe_expert_parallel_comm:
        yield (
            "overlapped expert-parallel communication asks the forward step for a schedule plan, "
            "which packed rows do not have: unset --overlap-moe-expert-parallel-comm"
        )


def _fixed_size_problems(config: Any) -> Iterator[str]:
    if config.enable_cuda_graph or config.external_cuda_graph or config.cuda_graph_impl != "none":
        yield (
            "CUDA graphs replay fixed shapes and a fixed number of micro-batches: set "
            "--cuda-graph-impl none (and unset --enable-cuda-graph, --external-cuda-graph)"
        )
    if config.tp_comm_overlap:
        yield (
            "overlapped tensor-parallel communication has buffers of seq_length tokens, which rows "
            "do not have: unset --tp-comm-overlap"
        )
    if config.defer_embedding_wgrad_compute:
        yield (
            "deferred embedding gradients are gathered as if all rows had the length of the first: "
            "unset --defer-embedding-wgrad-compute"
        )
    if compat.has_sequence_packing(config):
        yield (
            "Megatron's own sequence packing would pack a second time: unset "
            "--sequence-packing-scheduler"
        )


def _loss_problems(config: Any) -> Iterator[str]:
    if config.mtp_num_layers:
        yield (
            "the multi-token-prediction loss is made inside the model, from labels and masks that "
            "a forward pass for log-probs does not have: unset --mtp-num-layers"
        )
    if has_auxiliary_loss(config) and not config.calculate_per_token_loss:
        yield (
            "the mixture-of-experts auxiliary losses would be averaged over micro-batches however "
            "full, placeholders included, and Megatron leaves no place to rescale them: set "
            "--calculate-per-token-loss"
        )


def _expert_problems(config: Any) -> Iterator[str]:
    if not config.num_moe_experts:
        return
    if config.moe_token_dispatcher_type == "allgather":
        yield (
            "the allgather token dispatcher needs equal lengths on all ranks: set "
            "--moe-token-dispatcher-type alltoall"
        )
    if config.moe_token_dispatcher_type == "flex":
        yield from _flex_dispatcher_problems(config)
    for routing, effect in _REFUSED_ROUTING.items():
        if routing in _load_balancing_types(config):
            yield f"{routing} {effect}: set --moe-router-load-balancing-type aux_loss or none"
    # A factor of 0 would be a capacity, too.
    if config.moe_expert_capacity_factor is not None:
        yield (
            "with an expert capacity, which tokens are dropped depends on what shares their "
            "micro-batch: unset --moe-expert-capacity-factor"
        )


def _flex_dispatcher_problems(config: Any) -> Iterator[str]:
    backend = config.moe_flex_dispatcher_backend
    if backend == "hybridep" and not compat.pads_uneven_dispatch_inputs(config):
        yield (
            "HybridEP expects equally many tokens on all ranks: set "
            "--moe-hybridep-pad-uneven-dispatch-inputs (from Megatron-LM 0.19 on), or "
            "--moe-flex-dispatcher-backend deepep"
        )
    if backend == "ncclep":
        yield (
            "the NCCL expert-parallel dispatcher sizes its buffers by the first row that it sees: "
            "set --moe-flex-dispatcher-backend deepep"
        )


def _low_precision_problems(
    config: Any, dims: ParallelDims, planner: PlannerConfig
) -> Iterator[str]:
    if config.fp4:
        name, tokens = "FP4", 32
    elif config.fp8:
        name, tokens = "FP8", _fp8_tokens(config, dims)
    else:
        return
    shards = dims.context_parallel * (dims.tensor_parallel if dims.sequence_parallel else 1)
    wanted, row = tokens * shards, row_multiple_tokens(dims, planner)
    if row % wanted:
        yield (
            f"{name} needs rows whose tokens divide by {tokens} on each rank, so by {wanted} in "
            f"all, and rows are padded to a multiple of {row}: set {PREFIX}pad-total-to {wanted} "
            "(or a multiple)"
        )


def _fp8_tokens(config: Any, dims: ParallelDims) -> int:
    """Tokens on a rank that its FP8 kernels take multiples of."""
    if config.fp8_recipe == "blockwise" and dims.sequence_parallel:
        return 128  # activations are quantized in such blocks before they are gathered
    return 32 if config.fp8_recipe == "mxfp8" else 16


def _load_balancing_types(config: Any) -> list[str]:
    kind = config.moe_router_load_balancing_type
    return [str(each) for each in kind] if isinstance(kind, list | tuple) else [str(kind)]
