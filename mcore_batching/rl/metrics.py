"""Metrics over the real samples of a batch.

sample_metrics(batch, ["rewards"], group=data_parallel_group)
{"rewards/mean": 0.4, "rewards/max": 1.0, "rewards/min": 0.0}
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from mcore_batching.batch.consensus import Consensus
from mcore_batching.batch.errors import BatchError
from mcore_batching.planning.integers import entries
from mcore_batching.rl.real_samples import numbers_of, real_indices


def sample_metrics(
    batch: Mapping[str, Any], fields: Sequence[str], *, group: dist.ProcessGroup | None = None
) -> dict[str, float]:
    """Mean, maximum and minimum of per-sample numbers, over the real samples of all ranks. A
    collective over ``group``, for ranks without samples too.

    Args:
        batch: field name to one value per sample; ``is_padding`` marks those that are not real.
        fields: names of fields of one number per sample, the same on every rank.
        group: the data-parallel ranks; None for this process alone.

    Returns:
        ``field/mean``, ``field/max`` and ``field/min`` of each field, the same on all ranks; none
        of them if no rank has a real sample.

    Raises:
        BatchError: on every rank, if on any a field is absent or does not have one number per
            sample, or if the fields differ between ranks.
    """
    with Consensus(group).agreement("summing up metrics") as agree:
        real = real_indices(batch)
        names = entries("fields", fields, BatchError)
        if not all(isinstance(name, str) for name in names):
            raise BatchError(f"fields must hold names of fields, got {names!r:.60}")
        numbers = [numbers_of(batch, name, real) for name in names]
        agree.same("fields", list(names))
        # Sums and counts travel, not means: ranks have different numbers of samples.
        counts = agree.sum("counts", [len(each) for each in numbers])
        sums = agree.sum("sums", [sum(each) for each in numbers])
        maxima = agree.max("maxima", [max(each, default=-math.inf) for each in numbers])
        minima = agree.min("minima", [min(each, default=math.inf) for each in numbers])
    metrics: dict[str, float] = {}  # of no real sample on any rank none, not NaN
    reduced = zip(names, counts.value, sums.value, maxima.value, minima.value, strict=True)
    for name, count, added, most, fewest in reduced:
        if count:
            metrics[f"{name}/mean"] = added / count
            metrics[f"{name}/max"] = most
            metrics[f"{name}/min"] = fewest
    return metrics
