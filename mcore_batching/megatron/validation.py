"""Settings under which dynamic micro-batches would hang or train wrongly, refused at start.

Every refusal says what to set instead, and all of them are listed at once.
"""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.utils import get_model_config

from mcore_batching.megatron import compat
from mcore_batching.megatron.arguments import PREFIX, planner_config
from mcore_batching.megatron.errors import DynamicBatchArgumentError
from mcore_batching.megatron.topology import current_dims, model_chunks
from mcore_batching.planning import ParallelDims, PlannerConfig, row_multiple_tokens


def check_settings(args: Any, model: Any) -> None:
    """Refuse flags and model settings under which training would hang or be wrong.

    For the start of a job, once the model is built; `get_data_iterator` checks again.

    Args:
        args: Megatron's arguments.
        model: this rank's model chunks.

    Raises:
        DynamicBatchArgumentError: listing every problem with what to set instead.
    """
    chunks = model_chunks(model)
    prepare_model(chunks, current_dims(chunks), planner_config(args))


def prepare_model(model: list[Any], dims: ParallelDims, config: PlannerConfig) -> None:
    """Check that the model can run packed rows of varying length, and let its schedule do so.

    Sets ``variable_seq_lengths`` on the model's configuration: ``megatron.training`` forces it
    off, and with pipeline stages the schedule would otherwise wait for rows of ``seq_length``.

    Raises:
        DynamicBatchArgumentError: naming what to change.
    """
    model_config = get_model_config(model[0])
    check_model_config(model_config, dims, config)
    for chunk in model:
        for name, module in chunk.named_modules():
            if type(module) is DotProductAttention:
                raise DynamicBatchArgumentError(
                    f"{name} is Megatron's local DotProductAttention, which cannot keep packed "
                    "samples apart: build the model with "
                    "mcore_batching.megatron.packed_layer_spec(config), or with Transformer "
                    "Engine's layer spec"
                )
    if model_config.num_moe_experts:
        compat.mend_router_masks()
    model_config.variable_seq_lengths = True


def check_model_config(config: Any, dims: ParallelDims, planner: PlannerConfig) -> None:
    """Refuse what would hang, crash or bias the gradients.

    Args:
        config: the model's `TransformerConfig`.
        dims: the job's layout.
        planner: the planner's settings.

    Raises:
        DynamicBatchArgumentError: listing every problem with what to set instead.
    """
    problems = [
        *_pipeline_problems(config, dims),
        *_fixed_size_problems(config),
        *_loss_problems(config),
        *_expert_problems(config),
        *_low_precision_problems(config, dims, planner),
    ]
    if getattr(config, "sequence_packing_scheduler", None):
        problems.append(
            "Megatron's own sequence packing would pack a second time: unset "
            "--sequence-packing-scheduler"
        )
    if problems:
        raise DynamicBatchArgumentError(
            "dynamic micro-batches cannot run with these settings:\n"
            + "\n".join(f"  - {problem}" for problem in problems)
        )


def _pipeline_problems(config: Any, dims: ParallelDims) -> list[str]:
    problems = []
    if dims.virtual_pipeline > 1 and (config.batch_p2p_comm or not config.overlap_p2p_comm):
        problems.append(
            "the interleaved schedule with variable lengths swaps shapes or deadlocks when sends "
            "and receives are batched (upstream): drop --no-overlap-p2p-communication, that is set "
            "overlap_p2p_comm=True and batch_p2p_comm=False"
        )
    if dims.virtual_pipeline == 1 and dims.pipeline_parallel > 1 and config.overlap_p2p_comm:
        problems.append(
            "the 1F1B schedule does not overlap point-to-point communication: set "
            "overlap_p2p_comm=False and batch_p2p_comm=True (--no-overlap-p2p-communication), or "
            "turn on virtual pipeline stages"
        )
    if getattr(config, "overlap_moe_expert_parallel_comm", False):
        problems.append(
            "overlapped expert-parallel communication asks the forward step for a schedule plan, "
            "which packed rows do not have: unset --overlap-moe-expert-parallel-comm"
        )
    return problems


def _low_precision_problems(config: Any, dims: ParallelDims, planner: PlannerConfig) -> list[str]:
    if getattr(config, "fp4", None):
        name, tokens = "FP4", 32
    elif getattr(config, "fp8", None):
        name, tokens = "FP8", 32 if getattr(config, "fp8_recipe", None) == "mxfp8" else 16
    else:
        return []
    shards = dims.context_parallel * (dims.tensor_parallel if dims.sequence_parallel else 1)
    wanted, row = tokens * shards, row_multiple_tokens(dims, planner)
    if row % wanted == 0:
        return []
    return [
        f"{name} needs rows whose tokens divide by {tokens} on each rank, so by {wanted} in all, "
        f"and rows are padded to a multiple of {row}: set {PREFIX}pad-total-to {wanted} (or a "
        "multiple)"
    ]


def _fixed_size_problems(config: Any) -> list[str]:
    problems = []
    if (
        getattr(config, "enable_cuda_graph", False)
        or getattr(config, "external_cuda_graph", False)
        or getattr(config, "cuda_graph_impl", "none") != "none"
    ):
        problems.append(
            "CUDA graphs replay fixed shapes and a fixed number of micro-batches: set "
            "--cuda-graph-impl none (and unset --enable-cuda-graph, --external-cuda-graph)"
        )
    if config.tp_comm_overlap:
        problems.append(
            "overlapped tensor-parallel communication has buffers of seq_length tokens, which rows "
            "do not have: unset --tp-comm-overlap"
        )
    if config.defer_embedding_wgrad_compute:
        problems.append(
            "deferred embedding gradients are gathered as if all rows had the length of the first: "
            "unset --defer-embedding-wgrad-compute"
        )
    return problems


def _loss_problems(config: Any) -> list[str]:
    problems = []
    if getattr(config, "mtp_num_layers", None):
        problems.append(
            "the multi-token-prediction loss is made inside the model, from labels and masks that "
            "a forward pass for log-probs does not have: unset --mtp-num-layers"
        )
    if config.num_moe_experts and "global_aux_loss" in _load_balancing_types(config):
        problems.append(
            "global_aux_loss averages over micro-batches, placeholders included: set "
            "--moe-router-load-balancing-type aux_loss or none"
        )
    if has_auxiliary_loss(config) and not config.calculate_per_token_loss:
        problems.append(
            "the mixture-of-experts auxiliary losses would be averaged over micro-batches however "
            "full, placeholders included, and Megatron leaves no place to rescale them: set "
            "--calculate-per-token-loss"
        )
    return problems


def _load_balancing_types(config: Any) -> list[str]:
    kind = config.moe_router_load_balancing_type
    return [str(each) for each in kind] if isinstance(kind, list | tuple) else [str(kind)]


def has_auxiliary_loss(config: Any) -> bool:
    """Whether routers add a load-balancing or z-loss."""
    if not config.num_moe_experts:
        return False
    coefficient = config.moe_aux_loss_coeff
    coefficients = list(coefficient) if isinstance(coefficient, list | tuple) else [coefficient]
    balancing = any("aux_loss" in each for each in _load_balancing_types(config)) and any(
        coefficients
    )
    return bool(balancing or config.moe_z_loss_coeff)


def _expert_problems(config: Any) -> list[str]:
    if not config.num_moe_experts:
        return []
    problems = []
    if config.moe_token_dispatcher_type == "allgather":
        problems.append(
            "the allgather token dispatcher needs equal lengths on all ranks: set "
            "--moe-token-dispatcher-type alltoall"
        )
    if config.moe_token_dispatcher_type == "flex":
        problems += _flex_dispatcher_problems(config)
    for routing in ("sinkhorn", "quantile_balancing"):
        if routing in _load_balancing_types(config):
            problems.append(
                f"{routing} routes a token by all tokens of its micro-batch, padding included: set "
                "--moe-router-load-balancing-type aux_loss or none"
            )
    if getattr(config, "moe_expert_capacity_factor", None) is not None:
        problems.append(
            "with an expert capacity, which tokens are dropped depends on what shares their "
            "micro-batch: unset --moe-expert-capacity-factor"
        )
    return problems


def _flex_dispatcher_problems(config: Any) -> list[str]:
    backend = getattr(config, "moe_flex_dispatcher_backend", None)
    if backend == "hybridep" and not getattr(
        config, "moe_hybridep_pad_uneven_dispatch_inputs", False
    ):
        return [
            "HybridEP expects equally many tokens on all ranks: set "
            "--moe-hybridep-pad-uneven-dispatch-inputs (from Megatron-LM 0.19 on), or "
            "--moe-flex-dispatcher-backend deepep"
        ]
    if backend == "ncclep":
        return [
            "the NCCL expert-parallel dispatcher sizes its buffers by the first row that it sees: "
            "set --moe-flex-dispatcher-backend deepep"
        ]
    return []
