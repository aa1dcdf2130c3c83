"""Shares of a step's loss, which add up to its mean however samples were packed.

A share is one micro-batch's numerator over the whole *step's* denominator, so losses with different
denominators can be added, and nothing is averaged over micro-batches:

    micro-batch 1    values [6.0, 2.0]    micro-batch 2    values [1.0]
    token_mean       8 / 3                                 1 / 3            sum 3.0
    sample_mean      4 / 2                                 1 / 2            sum 2.5

    loss = token_mean(policy_loss, row, totals) + 0.01 * sample_mean(kl, row, totals)

Placeholders and padding samples add exactly 0 to every numerator and denominator; their shares stay
attached to the graph. Under context parallelism each rank counts the response tokens that it
predicts; a token that nothing predicts (the first of a sample without a prompt) counts nowhere.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from mcore_batching.batch.errors import BatchError
from mcore_batching.batch.row import PackedMicroBatch
from mcore_batching.batch.rows.pinned_buffer import sent


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTotals:
    """Denominators of an optimizer step's means.

    Attributes:
        num_samples: real samples, with or without trainable tokens.
        num_trained_samples: samples whose loss mask is not all zero.
        num_tokens: predicted response tokens whose loss mask is not zero.
        token_weight: sum of the loss masks of the predicted response tokens.
    """

    num_samples: int = 0
    num_trained_samples: int = 0
    num_tokens: int = 0
    token_weight: float = 0.0


def response_loss_masks(row: PackedMicroBatch) -> list[Tensor]:
    """Loss weight of every response token, float32 ``[response_length]`` for each sample: 0 where
    nothing predicts it. Views: do not change them in place."""
    return list(torch.split(row.responses.loss_masks, row.response_lengths))


def step_totals(rows: Iterable[PackedMicroBatch]) -> StepTotals:
    """Totals of this data-parallel rank's micro-batches; the same on its context-parallel ranks."""
    real = [row for row in rows if not row.is_placeholder]
    masks = [row.responses.loss_masks for row in real]
    # The sample of each trained token.
    trained = [
        row.index.responses.samples[mask.nonzero().squeeze(1).cpu()].tolist()
        for row, mask in zip(real, masks, strict=True)
    ]
    padding = [tag for row in real for tag in row.fields.get("is_padding", ())]
    return StepTotals(
        num_samples=sum(row.num_samples for row in real) - padding.count(True),
        num_trained_samples=sum(len({*samples}) for samples in trained),
        num_tokens=sum(map(len, trained)),
        # In double precision: micro-batches, and so packing, should not show in the sum.
        token_weight=math.fsum(float(mask.double().sum()) for mask in masks),
    )


def token_mean(per_token: Sequence[Tensor], row: PackedMicroBatch, totals: StepTotals) -> Tensor:
    """Share of the mean over all trainable tokens of the step.

        token_mean([tensor([6.0, 2.0])], row, StepTotals(token_weight=3.0, ...))    8 / 3

    Args:
        per_token: ``[response_length]`` for each sample of the row, as from `gather_response`:
            whole responses on every context-parallel rank.
        row: the micro-batch.
        totals: of the whole step, over all ranks.

    Returns:
        scalar; shares of all micro-batches and ranks add up to ``sum(mask * value) / sum(mask)``,
        or to 0 if the step has no trainable token.

    Raises:
        BatchError: a value's length is not its sample's response length.
    """
    return _weighted_sum(per_token, row, row.responses.loss_masks) / (totals.token_weight or 1.0)


def sample_mean(
    per_token: Sequence[Tensor],
    row: PackedMicroBatch,
    totals: StepTotals,
    *,
    over_trained_samples: bool = False,
) -> Tensor:
    """Share of the mean over samples of each sample's mean over its trainable tokens.

        sample_mean([tensor([6.0, 2.0])], row, StepTotals(num_samples=2, ...))    4 / 2

    Arguments and errors are those of `token_mean`. A sample without trainable tokens adds 0, and
    counts in the denominator unless ``over_trained_samples`` is set.
    """
    count = totals.num_trained_samples if over_trained_samples else totals.num_samples
    weights, span = row.responses.loss_masks, row.index.responses
    lengths = sent(span.lengths, weights.device)
    sums = torch.segment_reduce(weights.double(), "sum", lengths=lengths, unsafe=True).float()
    # Where the mask is all zero: 0 / 1, not 0 / 0.
    sums = torch.repeat_interleave(sums + (sums == 0), lengths, output_size=span.end)
    return _weighted_sum(per_token, row, weights / sums) / (count or 1)


def owned_num_tokens(row: PackedMicroBatch) -> int:
    """Trainable tokens that this rank predicts; summed over ranks ``StepTotals.num_tokens``."""
    return int((row.responses.loss_masks.bool() & row.responses.owned).sum())


def _weighted_sum(per_token: Sequence[Tensor], row: PackedMicroBatch, weights: Tensor) -> Tensor:
    lengths = row.response_lengths
    if len(per_token) != len(lengths):
        raise BatchError(
            f"expected values of {len(lengths)} samples, got {len(per_token)}; give one tensor "
            "per sample, for a placeholder too"
        )
    for i, (value, length) in enumerate(zip(per_token, lengths, strict=True)):
        # Broadcasting would multiply a mean, or a value short by one token, without a word.
        if value.shape != (length,):
            raise BatchError(
                f"sample {i} of the row: expected values of shape {[length]}, its response length, "
                f"got {list(value.shape)}"
            )
    values = torch.cat([*per_token]).float()
    # torch.where, since 0 · inf is NaN; not an index, since the host would wait for its size.
    keep = row.responses.owned & (weights != 0)
    weighted = torch.where(keep, values, 0.0) * weights
    # In double precision: packing, and so padding samples, should not show in the sum.
    return weighted.sum(dtype=torch.float64).float()
