"""Log-probability of a target and entropy at each of some tokens, in chunks, differentiable.

With x the logits over the temperature, h their highest, S = sum exp(x - h), p = exp(x - h) / S:

    log-probability   x_target - h - log S        gradient by x   [i = target] - p_i
    entropy H         log S - sum p (x - h)                       -p_i (log p_i + H)

Sums over the vocabulary are sums over the tensor-parallel ranks: each rank sums exp(x - h) with the
highest entry h of its own part; once all know the highest of all, its sums are scaled to that. Two
all-reduces, of one and of two or three numbers a token, whatever the chunks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor
from torch.autograd.function import once_differentiable

from mcore_batching.batch.fields.value_shapes import as_number
from mcore_batching.planning.integers import as_integer

LOWEST = torch.finfo(torch.float32).min
"""In place of -inf, of which a difference with itself would be NaN."""
_NEGLIGIBLE = -1000.0
"""Below the highest logit: exp of it, and of all that is less, is 0 in float32."""


@dataclasses.dataclass(frozen=True)
class Options:
    """Temperature, tokens at a time, and a second column with entropies if asked for."""

    temperature: float
    chunk_tokens: int
    with_entropy: bool

    def __post_init__(self) -> None:
        temperature, tokens = as_number(self.temperature), as_integer(self.chunk_tokens)
        if temperature is None or not temperature > 0:
            raise ValueError(f"temperature must be a positive number, got {self.temperature!r}")
        if tokens is None or tokens < 1:
            raise ValueError(f"chunk_tokens must be 1 or more, got {self.chunk_tokens!r}")


class StatisticsOfLogits(torch.autograd.Function):
    """``[positions, 1 or 2]`` from logits that lie in memory."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        positions: Tensor,
        targets: Tensor,
        options: Options,
        readers: list[None] | None,
    ) -> Tensor:
        """Of logits ``[1, tokens, local vocabulary]`` at positions, each token at most once.

        Readers: one entry for each differentiable call on the logits; None: keep them whole.
        """
        rows = logits[0]
        softmax = _Softmax(targets, rows.shape[1], options)
        found = softmax.measure(lambda part: rows.index_select(0, positions[part]))
        ctx.save_for_backward(logits, positions)
        ctx.softmax, ctx.readers = softmax, readers
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradient of the logits, in their storage where nobody else reads them."""
        logits, positions = ctx.saved_tensors
        # Logits are the largest tensor of a step: a gradient beside them would double them. One
        # that others read, or a leaf, keeps its values.
        in_place = ctx.readers is not None and len(ctx.readers) == 1 and not logits.is_leaf
        gradient = logits if in_place and logits.is_contiguous() else torch.empty_like(logits)
        rows, into = logits[0], gradient[0]
        softmax: _Softmax = ctx.softmax
        for part in softmax.parts:
            of_chunk = softmax.gradient(part, rows.index_select(0, positions[part]), grads)
            into.index_copy_(0, positions[part], of_chunk)
            del of_chunk  # or it lasts until the next chunk's is made
        # Prompt tokens have no gradient; in place their rows still hold logits.
        others = torch.ones(rows.shape[0], dtype=torch.bool, device=rows.device)
        others.index_fill_(0, positions, False)
        into.masked_fill_(others[:, None], 0.0)
        return gradient.detach(), None, None, None, None


class StatisticsOfProduct(torch.autograd.Function):
    """``[positions, 1 or 2]`` from hidden states and the weight that makes logits of them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        positions: Tensor,
        targets: Tensor,
        options: Options,
    ) -> Tensor:
        """Of ``[tokens, hidden size]``, alike on tensor-parallel ranks, times the weight ``[local
        vocabulary, hidden size]``, at positions, each token at most once."""
        softmax = _Softmax(targets, weight.shape[0], options)
        found = softmax.measure(lambda part: hidden.index_select(0, positions[part]) @ weight.t())
        ctx.save_for_backward(hidden, weight, positions)
        ctx.softmax = softmax
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of this rank's part of the vocabulary."""
        hidden, weight, positions = ctx.saved_tensors
        by_hidden = torch.zeros_like(hidden)
        # Added up over chunks, in float32: half precision would lose the later ones.
        by_weight = torch.zeros_like(weight, dtype=torch.float32)
        softmax: _Softmax = ctx.softmax
        for part in softmax.parts:
            rows = hidden.index_select(0, positions[part])
            by_logits = softmax.gradient(part, rows @ weight.t(), grads)
            by_hidden.index_copy_(0, positions[part], by_logits @ weight)
            by_weight += by_logits.t() @ rows
            del by_logits  # or it lasts until the next chunk's is made
        return by_hidden, by_weight.to(weight.dtype), None, None, None


class _Softmax:
    """Softmax of logits that are seen a chunk of tokens at a time, twice if differentiated.

    Targets ``[positions]`` are of the whole vocabulary, of which this rank has ``vocabulary``.
    """

    def __init__(self, targets: Tensor, vocabulary: int, options: Options) -> None:
        self.group = parallel_state.get_tensor_model_parallel_group()
        self.options = options
        # A target of another rank's part is looked up anywhere, and masked.
        targets = targets - self.group.rank() * vocabulary
        self.elsewhere = (targets < 0) | (targets >= vocabulary)
        self.targets = targets.masked_fill(self.elsewhere, 0)
        starts = range(0, targets.numel(), options.chunk_tokens)
        self.parts = [slice(start, start + options.chunk_tokens) for start in starts]

    def measure(self, logits_of: Callable[[slice], Tensor]) -> Tensor:
        """``[positions, 1 or 2]``: log-probability, and entropy if asked for.

        ``logits_of`` gives ``[part, local vocabulary]``, a copy that is written over.
        """
        with_entropy = self.options.with_entropy
        count = self.targets.numel()
        highest = torch.empty(count, dtype=torch.float32, device=self.targets.device)
        sums = highest.new_zeros(2 + with_entropy, count)
        for part in self.parts:
            x = self._scaled(logits_of(part))
            # Not -inf, of which a rank's part may consist: the difference would be NaN.
            highest[part] = x.amax(-1).clamp_(min=LOWEST)
            x.sub_(highest[part, None])
            sums[0, part] = x.gather(1, self.targets[part, None])[:, 0]
            weights = x.exp() if with_entropy else x.exp_()
            sums[1, part] = weights.sum(-1)
            if with_entropy:
                x.clamp_(min=_NEGLIGIBLE)  # 0 times the -inf of a masked entry would be NaN
                sums[2, part] = torch.bmm(weights[:, None], x[:, :, None])[:, 0, 0]
            del x, weights
        # Each rank's sums are relative to its own highest; scaled to the highest of all, they add.
        if self.group.size() > 1 and count:
            down = highest.clone()
            dist.all_reduce(highest, dist.ReduceOp.MAX, group=self.group)
            down.sub_(highest).clamp_(min=LOWEST)
            sums[0] += down
            if with_entropy:
                # A part may be as low as numbers go: times its sum that would be none.
                sums[2] += down.clamp(min=_NEGLIGIBLE) * sums[1]
            sums[1:] *= down.exp()
            sums[0].masked_fill_(self.elsewhere, 0.0)
            dist.all_reduce(sums, group=self.group)
        self.highest, self.totals = highest, sums[1]
        found = [sums[0] - sums[1].log()]
        if with_entropy:
            self.entropy = sums[1].log() - sums[2] / sums[1]
            found.append(self.entropy)
        return torch.stack(found, 1)

    def gradient(self, part: slice, logits: Tensor, grads: Tensor) -> Tensor:
        """Gradient by a chunk's logits, as `measure` was given them, which are written over.

        ``grads``: ``[positions, 1 or 2]``, by what `measure` returned.
        """
        dtype = logits.dtype  # the gradient's, as autograd expects
        own = grads[part] / self.options.temperature
        x = self._scaled(logits).sub_(self.highest[part, None])
        del logits
        totals = self.totals[part, None]
        if self.options.with_entropy:
            log_p = x.clamp(min=_NEGLIGIBLE).sub_(totals.log())
            p = x.exp_().div_(totals)
            log_p.add_(self.entropy[part, None]).mul_(own[:, 1:]).add_(own[:, :1])
            made = p.mul_(log_p).neg_()
            del p, log_p
        else:
            made = x.exp_().div_(totals).mul_(-own)
        # [i = target] of the first column's gradient, on the rank whose part has the target.
        at_target = own[:, :1].masked_fill(self.elsewhere[part, None], 0.0)
        return made.scatter_add_(1, self.targets[part, None], at_target).to(dtype)

    def _scaled(self, logits: Tensor) -> Tensor:
        x = logits.float()  # a copy, but of float32 logits, whose chunk is a copy already
        return x.div_(self.options.temperature) if self.options.temperature != 1.0 else x
