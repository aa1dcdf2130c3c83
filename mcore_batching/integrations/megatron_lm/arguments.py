"""The plugin's flags in stock training scripts, and the settings that do not go with them.

All that are refused are listed at once, each with the fix, before any process group or model is
made; those that train slightly differently are printed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mcore_batching.flags import PREFIX
from mcore_batching.integrations.dims import job_dims
from mcore_batching.integrations.megatron_lm.script_batches import FLAG, use_packed_batches
from mcore_batching.megatron.checks.settings import check_model_config, has_auxiliary_loss
from mcore_batching.megatron.errors import DynamicBatchArgumentError, refuse
from mcore_batching.megatron.job import say
from mcore_batching.megatron.options import Options
from mcore_batching.planning import ConfigError, ParallelDimsError

NO_NON_LOSS_DATA = (
    "process_non_loss_data_func runs the model on one rank, planning needs all: do not give it to "
    f"pretrain, or unset {FLAG}"
)

# Arguments that must be unset; one that this release lacks counts as unset.
_REFUSED = {
    "dynamic_batch_share_prefixes": (
        f"stock scripts train every token, so samples share none: unset {PREFIX}share-prefixes"
    ),
    "dataloader_inter_document_masking": (
        "--dataloader-inter-document-masking packs rows itself: set --reset-attention-mask and "
        "--reset-position-ids instead"
    ),
    "sequence_packing_scheduler": f"{FLAG} replaces it: unset --sequence-packing-scheduler",
    "hybrid_context_parallel": "it makes schedules of its own: unset --hybrid-context-parallel",
    "iterations_to_skip": "--iterations-to-skip draws batches of a fixed size: unset it",
    "logits_load_dir": "cached teacher logits are of other rows: unset --logits-load-dir",
    "modelopt_enabled": "ModelOpt expects rows of seq_length: unset --modelopt-enabled",
    "perform_rl_step": (
        "Megatron's RL loop packs sequences itself: unset --perform-rl-step, or build a loop on "
        "mcore_batching.megatron.get_data_iterator"
    ),
    "reuse_grad_buf_for_mxfp8_param_ag": (
        "shared buffers are untested: unset --reuse-grad-buf-for-mxfp8-param-ag"
    ),
}


def is_on(args: Any) -> bool:
    """True under ``--use-dynamic-batch-size``."""
    return bool(getattr(args, "use_dynamic_batch_size", False))


def check_arguments(args: Any) -> Any:
    """These arguments; flags under which packed training would hang or differ are refused, and
    `start_messages` printed.

    Raises:
        DynamicBatchArgumentError: listing every problem with what to set instead.
    """
    options = Options.of(args)
    if is_on(args) and getattr(args, "use_varlen_dataset", False):
        # Megatron sets one for this data where none is given.
        args.sequence_packing_scheduler = None
    # Alone these two change nothing, which a user would take for a gain that does not come.
    if not is_on(args):
        if options.exchange or options.max_context_parallel is not None:
            raise DynamicBatchArgumentError(
                f"{PREFIX}exchange and {PREFIX}context-parallel do nothing alone: set {FLAG}"
            )
        return args
    problems = _problems(args)
    try:
        dims = job_dims(
            args,
            sequence_parallel=bool(args.sequence_parallel),
            microbatch_group_size=getattr(args, "microbatch_group_size_per_vp_stage", None),
        )
        planner = options.planner_config(dims)
        options.given_cost_model()
        options.checked_timeout_seconds()
    except (DynamicBatchArgumentError, ConfigError, ParallelDimsError) as error:
        problems.append(str(error))
    refuse(FLAG, problems)
    from megatron.training.arguments import core_transformer_config_from_args

    config = core_transformer_config_from_args(args)
    check_model_config(config, dims, planner)
    if args.rank == 0:
        for message in start_messages(args, config):
            say(message)
    return args


def check_training(
    forward_step_func: Callable[..., Any], process_non_loss_data_func: Any = None
) -> None:
    """Refuse a training script that cannot run packed rows, before its first step.

    Raises:
        DynamicBatchArgumentError: with what to change in the script.
    """
    from megatron.training import get_args

    if not is_on(get_args()):
        return
    if process_non_loss_data_func is not None:
        raise DynamicBatchArgumentError(NO_NON_LOSS_DATA)
    use_packed_batches(forward_step_func)


def _problems(args: Any) -> list[str]:
    def given(name: str) -> bool:
        return bool(getattr(args, name, None))

    problems = [problem for name, problem in _REFUSED.items() if given(name)]
    if given("reset_attention_mask") and not given("reset_position_ids"):
        problems.append(
            "--reset-attention-mask needs --reset-position-ids, which marks documents: set both"
        )
    if not given("calculate_per_token_loss"):
        problems.append(
            "packing would change a mean over micro-batches: set --calculate-per-token-loss"
        )
    if given("full_validation") and (given("sft") or not given("multiple_validation_sets")):
        problems.append(
            "--full-validation raises TypeError in Megatron-LM itself beside --sft, and without "
            "--multiple-validation-sets: unset it and set --eval-iters"
        )
    # Not given(): a factor of 0 is a capacity too.
    if getattr(args, "moe_expert_rank_capacity_factor", None) is not None:
        problems.append(
            "packing changes which tokens exceed an expert's capacity: unset "
            "--moe-expert-rank-capacity-factor"
        )
    return problems


def start_messages(args: Any, config: Any) -> list[str]:
    """Differences from the same job without ``--use-dynamic-batch-size``, a sentence each."""
    messages = []
    if has_auxiliary_loss(config):
        messages.append(
            "the routers' load-balancing and z-losses are weighted by real tokens; without "
            "--use-dynamic-batch-size by padded ones, so there they weigh more against the "
            "language-model loss at the same --moe-aux-loss-coeff and --moe-z-loss-coeff"
        )
    if getattr(args, "sft", False):
        messages.append(
            "validation and test losses are means over the trained tokens of all ranks; without "
            "--use-dynamic-batch-size --sft logs means of micro-batches' means"
        )
    if (
        getattr(args, "reset_attention_mask", False)
        and getattr(args, "transformer_impl", None) == "transformer_engine"
    ):
        messages.append(
            "documents are separate, as --reset-attention-mask says; without "
            "--use-dynamic-batch-size Transformer Engine ignores that mask, and attention crosses "
            "documents"
        )
    return messages
