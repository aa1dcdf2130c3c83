"""What most jobs have: arguments, a function for `forward_only`, differences, tokens counted."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from kit.samples import CAP_TOKENS
from mcore_batching.batch import PackedMicroBatch
from mcore_batching.megatron import response_log_probs
from mcore_batching.planning import ParallelDims


def arguments(dims: ParallelDims, **changes: Any) -> SimpleNamespace:
    """Megatron's arguments, as far as the engine reads them; plans do not depend on times."""
    defaults = {
        "max_tokens_per_gpu": CAP_TOKENS // dims.context_parallel,
        "global_batch_size": None,
        "seq_length": 1,
        "dynamic_batch_cost_model": "fixed",
    }
    return SimpleNamespace(**defaults | changes)


def log_probs_of(
    logits: torch.Tensor, *, micro_batch: PackedMicroBatch
) -> dict[str, list[torch.Tensor]]:
    """What the tests give to `forward_only`."""
    return {"log_probs": response_log_probs(logits, micro_batch)}


def difference(
    ours: torch.Tensor, reference: torch.Tensor, whole: torch.Tensor | None = None
) -> float:
    """Largest difference, relative to the largest entry of the reference, or of ``whole``, of which
    the reference is a part."""
    if not reference.numel():
        return 0.0
    scale = float((reference if whole is None else whole).abs().max()) or 1.0
    return float((ours - reference).abs().max()) / scale


@contextlib.contextmanager
def counted_tokens(model: list[Any]) -> Iterator[list[int]]:
    """Tokens that this rank's embedding gets in each call inside the block, padding among them."""
    seen: list[int] = []
    hooks = [
        module.register_forward_hook(lambda *call: seen.append(call[1][0].numel()))
        for chunk in model
        for name, module in chunk.named_modules()
        if name.endswith("word_embeddings")
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
