"""The plugin's flags in stock training scripts, and the combinations that are refused.

Every refusal says what to set instead, and all of them are listed at once, before any process
group or model is made.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

from mcore_batching.integrations.megatron_lm.sft.install_data import add_sft_arguments
from mcore_batching.integrations.megatron_lm.start_notes import print_notes
from mcore_batching.megatron.arguments import (
    PREFIX,
    add_dynamic_batch_arguments,
    planner_config,
    planner_cost_model,
)
from mcore_batching.megatron.errors import DynamicBatchArgumentError
from mcore_batching.megatron.validation import check_model_config
from mcore_batching.planning import ConfigError, ParallelDims, ParallelDimsError

FLAG = "--use-dynamic-batch-size"


def is_on(args: Any) -> bool:
    """Whether micro-batches are packed: with ``--use-dynamic-batch-size``."""
    return bool(getattr(args, "use_dynamic_batch_size", False))


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the plugin's flags to Megatron's parser."""
    add_dynamic_batch_arguments(parser)
    group = parser.add_argument_group("dynamic micro-batches in stock scripts (mcore_batching)")
    group.add_argument(
        f"{PREFIX}exchange",
        action="store_true",
        help="plan the samples of all data-parallel ranks as one, and move them between ranks so "
        "that these are balanced; without it every rank runs the samples that it has read",
    )
    return add_sft_arguments(parser)


def check_arguments(args: Any) -> None:
    """Refuse flags under which training would hang or differ from what it was without packing.

    Prints what else is to be known of those that run.

    Args:
        args: Megatron's arguments, validated.

    Raises:
        DynamicBatchArgumentError: listing every problem with what to set instead.
    """
    if not is_on(args):
        if getattr(args, "dynamic_batch_exchange", False):
            raise DynamicBatchArgumentError(
                f"{PREFIX}exchange moves samples of dynamic micro-batches: set {FLAG} as well"
            )
        return
    problems = [*_data_problems(args), *_loss_problems(args), *_model_problems(args)]
    try:
        planner = planner_config(args)
        dims = _layout(args)
        planner_cost_model(args)
    except (DynamicBatchArgumentError, ConfigError, ParallelDimsError) as error:
        problems.append(str(error))
    if problems:
        raise DynamicBatchArgumentError(
            f"{FLAG} cannot run with these settings:\n"
            + "\n".join(f"  - {problem}" for problem in problems)
        )
    from megatron.training.arguments import core_transformer_config_from_args

    config = core_transformer_config_from_args(args)
    check_model_config(config, dims, planner)
    print_notes(args, config)


def check_training(
    forward_step_func: Callable[..., Any], process_non_loss_data_func: Any = None
) -> None:
    """Refuse a training script that cannot run packed, before its first step.

    Args:
        forward_step_func: the script's forward step.
        process_non_loss_data_func: what the script gave to ``pretrain``.

    Raises:
        DynamicBatchArgumentError: saying what to change in the script.
    """
    from megatron.training import get_args

    from mcore_batching.integrations.megatron_lm.script import use_packed_batches

    if not is_on(get_args()):
        return
    if process_non_loss_data_func is not None:
        raise DynamicBatchArgumentError(
            "process_non_loss_data_func runs forward passes on the last rank alone, where planning "
            f"with all ranks would hang: do not give it to pretrain, or drop {FLAG}"
        )
    use_packed_batches(forward_step_func)


def _layout(args: Any) -> ParallelDims:
    virtual = args.virtual_pipeline_model_parallel_size or 1
    return ParallelDims(
        data_parallel=args.data_parallel_size,
        pipeline_parallel=args.pipeline_model_parallel_size,
        virtual_pipeline=virtual,
        context_parallel=args.context_parallel_size,
        tensor_parallel=args.tensor_model_parallel_size,
        expert_parallel=args.expert_model_parallel_size,
        sequence_parallel=bool(args.sequence_parallel),
        microbatch_group_size=(args.microbatch_group_size_per_vp_stage if virtual > 1 else None),
    )


def _data_problems(args: Any) -> Iterator[str]:
    if getattr(args, "sft", False):
        yield (
            "--sft packs samples in the dataset and pads them to seq_length: unset --sft and give "
            f"the file with {PREFIX}data"
        )
    if getattr(args, "dataloader_inter_document_masking", False):
        yield (
            "--dataloader-inter-document-masking makes rows of its own: set --reset-attention-mask "
            "and --reset-position-ids instead, whose documents are packed as samples"
        )
    if getattr(args, "hybrid_context_parallel", False):
        yield (
            "hybrid context parallelism gives every micro-batch ranks of its own: unset "
            "--hybrid-context-parallel"
        )
    if getattr(args, "reset_attention_mask", False) and not getattr(
        args, "reset_position_ids", False
    ):
        yield (
            "--reset-attention-mask alone does not say where documents begin: set "
            "--reset-position-ids as well"
        )
    if getattr(args, "iterations_to_skip", None):
        yield "--iterations-to-skip draws batches of a fixed size: unset it"


def _loss_problems(args: Any) -> Iterator[str]:
    if not getattr(args, "calculate_per_token_loss", False):
        yield (
            "without --calculate-per-token-loss Megatron averages over micro-batches, and what "
            "shares one would change the loss: set --calculate-per-token-loss"
        )
    if getattr(args, "logits_load_dir", None):
        yield "cached teacher logits belong to rows as they were cached: unset --logits-load-dir"
    if getattr(args, "modelopt_enabled", False):
        yield "ModelOpt distillation expects rows of seq_length: unset --modelopt-enabled"
    if getattr(args, "perform_rl_step", False):
        yield (
            "Megatron's own RL loop packs sequences itself: unset --perform-rl-step, or build the "
            "loop on mcore_batching.megatron.get_data_iterator"
        )


def _model_problems(args: Any) -> Iterator[str]:
    if getattr(args, "hybrid_layer_pattern", None) or getattr(args, "is_hybrid_model", False):
        yield (
            "state-space layers carry their state from sample to sample of a row: train a model "
            "of attention layers, or unset the flag"
        )
    if getattr(args, "experimental_attention_variant", None):
        yield (
            f"attention variant {args.experimental_attention_variant!r} has not been tried on "
            "packed rows: unset --experimental-attention-variant"
        )
    if getattr(args, "moe_expert_rank_capacity_factor", None) is not None:
        yield (
            "with a capacity, which tokens are dropped depends on what shares their micro-batch: "
            "unset --moe-expert-rank-capacity-factor"
        )
    if getattr(args, "reuse_grad_buf_for_mxfp8_param_ag", False):
        yield (
            "shared gradient and parameter buffers have not been tried: unset "
            "--reuse-grad-buf-for-mxfp8-param-ag"
        )
