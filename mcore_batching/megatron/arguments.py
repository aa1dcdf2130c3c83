"""Flags for Megatron's argument parser, and the combinations that are refused at start."""

from __future__ import annotations

import argparse
from typing import Any

from mcore_batching.planning import Layout, PlannerConfig

PREFIX = "--dynamic-batch-"


class DynamicBatchArgumentError(ValueError):
    """Flags, or model settings, with which dynamic micro-batches would hang or train wrongly.

    The message lists every problem found, each with what to set instead.
    """


def add_dynamic_batch_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags; give it to Megatron as ``extra_args_provider``.

    Flags that the parser has already (frameworks define the first two themselves) are left alone.
    """
    group = parser.add_argument_group("dynamic micro-batches (mcore_batching)")

    def add(flag: str, **options: Any) -> None:
        if flag not in parser._option_string_actions:
            group.add_argument(flag, **options)

    add(
        "--use-dynamic-batch-size",
        action="store_true",
        help="pack variable-length samples into micro-batches under --max-tokens-per-gpu",
    )
    add(
        "--max-tokens-per-gpu",
        type=int,
        default=None,
        metavar="TOKENS",
        help="most padded tokens a micro-batch may put on one GPU; "
        "a micro-batch holds up to this times the context-parallel size",
    )
    add(
        f"{PREFIX}packing",
        choices=["auto", "first-fit", "first-fit-decreasing"],
        default="auto",
        help="how samples are packed under the cap (auto: whichever needs fewer micro-batches)",
    )
    add(
        f"{PREFIX}balance",
        choices=["auto", "cost", "tokens", "none"],
        default="auto",
        help="what is balanced when micro-batches are split, ordered and assigned",
    )
    add(
        f"{PREFIX}fill",
        choices=["split", "placeholder"],
        default="split",
        help="how a rank with too few micro-batches reaches the common count: split its own "
        "first, or use placeholders at once",
    )
    add(
        f"{PREFIX}on-oversize",
        choices=["own-bin", "error"],
        default="own-bin",
        help="a sample over the cap runs alone in its micro-batch, or is refused",
    )
    add(
        f"{PREFIX}pad-each-to",
        type=int,
        default=None,
        metavar="TOKENS",
        help="pad every sample to a multiple of this, beside what parallelism needs",
    )
    add(
        f"{PREFIX}pad-total-to",
        type=int,
        default=None,
        metavar="TOKENS",
        help="pad every packed row to a multiple of this (FP8, memory fragmentation)",
    )
    add(
        f"{PREFIX}rendezvous-timeout-seconds",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="how long a rank waits for the others to have planned or collated before it raises",
    )
    return parser


def planner_config(args: Any) -> PlannerConfig:
    """The planner's settings from Megatron's arguments.

    Raises:
        DynamicBatchArgumentError: ``--max-tokens-per-gpu`` is missing.
    """
    if getattr(args, "max_tokens_per_gpu", None) is None:
        raise DynamicBatchArgumentError(
            "--use-dynamic-batch-size needs a cap: set --max-tokens-per-gpu to the most tokens "
            "that fit into one GPU's memory in one micro-batch (16384, say)"
        )
    defaults = {
        "packing": "auto",
        "balance": "auto",
        "fill": "split",
        "on_oversize": "own-bin",
        "pad_each_to": None,
        "pad_total_to": None,
    }
    chosen = {name: getattr(args, f"dynamic_batch_{name}", was) for name, was in defaults.items()}
    return PlannerConfig(max_tokens_per_gpu=args.max_tokens_per_gpu, **chosen)


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
