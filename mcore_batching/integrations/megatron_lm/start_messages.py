"""Messages at a job's start: accepted settings that behave slightly differently when packed."""

from __future__ import annotations

from typing import Any

from mcore_batching.megatron import compat
from mcore_batching.megatron.checks.validation import has_auxiliary_loss


def print_start_messages(args: Any, config: Any) -> None:
    """Print `start_messages` on rank 0."""
    if args.rank == 0:
        for message in start_messages(args, config):
            print(f"mcore_batching: {message}", flush=True)


def start_messages(args: Any, config: Any) -> list[str]:
    """Differences from the same job without ``--use-dynamic-batch-size``.

    Args:
        args: Megatron's arguments, validated.
        config: the model's `TransformerConfig`.

    Returns:
        one sentence per difference; empty where there is none.
    """
    messages = []
    if has_auxiliary_loss(config):
        messages.append(
            "the routers' load-balancing and z-losses are weighted by real tokens; without "
            "--use-dynamic-batch-size by padded ones, so there they weigh more against the "
            "language-model loss at the same --moe-aux-loss-coeff and --moe-z-loss-coeff"
        )
    if getattr(args, "log_throughput", False) and not compat.scripts.counts_operations_of_samples():
        messages.append(
            "this Megatron-LM computes TFLOP/s (--log-throughput) as if samples were padded to "
            "--seq-length: read them as too high by that padding; 0.18 and later count real tokens"
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
