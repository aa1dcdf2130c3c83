"""What most jobs have: arguments, a function for `forward_only`, differences, tokens counted."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

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


def no_optimizer() -> SimpleNamespace:
    """In place of an optimizer, which changes no weights and leaves gradients as they are."""
    return SimpleNamespace(
        zero_grad=lambda: None, scale_loss=lambda x: x, step=lambda: (True, 0.0, 0)
    )


def log_probs_of(
    logits: torch.Tensor, *, micro_batch: PackedMicroBatch
) -> dict[str, list[torch.Tensor]]:
    """What the tests give to `forward_only`."""
    return {"log_probs": response_log_probs(logits, micro_batch)}


def positions_here(total_length: int) -> torch.Tensor:
    """Where the tokens stand in their sample that this context-parallel rank has in slime's row."""
    size = parallel_state.get_context_parallel_world_size()
    rank = parallel_state.get_context_parallel_rank()
    if size == 1:
        return torch.arange(total_length)
    chunk = -(-total_length // (2 * size))
    chunks = ((n * chunk, (n + 1) * chunk) for n in (rank, 2 * size - 1 - rank))
    return torch.cat([torch.arange(*ends) for ends in chunks])


def log_probs_by_lengths(
    logits: torch.Tensor,
    *,
    unconcat_tokens: list[torch.Tensor],
    total_lengths: list[int],
    response_lengths: list[int],
    **unused: Any,
) -> dict[str, list[torch.Tensor]]:
    """Log-probs of whole responses, of tokens found by lengths as slime's functions find them."""
    here = [positions_here(total) for total in total_lengths]
    # Those whose next token is one of the sample's, and where they stand in this rank's row.
    known = [places + 1 < total for places, total in zip(here, total_lengths, strict=True)]
    starts = itertools.accumulate(map(len, here), initial=0)
    at = [start + each.nonzero()[:, 0] for start, each in zip(starts, known, strict=False)]
    following = [places[each] + 1 for places, each in zip(here, known, strict=True)]
    targets = torch.zeros(logits.shape[:2], dtype=torch.int64, device=logits.device)
    for tokens, places, each in zip(unconcat_tokens, at, following, strict=True):
        targets[0, places] = tokens[each]
    row = -vocab_parallel_cross_entropy(logits.float().clone(), targets)[0]
    found = []
    for total, response, places, each in zip(
        total_lengths, response_lengths, at, following, strict=True
    ):
        whole = row.new_zeros(total)
        whole[each] = row[places]
        dist.all_reduce(whole, group=parallel_state.get_context_parallel_group())
        found.append(whole[total - response :])
    return {"log_probs": found}


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
