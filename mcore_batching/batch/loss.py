"""Shares of a step's loss, which add up to its mean however samples were packed.

A share is one micro-batch's part of a mean over the whole step: its numerator over the *step's*
denominator. Shares of all micro-batches on all ranks add up to the mean, so means with different
denominators can be added, and nothing is ever averaged over micro-batches:

    micro-batch 1    values [6.0, 2.0]    micro-batch 2    values [1.0]
    token_mean       8 / 3                                 1 / 3            sum 3.0
    sample_mean      4 / 2                                 1 / 2            sum 2.5

    loss = token_mean(policy_loss, row, totals) + 0.01 * sample_mean(kl, row, totals)

The share of a placeholder is exactly 0, and it counts 0 in every denominator; so does a padding
sample (field ``is_padding``). Shares stay attached to the graph even where they are 0. Under
context parallelism each rank counts the response tokens that it predicts itself. A response token
without a predecessor (the response is the whole sample) is never predicted and counts nowhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from mcore_batching.batch.context_parallel import owned_response_mask
from mcore_batching.batch.errors import BatchError
from mcore_batching.batch.packed import PackedMicroBatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTotals:
    """Sums over the samples of an optimizer step: the denominators of its means.

    Attributes:
        num_samples: real samples, trainable tokens or not.
        num_trained_samples: samples whose loss mask is not all zero.
        num_tokens: predicted response tokens whose loss mask is not zero.
        token_weight: sum of the loss masks of the predicted response tokens.
    """

    num_samples: int = 0
    num_trained_samples: int = 0
    num_tokens: int = 0
    token_weight: float = 0.0

    def __add__(self, other: StepTotals) -> StepTotals:
        return StepTotals(
            **{
                field.name: getattr(self, field.name) + getattr(other, field.name)
                for field in dataclasses.fields(self)
            }
        )


def response_loss_masks(row: PackedMicroBatch) -> list[Tensor]:
    """Loss weight of every response token, 0 where nothing predicts it.

    Returns:
        float32 ``[response_length]`` for each sample; all of them 0 for a padding sample and in a
        placeholder. The same on all context-parallel ranks. They are the row's own: not to be
        changed in place.
    """
    return list(torch.split(row.responses.loss_masks, row.response_lengths))


def step_totals(rows: Iterable[PackedMicroBatch]) -> StepTotals:
    """Totals over this data-parallel rank's micro-batches of a step, each sample counted once.

    The same on all ranks of a replica, context-parallel ones included.
    """
    totals = StepTotals()
    for row in rows:
        if row.is_placeholder:
            continue
        masks = response_loss_masks(row)
        totals += StepTotals(
            num_samples=len(masks) - sum(row.fields.get("is_padding", ())),
            num_trained_samples=sum(int(bool(mask.any())) for mask in masks),
            num_tokens=sum(int(mask.count_nonzero()) for mask in masks),
            token_weight=sum(float(mask.double().sum()) for mask in masks),
        )
    return totals


def token_mean(per_token: Sequence[Tensor], row: PackedMicroBatch, totals: StepTotals) -> Tensor:
    """Share of the mean over all trainable tokens of the step.

        token_mean([tensor([6.0, 2.0])], row, StepTotals(token_weight=3.0, ...))    8 / 3

    Args:
        per_token: ``[response_length]`` for each sample of the row, whole responses on every
            context-parallel rank.
        row: the micro-batch.
        totals: of the whole step, over all ranks.

    Returns:
        scalar; the shares of all micro-batches and ranks add up to
        ``sum(mask * value) / sum(mask)``, to 0 if the step has no trainable token.

    Raises:
        BatchError: a value's length is not its sample's response length.
    """
    return _weighted_sum(per_token, row, response_loss_masks(row)) / (totals.token_weight or 1.0)


def sample_mean(
    per_token: Sequence[Tensor],
    row: PackedMicroBatch,
    totals: StepTotals,
    *,
    over_trained_samples: bool = False,
) -> Tensor:
    """Share of the mean over samples of each sample's own mean over its trainable tokens.

        sample_mean([tensor([6.0, 2.0])], row, StepTotals(num_samples=2, ...))    4 / 2

    A sample without trainable tokens contributes 0. It counts in the denominator, as it does
    where frameworks divide by the batch size, unless ``over_trained_samples`` is set.

    Args:
        per_token: as for `token_mean`.
        row: the micro-batch.
        totals: of the whole step, over all ranks.
        over_trained_samples: divide by the samples that have a trainable token.

    Returns:
        scalar; the shares add up to the mean.

    Raises:
        BatchError: a value's length is not its sample's response length.
    """
    # A sample whose mask is all zero divides 0 by 1, not by 0.
    weights = [mask / (mask.sum() + (mask.sum() == 0)) for mask in response_loss_masks(row)]
    count = totals.num_trained_samples if over_trained_samples else totals.num_samples
    return _weighted_sum(per_token, row, weights) / (count or 1)


def owned_num_tokens(row: PackedMicroBatch) -> int:
    """Trainable tokens that this context-parallel rank predicts.

    Adds up over all micro-batches and ranks to ``StepTotals.num_tokens``.
    """
    return int((row.responses.loss_masks.bool() & row.responses.owned).sum())


def _weighted_sum(
    per_token: Sequence[Tensor], row: PackedMicroBatch, weights: Sequence[Tensor]
) -> Tensor:
    if len(per_token) != len(weights):
        raise BatchError(
            f"expected values of {len(weights)} samples, got {len(per_token)}: give one tensor "
            "for each sample of the micro-batch, a placeholder's included"
        )
    parts = []
    for i, (value, weight, owned) in enumerate(
        zip(per_token, weights, owned_response_mask(row), strict=True)
    ):
        if value.shape != weight.shape:
            raise BatchError(
                f"sample {i} of the micro-batch: expected values of shape {list(weight.shape)} "
                f"(its response length), got {list(value.shape)}"
            )
        # Not multiplied by a zero mask alone: 0 · inf would turn a masked token into NaN. Not
        # indexed by it either: the host would wait for the device.
        keep = owned & (weight != 0)
        parts.append((torch.where(keep, value.float(), 0.0) * weight).sum())
    return torch.stack(parts).sum()
