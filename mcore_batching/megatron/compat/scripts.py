"""Stock training scripts: their start, their options and their log."""

from __future__ import annotations

from typing import Any


def modules_with_validate_args(arguments: Any, initialize: Any) -> list[Any]:
    """The modules of ``megatron.training`` in which ``validate_args`` is looked up.

    Until 0.17 ``initialize`` imports it by name.
    """
    return [arguments, initialize] if hasattr(initialize, "validate_args") else [arguments]


def counts_operations_of_samples() -> bool:
    """True if stock code counts floating-point operations by samples' lengths (from 0.18 on)."""
    from megatron.training import training

    return hasattr(training, "consume_seqlen_stats_in_iteration")
