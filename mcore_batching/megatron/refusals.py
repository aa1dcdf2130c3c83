"""Settings under which dynamic micro-batches would hang or train wrongly, refused at start.

Every refusal says what to set instead, and all of them are listed at once.
"""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.utils import get_model_config

from mcore_batching.megatron import compat
from mcore_batching.megatron.arguments import PREFIX
from mcore_batching.megatron.errors import DynamicBatchArgumentError
from mcore_batching.planning import Layout, PlannerConfig


def prepare_model(model: list[Any], layout: Layout, config: PlannerConfig) -> None:
    """Check that the model can run packed rows of varying length, and let its schedule do so.

    Sets ``variable_seq_lengths`` on the model's configuration: ``megatron.training`` forces it
    off, and with pipeline stages the schedule would otherwise wait for rows of ``seq_length``.

    Raises:
        DynamicBatchArgumentError: naming what to change.
    """
    model_config = get_model_config(model[0])
    check_model_config(model_config, layout, config)
    for chunk in model:
        for name, module in chunk.named_modules():
            if type(module) is DotProductAttention:
                raise DynamicBatchArgumentError(
                    f"{name} is Megatron's local DotProductAttention, which cannot keep packed "
                    "samples apart: build the model with "
                    "mcore_batching.megatron.packed_layer_spec(config), or with Transformer "
                    "Engine's layer spec"
                )
    if getattr(model_config, "moe_router_enable_expert_bias", False):
        compat.mend_expert_bias_mask()
    model_config.variable_seq_lengths = True


def check_model_config(config: Any, layout: Layout, planner: PlannerConfig) -> None:
    """Refuse what would hang, crash or bias the gradients.

    Args:
        config: the model's `TransformerConfig`.
        layout: the job's layout.
        planner: the planner's settings.

    Raises:
        DynamicBatchArgumentError: listing every problem with what to set instead.
    """
    problems = [
        *_pipeline_problems(config, layout),
        *_cuda_graph_problems(config),
        *_loss_problems(config),
        *_expert_problems(config),
    ]
    if getattr(config, "fp8", None) and planner.pad_total_to is None:
        shards = layout.context_parallel * (
            layout.tensor_parallel if layout.sequence_parallel else 1
        )
        problems.append(
            "FP8 needs rows whose tokens divide by 16 on each rank (32 for mxfp8): set "
            f"{PREFIX}pad-total-to {16 * shards} (or a multiple)"
        )
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


def _pipeline_problems(config: Any, layout: Layout) -> list[str]:
    problems = []
    if layout.virtual_pipeline > 1 and (config.batch_p2p_comm or not config.overlap_p2p_comm):
        problems.append(
            "the interleaved schedule with variable lengths swaps shapes or deadlocks when sends "
            "and receives are batched (upstream): drop --no-overlap-p2p-communication, that is set "
            "overlap_p2p_comm=True and batch_p2p_comm=False"
        )
    if layout.virtual_pipeline == 1 and layout.pipeline_parallel > 1 and config.overlap_p2p_comm:
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


def _cuda_graph_problems(config: Any) -> list[str]:
    on = (
        getattr(config, "enable_cuda_graph", False)
        or getattr(config, "external_cuda_graph", False)
        or getattr(config, "cuda_graph_impl", "none") != "none"
    )
    if not on:
        return []
    return [
        "CUDA graphs replay fixed shapes and a fixed number of micro-batches: set "
        "--cuda-graph-impl none (and unset --enable-cuda-graph, --external-cuda-graph)"
    ]


def _loss_problems(config: Any) -> list[str]:
    if config.calculate_per_token_loss:
        return []
    biased = []
    if config.num_moe_experts and _has_auxiliary_loss(config):
        biased.append("the mixture-of-experts auxiliary losses")
    if getattr(config, "mtp_num_layers", None):
        biased.append("the multi-token-prediction loss")
    return [
        f"{what} would be averaged over micro-batches however full, placeholders included, and "
        "Megatron leaves no place to rescale it: set --calculate-per-token-loss"
        for what in biased
    ]


def _has_auxiliary_loss(config: Any) -> bool:
    kind = config.moe_router_load_balancing_type
    kinds = list(kind) if isinstance(kind, list | tuple) else [kind]
    coefficient = config.moe_aux_loss_coeff
    coefficients = list(coefficient) if isinstance(coefficient, list | tuple) else [coefficient]
    balancing = any("aux_loss" in str(each) for each in kinds) and any(coefficients)
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
    if getattr(config, "moe_expert_capacity_factor", None) is not None:
        problems.append(
            "with an expert capacity, which tokens are dropped depends on what shares their "
            "micro-batch: unset --moe-expert-capacity-factor"
        )
    return problems
