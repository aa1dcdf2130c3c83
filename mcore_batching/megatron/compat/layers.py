"""Kinds of layers, what they can run and record, and their specs."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer import multi_token_prediction
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

try:
    import transformer_engine  # noqa: F401

    HAVE_TRANSFORMER_ENGINE = True
except ImportError:
    HAVE_TRANSFORMER_ENGINE = False


def is_engines_attention(module: Any) -> bool:
    """True if a module is Megatron's wrapper of Transformer Engine's attention."""
    if not HAVE_TRANSFORMER_ENGINE:
        return False
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    return isinstance(module, TEDotProductAttention)


def engine_versions() -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Major and minor version of Transformer Engine and of the cuDNN that it runs."""
    from megatron.core.utils import get_te_version
    from transformer_engine.pytorch.utils import get_cudnn_version

    return get_te_version().release[:2], get_cudnn_version()[:2]


def has_engines_attention(model: Any) -> bool:
    """True if a module of the model is Megatron's wrapper of Transformer Engine's attention."""
    return HAVE_TRANSFORMER_ENGINE and any(map(is_engines_attention, model.modules()))


def class_of_forward(layer: Any) -> str:
    """Name of the Megatron class that has the layer's forward pass; empty if none has it."""
    forward = type(layer).forward
    if not str(getattr(forward, "__module__", "")).startswith("megatron.core."):
        return ""
    return str(forward.__qualname__.partition(".")[0])


def has_hybrid_model() -> bool:
    """True if this Megatron has `HybridModel` (from 0.18 on)."""
    return importlib.util.find_spec("megatron.core.models.hybrid") is not None


def scatters_padding_mask(model: Any) -> bool:
    """True if a model's first stage scatters its padding mask under sequence parallelism."""
    # GPTModel does, HybridModel hands it on as it is.
    return bool(model.pre_process) and not hasattr(model, "hybrid_layer_pattern")


def packs_gated_delta_net(layer: Any) -> bool:
    """True if this Megatron's GatedDeltaNet runs packed rows (from 0.18 on)."""
    return hasattr(layer, "_resolve_cu_seqlens")


def packs_sparse_attention() -> bool:
    """True if this Megatron's DeepSeek sparse attention runs packed rows (from 0.19 on)."""
    from megatron.core.transformer import experimental_attention_variant

    name = f"{experimental_attention_variant.__name__}.dsa_layout"
    return importlib.util.find_spec(name) is not None


def what_mamba_lacks(context_parallel: int) -> str:
    """The packages that Mamba layers lack to run packed rows; empty if none."""
    from megatron.core.ssm import mamba_context_parallel, mamba_mixer

    check = mamba_mixer._check_mamba_sequence_packing_support
    is_there, lacks = check(for_inference_not_training=False)
    if not is_there:
        return f"more than is installed: {lacks}"
    mend = "install it, or set --context-parallel-size 1"
    if context_parallel > 1 and mamba_context_parallel.tex is None:
        return f"Transformer Engine under context parallelism: {mend}"
    return ""


def why_no_plain_product(layer: Any) -> str:
    """Differences of an output layer from the product with its weight; empty if there are none."""
    if type(layer) is not ColumnParallelLinear:
        return f"is a {type(layer).__name__}"
    if layer.bias is not None:
        return "has a bias"
    if layer.gather_output:
        return "gathers its output (parallel_output=False)"
    if getattr(layer, "gtp_remat_size", 1) > 1:  # from 0.19 on
        return "gathers its weight (generalized tensor parallelism)"
    return ""


def gpt_layer_spec(config: Any, *, use_transformer_engine: bool) -> ModuleSpec:
    """Megatron's own layer spec for this model's shape, with or without Transformer Engine."""
    from megatron.core.models.gpt import gpt_layer_specs as specs

    engines, local = (
        specs.get_gpt_layer_with_transformer_engine_spec,
        specs.get_gpt_layer_local_spec,
    )
    make = engines if use_transformer_engine else local
    options = {
        "num_experts": config.num_moe_experts,
        "moe_grouped_gemm": config.moe_grouped_gemm,
        "qk_layernorm": config.qk_layernorm,
        "multi_latent_attention": config.multi_latent_attention,
        "normalization": config.normalization,  # Transformer Engine's layers read it themselves
    }
    known = inspect.signature(make).parameters
    return make(**{k: v for k, v in options.items() if k in known})


def fix_router_masks() -> None:
    """Let routers leave padding out, also in a row that is all padding. Patches Megatron once.

    Three faults of 0.16.1 to 0.19.2 under a mask: the count for the expert bias multiplies a
    ``[tokens, experts]`` map with a ``[tokens]`` mask, which does not broadcast; the load-balancing
    loss divides by the square of the number of real tokens, so that a placeholder's 0 becomes NaN;
    the local count of tokens is summed over tensor- and context-parallel ranks in place, and from
    0.19 on multiplied by their number again. And a loss is logged with the model's group, where the
    router has the row's (`packed_rows.let_router_have_groups`): logs are summed once a step.
    """
    from megatron.core.transformer.moe import router

    if getattr(router, "masks_are_fixed", False):
        return
    apply_expert_bias = router.TopKRouter._apply_expert_bias
    load_balancing_loss = router.switch_load_balancing_loss_func
    count_tokens = router.get_tokens_per_expert_and_token_count
    attach_and_log = router.TopKRouter.attach_and_log_load_balancing_loss
    multiplies, ranks_of = multiplies_by_ranks(), dist.get_process_group_ranks

    def with_second_axis(self: Any, routing_map: Tensor, padding_mask: Any = None) -> Any:
        if padding_mask is not None and padding_mask.dim() == routing_map.dim() - 1:
            padding_mask = padding_mask.unsqueeze(-1)
        return apply_expert_bias(self, routing_map, padding_mask=padding_mask)

    def of_at_least_one_token(*args: Any, total_num_tokens: Any, **kwargs: Any) -> Any:
        if torch.is_tensor(total_num_tokens):
            total_num_tokens = total_num_tokens.clamp(min=1)
        return load_balancing_loss(*args, total_num_tokens=total_num_tokens, **kwargs)

    def with_count_of_row(*args: Any, reduce_group: Any, **kwargs: Any) -> Any:
        per_expert, local, total = count_tokens(*args, reduce_group=reduce_group, **kwargs)
        # A row's own group, of data- and context-parallel ranks, is without these.
        tensor = parallel_state.get_tensor_model_parallel_group()
        if tensor.size() > 1 and not {*ranks_of(tensor)} <= {*ranks_of(reduce_group)}:
            per_expert = reduce_from_tensor_model_parallel_region(per_expert, tensor)
            counted = total if torch.is_tensor(total) else per_expert.new_tensor(total)
            total = reduce_from_tensor_model_parallel_region(counted, tensor)
        # Only the loss's weight reads the local count. A rank's loss is its part of the row's, so
        # the weight is the row's tokens, however unevenly ranks hold padding.
        if torch.is_tensor(total):
            local = total / reduce_group.size() if multiplies else total
        return per_expert, local, total

    @functools.wraps(attach_and_log)
    def with_models_group(
        self: Any, probs: Tensor, weight: float, loss: Tensor, name: str, group: Any, **others: Any
    ) -> Any:
        group = getattr(self, "models_group", group)
        return attach_and_log(self, probs, weight, loss, name, group, **others)

    router.TopKRouter.attach_and_log_load_balancing_loss = with_models_group
    router.TopKRouter._apply_expert_bias = with_second_axis
    router.get_tokens_per_expert_and_token_count = with_count_of_row
    router.switch_load_balancing_loss_func = of_at_least_one_token
    router.masks_are_fixed = True


def multiplies_by_ranks() -> bool:
    """True if routers weight a rank's auxiliary losses by its tokens times the tensor- and
    context-parallel ranks (from 0.19 on), False if by its tokens alone."""
    from megatron.core.transformer.moe.router import TopKRouter

    code = inspect.unwrap(TopKRouter.attach_and_log_load_balancing_loss).__code__
    return {"tp_cp_group", "size"} <= set(code.co_names)


def scale_moe_metrics(micro_batches: int, *, rows: float, passes: int) -> None:
    """Turn the losses that routers have recorded since the last report into means.

    Args:
        micro_batches: that stock code divides these sums by.
        rows: run by each replica, by which losses that ranks of a row add up are divided.
        passes: of each rank, by which losses are divided that each rank has of its own tokens.
    """
    for recorded in _moe_metrics().values():
        entry = recorded if isinstance(recorded, dict) else vars(recorded)
        is_added_up = entry["reduce_group"] is not None
        entry["values"].mul_(micro_batches / (rows if is_added_up else passes))


def _moe_metrics() -> Any:
    """Megatron's own dict of what routers have recorded by name: a dict each until 0.17."""
    try:
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    except ImportError:  # until 0.17
        from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

        return get_moe_layer_wise_logging_tracker()
    return get_moe_metrics_tracker().metrics


def modules_with_multi_token_losses() -> list[Any]:
    """The modules of models in which ``process_mtp_loss`` is looked up; none before 0.17."""
    modules = []
    for name in ("gpt.gpt_model", "mamba.mamba_model", "hybrid.hybrid_model"):
        with contextlib.suppress(ImportError):
            modules.append(importlib.import_module(f"megatron.core.models.{name}"))
    return [module for module in modules if hasattr(module, "process_mtp_loss")]


def what_multi_token_prediction_lacks() -> str:
    """Why this Megatron's multi-token prediction cannot run packed rows; empty if it can."""
    if not modules_with_multi_token_losses():
        return "of packed rows runs from Megatron-LM 0.17 on"
    rolled = [*inspect.signature(multi_token_prediction.roll_tensor).parameters]
    if rolled[:5] != ["tensor", "shifts", "dims", "cp_group", "packed_seq_params"]:
        return "of this Megatron-LM rolls its rows in a way that is not known here"
    return ""


def recomputes_multi_token_rows() -> bool:
    """True if this Megatron recomputes multi-token prediction of packed rows (from 0.19 on)."""
    # 0.17 saves a row's parameters as tensors, 0.18 passes on a mask that it does not take.
    layer = multi_token_prediction.MultiTokenPredictionLayer
    return "padding_mask" in inspect.signature(layer._checkpointed_forward).parameters


def log_multi_token_loss(
    share: Tensor, guessed: Tensor, trained: Tensor, depth: int, depths: int
) -> None:
    """Add this rank's share of a depth's loss to Megatron's log, which averages over ranks.

    ``share``: times what stock code divides by. ``guessed``: tokens guessed right, of those
    ``trained``; logged from 0.19 on. ``depth``: from 0 on.
    """
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    helper = multi_token_prediction.MTPLossLoggingHelper
    share = share * group.size()
    if hasattr(helper, "save_metrics_to_tracker"):
        helper.save_metrics_to_tracker(share, guessed, trained, depth, depths, avg_group=group)
    else:
        helper.save_loss_to_tracker(share, depth, depths, avg_group=group)


def multi_token_hits(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Numbers of tokens guessed and of tokens trained, as Megatron counts them from 0.19 on."""
    count = getattr(multi_token_prediction, "_compute_mtp_acceptance_counts", None)
    if count is None:
        return (torch.zeros((), device=torch.cuda.current_device()),) * 2
    found: tuple[Tensor, Tensor] = count(*arguments)
    return found
