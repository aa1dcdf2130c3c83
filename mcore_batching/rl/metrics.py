"""Metrics over the real samples of a batch, and z-scores of the unmasked values of tensors.

    sample_metrics(batch, ["rewards"], group=data_parallel_group)
    {"rewards/mean": 0.4, "rewards/max": 1.0, "rewards/min": 0.0}

With a ``group`` each of these is a collective over the values of all ranks, not a mean of means.
Every rank makes the same calls, even with no samples or all of them masked. An error on one rank is
raised on all. Over no values a metric is absent and a z-score 0.0, never NaN.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_batching.batch.agreement.consensus import Consensus, Statement
from mcore_batching.batch.agreement.figures import largest, least, total
from mcore_batching.batch.errors import BatchError
from mcore_batching.batch.fields.field_checks import num_samples, require_one_per_sample
from mcore_batching.planning.errors import Argument
from mcore_batching.planning.integers import entries
from mcore_batching.rl.real_samples import as_numbers, real_indices


def sample_metrics(
    batch: Mapping[str, Any], fields: Sequence[str], *, group: dist.ProcessGroup | None = None
) -> dict[str, float]:
    """Mean, maximum and minimum of per-sample numbers, over the real samples of all ranks.

    Args:
        batch: field name to one value per sample.
        fields: the same on every rank; each holds one number per sample.
        group: the ranks whose samples count together; None for this process alone.

    Returns:
        ``field/mean``, ``field/max`` and ``field/min`` for each field, the same on all ranks;
        none of them if there is no real sample.

    Raises:
        BatchError: on every rank, if on any a field is absent or does not have one number per
            sample, or if the fields differ between ranks.
    """

    def numbers() -> list[list[float]]:
        real = real_indices(batch)
        if not all(isinstance(name, str) for name in entries("fields", fields, BatchError)):
            raise BatchError(Argument("fields"), f" must hold names of fields, got {fields!r:.60}")
        return [_numbers(name, batch.get(name), real, num_samples(batch)) for name in fields]

    def says(numbers: list[list[float]]) -> Statement:
        return Statement(
            equal={"fields": list(fields)},
            figures={
                "counts": total([len(each) for each in numbers]),
                "sums": total([sum(each) for each in numbers]),
                "maxima": largest([max(each, default=-math.inf) for each in numbers]),
                "minima": least([min(each, default=math.inf) for each in numbers]),
            },
        )

    # Sums and counts travel, not means: ranks have different numbers of samples.
    agreed = Consensus(group).agree("summing up metrics", numbers, says)
    metrics: dict[str, float] = {}  # of no real sample on any rank none, not NaN
    found = (agreed.figures[name] for name in ("counts", "sums", "maxima", "minima"))
    for name, count, added, most, fewest in zip(fields, *found, strict=True):
        if count:
            metrics[f"{name}/mean"] = added / count
            metrics[f"{name}/max"] = most
            metrics[f"{name}/min"] = fewest
    return metrics


def _numbers(name: str, values: Any, real: Sequence[int], count: int) -> list[float]:
    """The values of the real samples."""
    use = ", to compute a metric of"
    require_one_per_sample(name, values, count, f" and each a number{use}")
    return as_numbers(name, values, real, use)


def masked_zscore(
    values: Sequence[Tensor],
    masks: Sequence[Tensor],
    *,
    group: dist.ProcessGroup | None = None,
    epsilon: float = 1e-8,
) -> list[Tensor]:
    """Values normalized to mean 0 and variance 1 over all ranks (whitening).

        masked_zscore([tensor([10., 20., 0.])], [tensor([1, 1, 0])])    [tensor([-1., 1., 0.])]

    Args:
        values: tensors of any shapes, or one ``[samples, tokens]`` tensor; masked ones may be NaN.
        masks: one of the same shape for each.
        group: the ranks whose values count together; None for this process alone.
        epsilon: added to the variance, so that equal values become 0.

    Returns:
        for each tensor one of its shape, device and floating type: ``(value - mean) /
        sqrt(variance + epsilon)``, 0 where the mask is 0.

    Raises:
        BatchError: on every rank, if on any there is not one mask of its shape for each tensor.
    """
    kept, mean, count = _kept_and_mean(values, masks, group)
    # From deviations: a difference of two large sums of squares would lose its digits.
    agreed = Consensus(group).agree(
        "adding up squared deviations",
        lambda: sum(float(((value - mean) ** 2).sum()) for value in kept),
        lambda squares: Statement(figures={"squares": total(squares)}),
    )
    variance = agreed.figures["squares"] / max(count, 1)
    scale = (variance + epsilon) ** -0.5 if variance + epsilon > 0 else 0.0  # epsilon may be 0
    scores = []
    for value, mask in zip(values, masks, strict=True):
        score = (value.detach().double() - mean) * scale  # no gradient: an advantage is a constant
        floating = value.dtype if value.is_floating_point() else torch.get_default_dtype()
        # torch.where, since 0 · NaN is NaN.
        scores.append(torch.where(mask != 0, score, 0.0).to(floating))
    return scores


def _kept_and_mean(
    values: Sequence[Tensor], masks: Sequence[Tensor], group: dist.ProcessGroup | None
) -> tuple[list[Tensor], float, int]:
    """This rank's unmasked values, flat, in float64; mean (0.0 of none) and count on all ranks."""
    agreed = Consensus(group).agree(
        "averaging masked values",
        lambda: _kept(values, masks),
        lambda kept: Statement(
            figures={
                "sum": total(sum(float(v.sum()) for v in kept)),
                "count": total(sum(v.numel() for v in kept)),
            }
        ),
    )
    count = agreed.figures["count"]
    return agreed.result, agreed.figures["sum"] / max(count, 1), count


def _kept(values: Sequence[Tensor], masks: Sequence[Tensor]) -> list[Tensor]:
    if len(values) != len(masks):
        raise BatchError(f"expected {len(values)} masks, one for each value, got {len(masks)}")
    for index, (value, mask) in enumerate(zip(values, masks, strict=True)):
        if value.shape != mask.shape:
            raise BatchError(
                f"mask {index} has shape {list(mask.shape)}, its value {list(value.shape)}; give "
                "each value its own mask"
            )
    # Picked, not multiplied: 0 · NaN is NaN. In float64, where a million addends keep their digits.
    return [value.detach()[mask != 0].double() for value, mask in zip(values, masks, strict=True)]
