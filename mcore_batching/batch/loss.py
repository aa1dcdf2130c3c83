"""Shares of a step's loss, which add up to its mean however samples were packed.

A share is one micro-batch's numerator over the whole *step's* denominator, so losses with different
denominators can be added, and nothing is averaged over micro-batches:

    micro-batch 1    values [6.0, 2.0]    micro-batch 2    values [1.0]
    token_mean       8 / 3                                 1 / 3            sum 3.0
    sample_mean      4 / 2                                 1 / 2            sum 2.5
    token_sum        8                                     1                sum 9.0, by no divisor
    trajectory_mean  of turns of one trajectory 8 / 3 / 1  1 / 3 / 1        sum 3.0

    loss = token_mean(policy_loss, row, totals) + 0.01 * sample_mean(kl, row, totals)

Placeholders and padding samples add exactly 0 to every numerator and denominator; their shares stay
attached to the graph. Under context parallelism each rank counts the response tokens that it
predicts; a token that nothing predicts (the first of a sample without a prompt) counts nowhere.

Shares add up for losses that are sums of values per token or per sample. A loss that selects or
normalizes within the micro-batch it is given depends on the packing; see `StepTotals`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Hashable, Mapping, Sequence

import torch
from torch import Tensor

from mcore_batching.batch.columns import Columns, sent
from mcore_batching.batch.errors import BatchError
from mcore_batching.batch.row import PackedMicroBatch, flat_values
from mcore_batching.planning import LengthError
from mcore_batching.planning.groups import group_key


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTotals:
    """Denominators of an optimizer step's means.

    These are all that a loss learns of the step. What it selects (tokens of the largest covariance,
    the top tenth) or normalizes (whitened advantages) within its micro-batch depends on the samples
    that share the row: compute that over the whole batch before `get_data_iterator`, or from the
    outputs of `forward_only`, and hand it to the loss as a field (`add_fields`).

    Attributes:
        num_samples: real samples, with or without trainable tokens.
        num_trained_samples: samples with a loss mask that is not all zero.
        num_tokens: predicted response tokens with a loss mask other than zero.
        token_weight: sum of the loss masks of the predicted response tokens.
        trajectory_weights: the same sum of each trajectory, by ``(uid, trajectory id)`` where
            samples have ``uids``; empty where they have no ``trajectory_ids``.
        prompt_weights: the same sum of each prompt, by ``uids``; empty where there are none.
    """

    num_samples: int = 0
    num_trained_samples: int = 0
    num_tokens: int = 0
    token_weight: float = 0.0
    trajectory_weights: Mapping[Hashable, float] = dataclasses.field(
        default_factory=dict, repr=False
    )
    prompt_weights: Mapping[Hashable, float] = dataclasses.field(default_factory=dict, repr=False)


def step_totals(
    columns: Columns, depths: int = 0, *, has_labels: bool = False
) -> tuple[StepTotals, list[float]]:
    """The totals of some samples of a step, on the data-parallel rank that counts them.

    Args:
        columns: the samples.
        depths: of multi-token prediction.
        has_labels: as of `RowBlock`.

    Returns:
        their totals; sums of their loss weights, and of those of tokens that are predicted at each
        depth of multi-token prediction.
    """
    by_depth = [columns.weight_sums(depth, has_labels=has_labels) for depth in range(depths + 1)]
    weights, counts = by_depth[0]
    groups: dict[str, dict[Hashable, float]] = {"trajectory_ids": {}, "uids": {}}
    for name, found in groups.items():
        # Ids that name no groups are no fault of a loss that has no use for these groups.
        with contextlib.suppress(LengthError):
            keys = _group_keys(columns, name) or [None] * len(weights)
            for key, weight in zip(keys, weights.tolist(), strict=True):
                if key is not None:
                    found[key] = found.get(key, 0.0) + weight
    sums = [math.fsum(each.tolist()) for each, _ in by_depth]
    totals = StepTotals(
        num_samples=len(weights) - sum(columns.is_padding),
        num_trained_samples=int((counts > 0).sum()),
        num_tokens=int(counts.sum()),
        token_weight=sums[0],
        trajectory_weights=groups["trajectory_ids"],
        prompt_weights=groups["uids"],
    )
    return totals, sums


def _group_keys(columns: Columns, name: str) -> list[Hashable] | None:
    """The group of each sample by a field of ids, None of padding; None without the field."""
    if name not in columns:
        return None
    values = enumerate(zip(columns[name], columns.is_padding, strict=True))
    keys = [None if is_padding else group_key(value, i) for i, (value, is_padding) in values]
    # Some frameworks number the trajectories of each prompt from 0.
    prompts = _group_keys(columns, "uids") if name == "trajectory_ids" else None
    if prompts is None:
        return keys
    pairs = zip(prompts, keys, strict=True)
    return [None if key is None else (prompt, key) for prompt, key in pairs]


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
    weights, span = row.responses.loss_masks, row.fields.response_span
    lengths = sent(span.lengths, weights.device)
    sums = torch.segment_reduce(weights.double(), "sum", lengths=lengths, unsafe=True).float()
    # Where the mask is all zero: 0 / 1, not 0 / 0.
    sums = torch.repeat_interleave(sums + (sums == 0), lengths, output_size=span.total)
    return _weighted_sum(per_token, row, weights / sums) / (count or 1)


def trajectory_mean(
    per_token: Sequence[Tensor], row: PackedMicroBatch, totals: StepTotals
) -> Tensor:
    """Share of the mean over trajectories of each one's mean over its trainable tokens.

        trajectory_mean([tensor([6.0, 2.0])], row, StepTotals(trajectory_weights={7: 3.0, 8: 1.0}))
        8 / 3 / 2, for a turn of trajectory 7

    The turns of a trajectory, the samples with its ``trajectory_ids`` (and ``uids``, if there are
    any), may be in any micro-batch on any rank. A trajectory without trainable tokens adds 0 and
    counts in the denominator, as a sample does in `sample_mean`.

    Arguments are those of `token_mean`.

    Raises:
        BatchError: as `token_mean`; no ``trajectory_ids``; or totals of another step.
    """
    return _group_mean(per_token, row, "trajectory_ids", totals.trajectory_weights)


def prompt_mean(per_token: Sequence[Tensor], row: PackedMicroBatch, totals: StepTotals) -> Tensor:
    """Share of the mean over prompts of each one's mean over the trainable tokens of all its
    samples, which ``uids`` name; else as `trajectory_mean`."""
    return _group_mean(per_token, row, "uids", totals.prompt_weights)


def token_sum(
    per_token: Sequence[Tensor], row: PackedMicroBatch, totals: StepTotals, *, divisor: float = 1.0
) -> Tensor:
    """Share of the sum over all trainable tokens of the step, over a constant.

        token_sum([tensor([6.0, 2.0])], row, totals, divisor=4)    8 / 4

    Arguments and errors are those of `token_mean`. Dr. GRPO's loss is
    ``token_sum(values, row, totals, divisor=longest_response * totals.num_samples)``.
    """
    # Read for `train_step`, which warns of a loss that has not looked at the step.
    _ = totals.token_weight
    return _weighted_sum(per_token, row, row.responses.loss_masks) / divisor


def _group_mean(
    per_token: Sequence[Tensor],
    row: PackedMicroBatch,
    name: str,
    totals: Mapping[Hashable, float],
) -> Tensor:
    """Share of the mean over groups of each one's mean over its trainable tokens."""
    masks, span = row.responses.loss_masks, row.fields.response_span
    if row.is_placeholder:
        return _weighted_sum(per_token, row, masks)
    keys = _group_keys(row.fields, name)
    if keys is None:
        raise BatchError(f"a mean over groups needs {name}; give one per sample in rollout_data")
    for key in keys:
        if key is not None and key not in totals:
            raise BatchError(
                f"{name} {key!r:.60} of the row is not among the {len(totals)} of the totals; pass "
                "on the totals that the loss was given"
            )
    # What has no weight is masked throughout: 0 / 1, not 0 / 0.
    of_samples = torch.tensor([totals.get(key) or 1.0 for key in keys], device="cpu")
    weights, lengths = sent(of_samples, masks.device), sent(span.lengths, masks.device)
    weights = torch.repeat_interleave(weights, lengths, output_size=span.total)
    return _weighted_sum(per_token, row, masks / weights) / (len(totals) or 1)


def _weighted_sum(per_token: Sequence[Tensor], row: PackedMicroBatch, weights: Tensor) -> Tensor:
    lengths = row.response_lengths
    if len(per_token) != len(lengths):
        raise BatchError(
            f"expected values of {len(lengths)} samples, got {len(per_token)}; give one tensor "
            "per sample, for a placeholder too"
        )
    values = flat_values(per_token, lengths)
    if values is None:
        _require_lengths(per_token, lengths)
        values = torch.cat([*per_token])
    if row.context_parallel_size > 1:  # each rank counts the tokens that it predicts
        own = row.responses.owned_indices
        values, weights = values.index_select(0, own), weights.index_select(0, own)
    # Masked, since 0 · inf is NaN; not by an index, since the host would wait for its size.
    weighted = values.float().masked_fill(weights == 0, 0.0) * weights
    # In double precision: packing, and so padding samples, should not show in the sum.
    return weighted.sum(dtype=torch.float64).float()


def _require_lengths(per_token: Sequence[Tensor], lengths: Sequence[int]) -> None:
    for i, (value, length) in enumerate(zip(per_token, lengths, strict=True)):
        # Broadcasting would multiply a mean, or a value short by one token, without a word.
        if value.shape != (length,):
            raise BatchError(
                f"sample {i} of the row: expected values of shape {[length]}, its response length, "
                f"got {list(value.shape)}"
            )
