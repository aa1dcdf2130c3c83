"""Log-probabilities and entropies of response tokens, from a model's logits.

With a vocabulary of 150k the logits of a row are by far its largest tensor, and every float32 copy
of them is another 10 GB at 16k tokens. So nothing here has the shape of all logits: rows are cast
to float32 a chunk at a time, and only those that predict a response token; the backward pass
computes the softmax again, and writes the gradient over the logits, which nothing reads by then.
With ``--dynamic-batch-logits-in-model-dtype`` the logits themselves take half as much, with
``--dynamic-batch-fuse-output-layer`` (`FusedLogits`) they are never made.

Both are differentiable. With x the logits of a token over the temperature, h their highest,
S = sum exp(x - h), p = exp(x - h) / S:

    log-probability   x_target - h - log S        gradient by x   [i = target] - p_i
    entropy H         log S - sum p (x - h)                       -p_i (log p_i + H)

Sums over the vocabulary are sums over the tensor-parallel ranks: each rank sums exp(x - h) with the
highest entry h of its own part; once all have the highest of all, its sums are scaled to that. Two
all-reduces, of one and of two or three numbers a token, whatever the chunks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor
from torch.autograd.function import once_differentiable

from mcore_batching.batch import BatchError, PackedMicroBatch
from mcore_batching.batch.row import PerSample, gather_own_values
from mcore_batching.batch.values import as_number, describe, shape_of
from mcore_batching.megatron.logits import FusedLogits, present_use, whole_hidden
from mcore_batching.megatron.topology import context_parallel_group
from mcore_batching.planning.integers import as_integer
from mcore_batching.planning.plans.memory import LOG_PROB_CHUNK_TOKENS

LOWEST = torch.finfo(torch.float32).min
"""In place of -inf, of which a difference with itself would be NaN."""
_NEGLIGIBLE = -1000.0
"""Below the highest logit: exp of it, and of all that is less, is 0 in float32."""


@dataclasses.dataclass(frozen=True)
class Options:
    """Temperature, tokens at a time, and True for a second column, of entropies."""

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
        """Statistics of logits ``[1, tokens, local vocabulary]`` at positions, each at most once.

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
        """Gradient of the logits, in their storage where nothing else reads them."""
        logits, positions = ctx.saved_tensors
        # Logits are the largest tensor of a step: a gradient beside them would double them. One
        # that others read, or a leaf, keeps its values.
        in_place = ctx.readers is not None and len(ctx.readers) == 1 and not logits.is_leaf
        in_place = in_place and logits.is_contiguous()
        gradient = logits if in_place else torch.zeros_like(logits)
        rows, into = logits[0], gradient[0]
        softmax: _Softmax = ctx.softmax
        for part in softmax.parts:
            of_chunk = softmax.gradient(part, rows.index_select(0, positions[part]), grads)
            if in_place and len(softmax.parts) == 1:
                into.zero_()  # of all its logits, nothing is read again
            into.index_copy_(0, positions[part], of_chunk)
            del of_chunk  # or it lasts until the next chunk's is made
        # Prompt tokens have no gradient; in place their rows still hold logits.
        if in_place and len(softmax.parts) > 1:
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
        """Statistics of ``[tokens, hidden size]``, alike on tensor ranks, times the weight ``[local
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
        self.elsewhere: Tensor | None = None  # bool [positions, 1], if ranks share the vocabulary
        if self.group.size() > 1:
            targets = targets - self.group.rank() * vocabulary
            self.elsewhere = ((targets < 0) | (targets >= vocabulary))[:, None]
        # A target of another rank's part is looked up anywhere, and masked.
        self.targets = targets[:, None].clamp(0, vocabulary - 1)
        # One part at least: the tensors of no positions are results, too.
        starts = range(0, max(targets.numel(), 1), options.chunk_tokens)
        self.parts = [slice(start, start + options.chunk_tokens) for start in starts]

    def measure(self, logits_of: Callable[[slice], Tensor]) -> Tensor:
        """``[positions, 1 or 2]``: log-probability, and entropy if wanted.

        ``logits_of`` gives ``[part, local vocabulary]``, a copy that is written over.
        """
        found = [self._measured(part, logits_of(part)) for part in self.parts]
        columns = found[0]
        if len(found) > 1:
            columns = [torch.cat(each) for each in zip(*found, strict=True)]
        highest, target, total, *weighted = columns
        # Each rank's sums are relative to its own highest; scaled to the highest of all, they add.
        if self.elsewhere is not None and len(target):
            down = highest.clone()
            dist.all_reduce(highest, dist.ReduceOp.MAX, group=self.group)
            down.sub_(highest).clamp_(min=LOWEST)
            target = (target + down).masked_fill_(self.elsewhere, 0.0)
            # A part may be as low as numbers go: times its sum that would be none.
            weighted = [each + down.clamp(min=_NEGLIGIBLE) * total for each in weighted]
            scaled = [each * down.exp() for each in (total, *weighted)]
            sums = torch.cat([target, *scaled], 1)
            dist.all_reduce(sums, group=self.group)
            target, total, *weighted = torch.split(sums, 1, dim=1)
        self.highest, self.totals = highest, total
        if not weighted:
            return target - total.log()
        self.entropy = total.log() - weighted[0] / total
        return torch.cat([target - total.log(), self.entropy], 1)

    def _measured(self, part: slice, logits: Tensor) -> list[Tensor]:
        """Measure a chunk: the highest logit, and relative to it the target's, the sum of
        exponentials and, for entropies, their sum weighted by the logits: ``[part, 1]`` each."""
        x = self._scaled(logits)
        del logits
        # Not -inf, of which a rank's part may consist: the difference would be NaN.
        highest = x.amax(-1, keepdim=True).clamp_(min=LOWEST)
        target = x.sub_(highest).gather(1, self.targets[part])
        if not self.options.with_entropy:
            return [highest, target, x.exp_().sum(-1, keepdim=True)]
        weights = x.exp()
        x.clamp_(min=_NEGLIGIBLE)  # 0 times the -inf of a masked entry would be NaN
        weighted = torch.bmm(weights[:, None], x[:, :, None])[:, 0]
        return [highest, target, weights.sum(-1, keepdim=True), weighted]

    def gradient(self, part: slice, logits: Tensor, grads: Tensor) -> Tensor:
        """Gradient by a chunk's logits, as `measure` was given them, which are written over.

        ``grads``: ``[positions, 1 or 2]``, by what `measure` returned.
        """
        dtype = logits.dtype  # the gradient's, as autograd expects
        own = grads[part]
        if self.options.temperature != 1.0:
            own = own / self.options.temperature
        x = self._scaled(logits).sub_(self.highest[part])
        del logits
        totals = self.totals[part]
        if self.options.with_entropy:
            log_p = x.clamp(min=_NEGLIGIBLE).sub_(totals.log())
            p = x.exp_().div_(totals)
            log_p.add_(self.entropy[part]).mul_(own[:, 1:]).add_(own[:, :1])
            made = p.mul_(log_p).neg_()
            del p, log_p
        else:
            made = x.exp_().mul_(own / -totals)
        # [i = target] of the first column's gradient, on the rank that has the target.
        at_target = own[:, :1]
        if self.elsewhere is not None:
            at_target = at_target.masked_fill(self.elsewhere[part], 0.0)
        return made.scatter_add_(1, self.targets[part], at_target).to(dtype)

    def _scaled(self, logits: Tensor) -> Tensor:
        x = logits.float()  # a copy, except of float32 logits: their chunk is one already
        return x.div_(self.options.temperature) if self.options.temperature != 1.0 else x


def response_log_probs(
    logits: Tensor,
    row: PackedMicroBatch,
    *,
    temperature: float = 1.0,
    chunk_tokens: int = LOG_PROB_CHUNK_TOKENS,
    overwrite_logits: bool = True,
) -> list[Tensor]:
    """Log-probability of every response token, whole responses on every rank; differentiable.

    Args:
        logits: ``[1, local tokens, local vocabulary]`` of any floating-point type, as the model's
            last chunk returns them; or `FusedLogits`.
        row: the micro-batch that they were computed from.
        temperature: divides the logits.
        chunk_tokens: tokens of which float32 copies are held at a time. The default, 512, takes
            0.3 GB at a vocabulary of 152k, where 16k tokens take 10, and leaves kernels 10 million
            entries when eight ranks share the vocabulary.
        overwrite_logits: write the gradient over the logits in the backward pass. False if another
            function's backward pass reads the same logits, or anybody does later.

    Returns:
        float32 ``[response_length]`` for each sample of the row. A token without a predecessor
        (the response is the whole sample) has log-probability 0 and no gradient.

    Raises:
        BatchError: the logits' shape is not that of the row.
        ValueError: ``temperature`` is not positive, or ``chunk_tokens`` less than 1.
    """
    options = Options(temperature, chunk_tokens, with_entropy=False)
    found = _gathered(logits, row, options, overwrite_logits)
    return PerSample(found.squeeze(1), row)


def response_log_probs_and_entropy(
    logits: Tensor,
    row: PackedMicroBatch,
    *,
    temperature: float = 1.0,
    chunk_tokens: int = LOG_PROB_CHUNK_TOKENS,
    overwrite_logits: bool = True,
) -> tuple[list[Tensor], list[Tensor]]:
    """Log-probability of every response token, and entropy of what it was drawn from, in one pass.

    Args: those of `response_log_probs`.

    Returns:
        two lists of float32 ``[response_length]``, both differentiable; the entropies in nats, of
        the distribution at ``temperature``, 0 for tokens without a predecessor.

    Raises: as `response_log_probs`.
    """
    options = Options(temperature, chunk_tokens, with_entropy=True)
    found = _gathered(logits, row, options, overwrite_logits)
    return PerSample(found[:, 0], row), PerSample(found[:, 1], row)


def log_probs_of_all(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Log-probability of each of the labels ``[1, local tokens]``, float32 of their shape, from
    `whole_hidden` states and the weight that makes logits of them."""
    positions = torch.arange(len(hidden), device=hidden.device)
    options = Options(1.0, LOG_PROB_CHUNK_TOKENS, with_entropy=False)
    product = cast(Any, StatisticsOfProduct)
    values: Tensor = product.apply(hidden, weight, positions, labels[0], options)
    return values[:, 0][None]


def _gathered(
    logits: Tensor, row: PackedMicroBatch, options: Options, overwrite_logits: bool
) -> Tensor:
    """``[R, 1 or 2]`` of the row's response tokens: log-probability, and entropy if wanted."""
    # Tensor-parallel ranks have to agree on it: each divides its own part of the vocabulary.
    use = present_use()
    use.temperatures.add(float(options.temperature))
    # What something else has read is there, and may be read again: no second product.
    if isinstance(logits, FusedLogits) and logits.whole is not None:
        logits, overwrite_logits = logits.whole, False
    expected = row.tokens.shape[1]
    shape = shape_of(logits) if isinstance(logits, Tensor) else None
    if shape is None or len(shape) != 3 or shape[:2] != (1, expected) or not shape[2]:
        raise BatchError(
            f"expected logits of shape [1, {expected}, vocabulary], got "
            f"{describe(logits) if shape is None else list(shape)}"
        )
    # Logits that a loss gathered or cut have the wrong part of the vocabulary on each rank.
    is_whole = shape[2] == (use.vocabulary or shape[2])
    if not is_whole and parallel_state.get_tensor_model_parallel_world_size() > 1:
        raise BatchError(
            f"expected logits of this tensor-parallel rank's {use.vocabulary} entries of the "
            f"vocabulary, got {shape[2]}: do not gather or cut them"
        )
    # Only the response tokens that this context-parallel rank holds; the others' values come in
    # `gather_own_values`.
    responses, repeated = row.responses, row.responses.distinct_positions
    positions = responses.owned_positions if repeated is None else repeated
    positions = positions.to(logits.device)
    targets = row.labels[0].index_select(0, positions)
    if isinstance(logits, FusedLogits):
        product = cast(Any, StatisticsOfProduct)
        hidden = whole_hidden(logits.hidden, sequence_parallel=logits.sequence_parallel)
        values = product.apply(hidden, logits.weight, positions, targets, options)
    else:
        # One entry for each call: two of them must not both write over the logits.
        readers: list[None] | None = None
        if overwrite_logits and logits.requires_grad and torch.is_grad_enabled():
            readers = vars(logits).setdefault("differentiable_calls", [])
            readers.append(None)
        values = cast(Any, StatisticsOfLogits).apply(logits, positions, targets, options, readers)
    # Samples that share a position have its values each; their gradients add up there.
    if responses.distinct_indices is not None:
        values = values.index_select(0, responses.distinct_indices.to(values.device))
    return gather_own_values(values, row, group=context_parallel_group(row))
