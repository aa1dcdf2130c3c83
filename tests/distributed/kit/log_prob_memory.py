"""A job that measures the memory and the time of log-probabilities from logits."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from torch import Tensor

from mcore_batching.batch import DEFAULT_SCHEMA, PackedMicroBatch
from mcore_batching.batch.rows.pack import pack
from mcore_batching.megatron import (
    response_log_probs,
    response_log_probs_and_entropy,
)
from mcore_batching.megatron.logits.fused_output import FusedLogits
from mcore_batching.planning.plans.memory import LOG_PROB_CHUNK_TOKENS

HIDDEN = 32


def measure(
    tokens: int, vocabulary: int, dtype: str, response_share: float
) -> dict[str, dict[str, float]]:
    """Peak resident memory over the logits, in float32 copies of them, and seconds, of each way.

    The logits are the product of a small hidden state and a weight, as a model's last layer makes
    them, so that their gradient goes on to somebody. The fused way makes none. ``all``: with the
    logits themselves.
    """
    torch.set_num_threads(1)
    size = parallel_state.get_tensor_model_parallel_world_size()
    row = _row(tokens, vocabulary, response_share)
    unit = tokens * vocabulary // size * 4
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(tokens, HIDDEN, generator=generator).to(getattr(torch, dtype))
    weight = torch.randn(vocabulary // size, HIDDEN, generator=generator).to(hidden.dtype)
    found = {}
    for name, (log_probs, differentiable) in WAYS.items():
        hidden.grad = weight.grad = None
        hidden.requires_grad_()
        weight.requires_grad_()
        fused = log_probs is _fused
        logits: Any = FusedLogits(hidden[None], weight, False)
        if not fused:
            logits = (hidden @ weight.t())[None]
        torch.distributed.barrier()
        with torch.set_grad_enabled(differentiable):
            before = _resident()
            _reset_peak()
            started = time.perf_counter()
            total = log_probs(logits, row)
            forward = (_peak() - before) / unit
        backward = 0.0
        if differentiable:
            _reset_peak()
            del logits
            total.backward()
            backward = (_peak() - before) / unit
        found[name] = {
            "forward": forward,
            "backward": backward,
            "all": max(forward, backward) + (0.0 if fused else hidden.element_size() / 4),
            "seconds": time.perf_counter() - started,
        }
        del total
        logits = None
    return found


def _row(tokens: int, vocabulary: int, response_share: float) -> PackedMicroBatch:
    length = tokens // 4
    generator = torch.Generator().manual_seed(0)
    return pack(
        {
            "tokens": [torch.randint(vocabulary, (length,), generator=generator) for _ in range(4)],
            "total_lengths": [length] * 4,
            "response_lengths": [int(response_share * length)] * 4,
        },
        schema=DEFAULT_SCHEMA,
        sample_indices=(0, 1, 2, 3),
    )


def _ours(logits: Tensor, row: PackedMicroBatch) -> Tensor:
    return torch.cat(response_log_probs(logits, row)).sum()


def _fused(logits: FusedLogits, row: PackedMicroBatch) -> Tensor:
    both = response_log_probs_and_entropy(logits, row)
    return sum((torch.cat(each).sum() for each in both), start=torch.zeros(()))


def _ours_with_entropy(logits: Tensor, row: PackedMicroBatch) -> Tensor:
    both = response_log_probs_and_entropy(logits, row)
    return sum((torch.cat(each).sum() for each in both), start=logits.new_zeros(()))


def _our_entropy(logits: Tensor, row: PackedMicroBatch) -> Tensor:
    with torch.no_grad():
        return torch.cat(response_log_probs_and_entropy(logits, row)[1]).sum()


def _cross_entropy_of_a_copy(logits: Tensor, row: PackedMicroBatch) -> Tensor:
    """As this package did before."""
    scaled = logits.float()
    if scaled.data_ptr() == logits.data_ptr():
        scaled = scaled.clone()
    return _selected(-vocab_parallel_cross_entropy(scaled, row.labels)[0], row)


def _megatrons_own(logits: Tensor, row: PackedMicroBatch) -> Tensor:
    """Works in place where the logits are float32: their values are lost."""
    return _selected(-vocab_parallel_cross_entropy(logits.float(), row.labels)[0], row)


def _plain_chunks(logits: Tensor, row: PackedMicroBatch) -> Tensor:
    """All positions, a float32 softmax a chunk, recomputed for gradients that are concatenated."""
    targets = row.labels[0] % logits.shape[2]  # within this rank's part of the vocabulary
    return _selected(_PlainChunks.apply(logits[0], targets), row)  # type: ignore[no-untyped-call]


class _PlainChunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, targets: Tensor) -> Tensor:
        ctx.save_for_backward(rows, targets)
        return torch.cat(
            [
                torch.log_softmax(part.float(), -1).gather(1, target[:, None])[:, 0]
                for part, target in zip(
                    rows.split(LOG_PROB_CHUNK_TOKENS),
                    targets.split(LOG_PROB_CHUNK_TOKENS),
                    strict=True,
                )
            ]
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        rows, targets = ctx.saved_tensors
        gradients = []
        for part, target, grad in zip(
            rows.split(LOG_PROB_CHUNK_TOKENS),
            targets.split(LOG_PROB_CHUNK_TOKENS),
            grads[0].split(LOG_PROB_CHUNK_TOKENS),
            strict=True,
        ):
            gradient = torch.softmax(part.float(), -1).neg_()
            gradient.scatter_add_(1, target[:, None], torch.ones_like(grad)[:, None])
            gradients.append(gradient.mul_(grad[:, None]).to(rows.dtype))
        return torch.cat(gradients), None


def _selected(per_token: Tensor, row: PackedMicroBatch) -> Tensor:
    return per_token.index_select(0, row.responses.owned_positions).sum()


WAYS: dict[str, tuple[Callable[[Any, PackedMicroBatch], Tensor], bool]] = {
    "ours": (_ours, True),
    "ours, with entropy": (_ours_with_entropy, True),
    "ours, entropy alone": (_our_entropy, False),
    "ours, fused, with entropy": (_fused, True),
    "before: cross entropy of a copy": (_cross_entropy_of_a_copy, True),
    "Megatron's cross entropy, in place": (_megatrons_own, True),
    "plain chunks, all rows": (_plain_chunks, True),
}
"""Name to the sum of log-probabilities, and whether it is differentiated. The plain chunks do not
know of tensor parallelism: there they see a part of the vocabulary, which costs as much."""


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def _resident() -> int:
    return _status("VmRSS")


def _peak() -> int:
    return _status("VmHWM")


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")
