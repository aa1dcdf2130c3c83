"""Log-probabilities and entropies of response tokens, from a model's logits.

With a vocabulary of 150k the logits of a row are by far its largest tensor, and every float32 copy
of them is another 10 GB at 16k tokens. So nothing here has the shape of all logits: rows are cast
to float32 a chunk at a time, and only those that predict a response token; the backward pass
computes the softmax again, and writes the gradient over the logits, which nobody reads by then.
"""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.weak import WeakTensorKeyDictionary

from mcore_batching.batch import BatchError, PackedMicroBatch
from mcore_batching.batch.context_parallel import gather_own_values

CHUNK_TOKENS = 512
"""Tokens cast to float32 at a time: at a vocabulary of 152k a copy takes 0.3 GB, of 16k tokens' 10,
and kernels over a chunk still have 10 million entries when eight ranks share the vocabulary."""


def response_log_probs(
    logits: Tensor,
    row: PackedMicroBatch,
    *,
    temperature: float = 1.0,
    chunk_tokens: int = CHUNK_TOKENS,
    overwrite_logits: bool = True,
) -> list[Tensor]:
    """Log-probability of every response token, whole responses on every rank.

    Differentiable, over tensor-parallel ranks (the vocabulary is split) and context-parallel ranks
    (the tokens are split) alike.

    Args:
        logits: ``[1, local tokens, local vocabulary]``, what the last stage's chunk returns, in any
            floating-point type; computed with in float32.
        row: the micro-batch that they were computed from.
        temperature: divides the logits.
        chunk_tokens: tokens of which float32 copies are held at a time.
        overwrite_logits: write the gradient over the logits in the backward pass. Not done if this
            module's functions were called on them more than once, nor for leaves. False if another
            function's backward pass reads the same logits, or anybody does later.

    Returns:
        float32 ``[response_length]`` for each sample of the row. A token without a predecessor
        (the response is the whole sample) has log-probability 0 and no gradient.

    Raises:
        BatchError: the logits' shape is not that of the row.
        ValueError: ``temperature`` is not positive, or ``chunk_tokens`` less than 1.
    """
    options = _Options(temperature, chunk_tokens, with_entropy=False)
    found = _gathered(logits, row, options, overwrite_logits)
    return [values[:, 0] for values in found]


def response_log_probs_and_entropy(
    logits: Tensor,
    row: PackedMicroBatch,
    *,
    temperature: float = 1.0,
    chunk_tokens: int = CHUNK_TOKENS,
    overwrite_logits: bool = True,
) -> tuple[list[Tensor], list[Tensor]]:
    """Log-probability of every response token, and entropy of what it was drawn from, in one pass.

    Args: those of `response_log_probs`.

    Returns:
        two lists of float32 ``[response_length]``, both differentiable; the entropies in nats, of
        the distribution at ``temperature``, 0 for tokens without a predecessor.

    Raises: as `response_log_probs`.
    """
    options = _Options(temperature, chunk_tokens, with_entropy=True)
    found = _gathered(logits, row, options, overwrite_logits)
    return [values[:, 0] for values in found], [values[:, 1] for values in found]


@torch.no_grad()
def response_entropy(
    logits: Tensor,
    row: PackedMicroBatch,
    *,
    temperature: float = 1.0,
    chunk_tokens: int = CHUNK_TOKENS,
) -> list[Tensor]:
    """Entropy, in nats, of the distribution from which each response token was drawn.

    Not differentiable; meant for metrics. `response_log_probs_and_entropy` is.

    Args: those of `response_log_probs`.

    Returns:
        float32 ``[response_length]`` for each sample of the row.

    Raises: as `response_log_probs`.
    """
    _, entropy = response_log_probs_and_entropy(
        logits, row, temperature=temperature, chunk_tokens=chunk_tokens
    )
    return entropy


@dataclasses.dataclass(frozen=True)
class _Options:
    temperature: float
    chunk_tokens: int
    with_entropy: bool

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"temperature must be positive, got {self.temperature}")
        if self.chunk_tokens < 1:
            raise ValueError(f"chunk_tokens must be 1 or more, got {self.chunk_tokens}")


_readers: Any = WeakTensorKeyDictionary()  # its methods have no types
"""Logits to one entry for each differentiable call on them."""


def _gathered(
    logits: Tensor, row: PackedMicroBatch, options: _Options, overwrite_logits: bool
) -> list[Tensor]:
    """``[response_length, 1 or 2]`` for each sample: log-probability, and entropy if asked for."""
    expected = row.labels.shape[1]
    if logits.dim() != 3 or logits.shape[:2] != (1, expected):
        raise BatchError(
            f"expected logits of shape [1, {expected}, vocabulary], one row for each token of the "
            f"micro-batch on this rank, got {list(logits.shape)}"
        )
    readers: list[None] | None = None
    if overwrite_logits and logits.requires_grad and torch.is_grad_enabled():
        readers = _readers.setdefault(logits, [])
        readers.append(None)
    positions = row.responses.owned_positions.to(logits.device)
    targets = row.labels[0].index_select(0, positions)
    values = cast(Any, _TokenStatistics).apply(logits, positions, targets, options, readers)
    group = parallel_state.get_context_parallel_group()
    return gather_own_values(values, row, group=group if group.size() > 1 else None)


class _TokenStatistics(torch.autograd.Function):
    """Log-probability of a target at each of some positions, and entropy if asked for.

    With x the logits over the temperature, h their highest, S = sum exp(x - h), p = exp(x - h) / S:

        log-probability   x_target - h - log S        gradient by x   [i = target] - p_i
        entropy H         log S - sum p (x - h)                       -p_i (log p_i + H)

    Sums over the vocabulary are sums over the tensor-parallel ranks: two all-reduces, of one and of
    two or three numbers a token, whatever the chunks.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        positions: Tensor,
        targets: Tensor,
        options: _Options,
        readers: list[None] | None,
    ) -> Tensor:
        """``[positions, 1 or 2]``.

        Args:
            ctx: autograd's.
            logits: ``[1, tokens, local vocabulary]``.
            positions: ``[positions]``, each token at most once.
            targets: ``[positions]``, entries of the whole vocabulary.
            options: of the call.
            readers: one entry for each differentiable call on the logits; None: keep them whole.
        """
        group = parallel_state.get_tensor_model_parallel_group()
        vocabulary = logits.shape[-1]
        # A target of another rank's part is looked up anywhere, and masked.
        targets = targets - group.rank() * vocabulary
        elsewhere = (targets < 0) | (targets >= vocabulary)
        targets = targets.masked_fill(elsewhere, 0)
        rows = logits[0]
        count = positions.numel()
        parts = [
            slice(start, start + options.chunk_tokens)
            for start in range(0, count, options.chunk_tokens)
        ]
        highest = rows.new_empty(count, dtype=torch.float32)
        for part in parts:
            highest[part] = rows.index_select(0, positions[part]).amax(-1)
        highest /= options.temperature
        _reduce(highest, dist.ReduceOp.MAX, group)
        sums = rows.new_zeros((2 + options.with_entropy, count), dtype=torch.float32)
        for part in parts:
            x = _shifted(rows, positions[part], highest[part], options.temperature)
            sums[0, part] = x.gather(1, targets[part, None])[:, 0]
            weights = x.exp() if options.with_entropy else x.exp_()
            sums[1, part] = weights.sum(-1)
            if options.with_entropy:
                sums[2, part] = torch.bmm(weights[:, None], x[:, :, None])[:, 0, 0]
            del x, weights  # or they last until the next chunk's are made
        sums[0].masked_fill_(elsewhere, 0.0)
        _reduce(sums, dist.ReduceOp.SUM, group)
        found = [sums[0] - sums[1].log()]
        if options.with_entropy:
            found.append(sums[1].log() - sums[2] / sums[1])
        ctx.save_for_backward(logits, positions, targets, elsewhere, highest, sums[1], found[-1])
        ctx.options, ctx.parts, ctx.readers = options, parts, readers
        return torch.stack(found, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradient of the logits, in their storage where `_gathered` allows it."""
        logits, positions, targets, elsewhere, highest, totals, entropy = ctx.saved_tensors
        options: _Options = ctx.options
        in_place = ctx.readers is not None and len(ctx.readers) == 1 and not logits.is_leaf
        gradient = logits if in_place and logits.is_contiguous() else torch.empty_like(logits)
        rows, into = logits[0], gradient[0]
        grads = grads / options.temperature
        for part in ctx.parts:
            x = _shifted(rows, positions[part], highest[part], options.temperature)
            if options.with_entropy:
                log_p = x - totals[part, None].log()
                p = x.exp_().div_(totals[part, None])
                log_p.add_(entropy[part, None]).mul_(grads[part, 1:]).add_(grads[part, :1])
                chunk = p.mul_(log_p).neg_()
                del p, log_p
            else:
                chunk = x.exp_().div_(totals[part, None]).mul_(-grads[part])
            at_target = grads[part, :1].masked_fill(elsewhere[part, None], 0.0)
            chunk.scatter_add_(1, targets[part, None], at_target)
            into.index_copy_(0, positions[part], chunk.to(gradient.dtype))
            del x, chunk
        others = torch.ones(rows.shape[0], dtype=torch.bool, device=rows.device)
        others.index_fill_(0, positions, False)
        into.masked_fill_(others[:, None], 0.0)
        return gradient.detach(), None, None, None, None


def _shifted(rows: Tensor, positions: Tensor, highest: Tensor, temperature: float) -> Tensor:
    """Float32 rows at the positions, over the temperature, less their highest entries; a copy."""
    x = rows.index_select(0, positions).float()
    if temperature != 1.0:
        x /= temperature
    return x.sub_(highest[:, None])


def _reduce(values: Tensor, operation: Any, group: dist.ProcessGroup) -> None:
    if group.size() > 1 and values.numel():
        dist.all_reduce(values, operation, group=group)
