"""Mixtures of experts: routers, and what they record."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def fix_router_masks() -> None:
    """Let routers leave padding out, also in a row that is all padding. Patches Megatron once.

    Three faults of 0.16.1 to 0.19.2 under a mask: the count for the expert bias multiplies a
    ``[tokens, experts]`` map with a ``[tokens]`` mask, which does not broadcast; the load-balancing
    loss divides by the square of the number of real tokens, so that a placeholder's 0 becomes NaN;
    the local count of tokens is summed over tensor- and context-parallel ranks in place, and from
    0.19 on multiplied by their number again.
    """
    from megatron.core.transformer.moe import router

    if getattr(router, "masks_are_fixed", False):
        return
    apply_expert_bias = router.TopKRouter._apply_expert_bias
    load_balancing_loss = router.switch_load_balancing_loss_func
    count_tokens = router.get_tokens_per_expert_and_token_count
    multiplies = multiplies_by_ranks()

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
        # Only the loss's weight reads the local count. A rank's loss is its part of the row's, so
        # the weight is the row's tokens, however unevenly ranks hold padding.
        if torch.is_tensor(total):
            local = total / reduce_group.size() if multiplies else total
        return per_expert, local, total

    router.TopKRouter._apply_expert_bias = with_second_axis
    router.get_tokens_per_expert_and_token_count = with_count_of_row
    router.switch_load_balancing_loss_func = of_at_least_one_token
    router.masks_are_fixed = True


def multiplies_by_ranks() -> bool:
    """True if routers weight a rank's auxiliary losses by its tokens times the tensor- and
    context-parallel ranks (from 0.19 on), False if by its tokens alone."""
    from megatron.core.transformer.moe.router import TopKRouter

    code = TopKRouter.attach_and_log_load_balancing_loss.__code__
    return {"tp_cp_group", "size"} <= set(code.co_names)


def scale_moe_metrics(factor: float) -> None:
    """Multiply the losses that routers have recorded since the last report.

    ``factor``: micro-batches that stock code divides these sums by, over those that ran.
    """
    for recorded in _moe_metrics().values():
        (recorded["values"] if isinstance(recorded, dict) else recorded.values).mul_(factor)


def _moe_metrics() -> Any:
    """Megatron's own dict of what routers have recorded by name: a dict each until 0.17."""
    try:
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    except ImportError:  # until 0.17
        from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

        return get_moe_layer_wise_logging_tracker()
    return get_moe_metrics_tracker().metrics
