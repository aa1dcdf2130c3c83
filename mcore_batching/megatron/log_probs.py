"""Log-probabilities of response tokens from a model's logits, sample by sample."""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from torch import Tensor

from mcore_batching.batch import PackedMicroBatch, gather_response


def response_log_probs(
    logits: Tensor, row: PackedMicroBatch, *, temperature: float = 1.0
) -> list[Tensor]:
    """Log-probability of every response token, whole responses on every rank.

    Differentiable, over tensor-parallel ranks (the vocabulary is split) and context-parallel ranks
    (the tokens are split) alike.

    Args:
        logits: ``[1, local tokens, local vocabulary]``, what the last stage's chunk returns.
        row: the micro-batch that they were computed from.
        temperature: divides the logits.

    Returns:
        float32 ``[response_length]`` for each sample of the row. A token without a predecessor
        (the response is the whole sample) has log-probability 0 and no gradient.
    """
    # The cross entropy works in place on float32 logits.
    scaled = logits.float() / temperature if temperature != 1.0 else logits.float()
    if scaled.data_ptr() == logits.data_ptr():
        scaled = scaled.clone()
    per_token = -vocab_parallel_cross_entropy(scaled, row.labels)
    return gather_response(per_token[0], row, group=_context_parallel_group())


def response_entropy(logits: Tensor, row: PackedMicroBatch) -> list[Tensor]:
    """Entropy, in nats, of the distribution from which each response token was drawn.

    Not differentiable under tensor parallelism; meant for metrics.

    Args:
        logits: as for `response_log_probs`.
        row: the micro-batch.

    Returns:
        float32 ``[response_length]`` for each sample of the row.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    with torch.no_grad():
        x = logits.float()
        highest = x.amax(-1, keepdim=True)
        if group.size() > 1:
            torch.distributed.all_reduce(highest, torch.distributed.ReduceOp.MAX, group=group)
        x = x - highest
        weights = x.exp()
        sums = torch.stack((weights.sum(-1), (weights * x).sum(-1)))
        if group.size() > 1:
            torch.distributed.all_reduce(sums, group=group)
        per_token = sums[0].log() - sums[1] / sums[0]
    return gather_response(per_token[0], row, group=_context_parallel_group())


def _context_parallel_group() -> torch.distributed.ProcessGroup | None:
    group = parallel_state.get_context_parallel_group()
    return group if group.size() > 1 else None
