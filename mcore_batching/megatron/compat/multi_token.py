"""Losses of multi-token prediction over packed rows, as Megatron computes and logs them."""

from __future__ import annotations

import contextlib
import importlib
import inspect
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer import multi_token_prediction
from torch import Tensor


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
