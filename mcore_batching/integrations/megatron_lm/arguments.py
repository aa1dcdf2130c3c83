"""The plugin's flags in stock training scripts, and the settings that they do not go with.

All problems are listed at once, each with the fix, before any process group or model is made.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from mcore_batching.flags import PREFIX, THEMES, add_flags
from mcore_batching.integrations.megatron_lm.script_batches import use_packed_batches
from mcore_batching.integrations.megatron_lm.start_messages import print_start_messages
from mcore_batching.megatron import compat
from mcore_batching.megatron.checks.transformer_engine import installed_versions
from mcore_batching.megatron.checks.validation import check_model_config
from mcore_batching.megatron.errors import DynamicBatchArgumentError
from mcore_batching.megatron.job.options import Options
from mcore_batching.planning import ConfigError, ParallelDims, ParallelDimsError

FLAG = "--use-dynamic-batch-size"

_REFUSED = {
    "sft": (
        "--sft packs samples in the dataset and pads them to seq_length: unset --sft and give "
        f"the file with {PREFIX}data"
    ),
    "dataloader_inter_document_masking": (
        "--dataloader-inter-document-masking makes rows of its own: set --reset-attention-mask "
        "and --reset-position-ids instead, whose documents are packed as samples"
    ),
    "hybrid_context_parallel": (
        "hybrid context parallelism gives every micro-batch ranks of its own: unset "
        "--hybrid-context-parallel"
    ),
    "iterations_to_skip": "--iterations-to-skip draws batches of a fixed size: unset it",
    "logits_load_dir": (
        "cached teacher logits belong to rows as they were cached: unset --logits-load-dir"
    ),
    "modelopt_enabled": (
        "ModelOpt distillation expects rows of seq_length: unset --modelopt-enabled"
    ),
    "perform_rl_step": (
        "Megatron's own RL loop packs sequences itself: unset --perform-rl-step, or build the "
        "loop on mcore_batching.megatron.get_data_iterator"
    ),
    "experimental_attention_variant": (
        "experimental attention variants are untested on packed rows: unset "
        "--experimental-attention-variant"
    ),
    "reuse_grad_buf_for_mxfp8_param_ag": (
        "shared gradient and parameter buffers are untested: unset "
        "--reuse-grad-buf-for-mxfp8-param-ag"
    ),
}
"""Arguments that must be unset. Not every release has each: a missing one counts as unset."""


def is_on(args: Any) -> bool:
    """True if micro-batches are packed: with ``--use-dynamic-batch-size``."""
    return bool(getattr(args, "use_dynamic_batch_size", False))


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the plugin's flags to Megatron's parser."""
    return add_flags(parser, THEMES)


def check_arguments(args: Any) -> None:
    """Refuse flags under which training would hang or differ from what it was without packing.

    Prints the `start_messages` of those that run.

    Args:
        args: Megatron's arguments, validated.

    Raises:
        DynamicBatchArgumentError: listing every problem with what to set instead.
    """
    options = Options.of(args)
    if not is_on(args):
        if options.exchanges_samples:
            raise DynamicBatchArgumentError(
                f"{PREFIX}exchange and {PREFIX}context-parallel move samples of dynamic "
                f"micro-batches: set {FLAG} as well"
            )
        return
    problems = _problems(args)
    try:
        dims = _parallel_dims(args)
        planner = options.planner_config(dims)
        options.given_cost_model()
        options.checked_timeout_seconds()
    except (DynamicBatchArgumentError, ConfigError, ParallelDimsError) as error:
        problems.append(str(error))
    if problems:
        raise DynamicBatchArgumentError(
            f"{FLAG} cannot run with these settings:\n"
            + "\n".join(f"  - {problem}" for problem in problems)
        )
    from megatron.training.arguments import core_transformer_config_from_args

    config = core_transformer_config_from_args(args)
    by_engine = compat.HAVE_TRANSFORMER_ENGINE and args.transformer_impl == "transformer_engine"
    check_model_config(config, dims, planner, installed_versions() if by_engine else None)
    print_start_messages(args, config)


def check_training(
    forward_step_func: Callable[..., Any], process_non_loss_data_func: Any = None
) -> None:
    """Refuse a training script that cannot run packed, before its first step.

    Args:
        forward_step_func: the script's forward step.
        process_non_loss_data_func: the one that the script gave to ``pretrain``.

    Raises:
        DynamicBatchArgumentError: with what to change in the script.
    """
    from megatron.training import get_args

    if not is_on(get_args()):
        return
    if process_non_loss_data_func is not None:
        raise DynamicBatchArgumentError(
            "process_non_loss_data_func runs forward passes on the last rank alone, where planning "
            f"with all ranks would hang: do not give it to pretrain, or drop {FLAG}"
        )
    use_packed_batches(forward_step_func)


def _parallel_dims(args: Any) -> ParallelDims:
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


def _problems(args: Any) -> list[str]:
    def given(name: str) -> bool:
        return bool(getattr(args, name, None))

    problems = [problem for name, problem in _REFUSED.items() if given(name)]
    if given("reset_attention_mask") and not given("reset_position_ids"):
        problems.append(
            "--reset-attention-mask alone does not say where documents begin: set "
            "--reset-position-ids as well"
        )
    if not given("calculate_per_token_loss"):
        problems.append(
            "without --calculate-per-token-loss Megatron averages over micro-batches, and what "
            "shares one would change the loss: set --calculate-per-token-loss"
        )
    if given("hybrid_layer_pattern") or given("is_hybrid_model"):
        problems.append(
            "state-space layers carry their state from sample to sample of a row: train a model "
            "of attention layers, or unset the flag"
        )
    # A factor of 0 would be a capacity, too.
    if getattr(args, "moe_expert_rank_capacity_factor", None) is not None:
        problems.append(
            "with a capacity, which tokens are dropped depends on what shares their micro-batch: "
            "unset --moe-expert-rank-capacity-factor"
        )
    return problems
