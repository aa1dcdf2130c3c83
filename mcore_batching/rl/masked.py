"""Mean, variance and z-score of the values that a mask leaves, over one process or a group of them.

    masked_mean([tensor([1., 9.]), tensor([3.])], [tensor([1, 0]), tensor([1])])    2.0

Guarantees
- A value where the mask is 0 has no influence, NaN and infinity included.
- Over a group, the statistics are those of all ranks' values together, not a mean of means.
- The same collectives run on every rank in the same order, whatever it holds; a rank may hold no
  value, or no sample at all.
- Where no value is left anywhere, a statistic is None and a z-score 0.0, never NaN.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_batching.batch.errors import BatchError


def masked_mean(
    values: Sequence[Tensor], masks: Sequence[Tensor], *, group: dist.ProcessGroup | None = None
) -> float | None:
    """Mean of the values where the mask is not 0.

    A collective over ``group``.

    Args:
        values: any number of tensors of any shapes; a ``[samples, tokens]`` tensor will do.
        masks: one for each, of its shape.
        group: the ranks whose values count together; None for this process alone.

    Returns:
        the mean, None if there is no such value on any rank.

    Raises:
        BatchError: on every rank, if on any there is not one mask of its shape for each tensor.
    """
    return _kept_and_mean(values, masks, group)[1]


def masked_variance(
    values: Sequence[Tensor],
    masks: Sequence[Tensor],
    *,
    group: dist.ProcessGroup | None = None,
    correction: int = 0,
) -> float | None:
    """Mean squared deviation from the mean, of the values where the mask is not 0.

    A collective over ``group``.

    Args:
        values: as for `masked_mean`.
        masks: as for `masked_mean`.
        group: as for `masked_mean`.
        correction: 1 for the sample variance, that of ``count - 1`` degrees of freedom.

    Returns:
        the variance, None if there are no more values than ``correction``.

    Raises:
        BatchError: as `masked_mean`.
    """
    kept, mean, count = _kept_and_mean(values, masks, group)
    return _variance(kept, mean, count, group, correction)


def masked_zscore(
    values: Sequence[Tensor],
    masks: Sequence[Tensor],
    *,
    group: dist.ProcessGroup | None = None,
    epsilon: float = 1e-8,
) -> list[Tensor]:
    """Deviation from the mean in standard deviations (whitening).

    A collective over ``group``.

    Args:
        values: as for `masked_mean`.
        masks: as for `masked_mean`.
        group: as for `masked_mean`.
        epsilon: added to the variance, so that equal values become 0.

    Returns:
        for each tensor one of its shape, device and floating type: ``(value - mean) /
        sqrt(variance + epsilon)``, with the mean and variance of all ranks, and 0 where the mask
        is 0.

    Raises:
        BatchError: as `masked_mean`.
    """
    kept, mean, count = _kept_and_mean(values, masks, group)
    variance = _variance(kept, mean, count, group, 0)
    if mean is None or variance is None:
        mean, variance = 0.0, 0.0
    scale = (variance + epsilon) ** -0.5 if variance + epsilon > 0 else 0.0
    scores = []
    for value, mask in zip(values, masks, strict=True):
        score = (value.detach().double() - mean) * scale
        floating = value.dtype if value.is_floating_point() else torch.get_default_dtype()
        # Chosen, not multiplied: 0 · NaN would be NaN.
        scores.append(torch.where(mask != 0, score, 0.0).to(floating))
    return scores


def reduce_over(
    numbers: Sequence[float], group: dist.ProcessGroup | None, op: dist.ReduceOp.RedOpType
) -> list[float]:
    """These numbers, each reduced over the ranks of a group in double precision.

    A collective over ``group``; the numbers themselves if it is None.

    Args:
        numbers: as many on every rank.
        group: the ranks, or None.
        op: for instance ``torch.distributed.ReduceOp.SUM``.
    """
    if group is None:
        return list(numbers)
    on_gpu = dist.get_backend(group) == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    reduced = torch.tensor(numbers, dtype=torch.float64, device=device)
    dist.all_reduce(reduced, op=op, group=group)
    result: list[float] = reduced.tolist()
    return result


def _kept_and_mean(
    values: Sequence[Tensor], masks: Sequence[Tensor], group: dist.ProcessGroup | None
) -> tuple[list[Tensor], float | None, int]:
    """The values where the mask is not 0, flat and in double precision; mean and count of all."""
    fault = _fault(values, masks)
    # A rank at fault takes part in the collective, so that the others learn of it.
    kept = (
        []
        if fault
        else [value.detach()[mask != 0].double() for value, mask in zip(values, masks, strict=True)]
    )
    local = [
        sum(float(value.sum()) for value in kept),
        sum(value.numel() for value in kept),
        float(bool(fault)),
    ]
    total, count, ranks_at_fault = reduce_over(local, group, dist.ReduceOp.SUM)
    if ranks_at_fault:
        raise BatchError(
            fault
            or f"{int(ranks_at_fault)} other ranks of the group have values and masks of different "
            "shapes; give each value a mask of its shape on every rank"
        )
    return kept, (total / count if count else None), int(count)


def _fault(values: Sequence[Tensor], masks: Sequence[Tensor]) -> str:
    """What is wrong with the masks, empty if nothing is."""
    if len(values) != len(masks):
        return f"expected {len(values)} masks, one for each value, got {len(masks)}"
    for index, (value, mask) in enumerate(zip(values, masks, strict=True)):
        if value.shape != mask.shape:
            return (
                f"expected a mask of shape {list(value.shape)} for value {index}, got "
                f"{list(mask.shape)}; give each value the mask of its own tokens"
            )
    return ""


def _variance(
    kept: Sequence[Tensor],
    mean: float | None,
    count: int,
    group: dist.ProcessGroup | None,
    correction: int,
) -> float | None:
    # From the deviations, since the difference of large sums of squares loses its digits.
    local = 0.0 if mean is None else sum(float(((value - mean) ** 2).sum()) for value in kept)
    (total,) = reduce_over([local], group, dist.ReduceOp.SUM)
    return total / (count - correction) if count > correction else None
