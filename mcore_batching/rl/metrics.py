"""Metrics over the real samples of a batch.

sample_metrics(batch, ["rewards"], group=data_parallel_group)
{"rewards/mean": 0.4, "rewards/max": 1.0, "rewards/min": 0.0}
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from mcore_batching.batch.agreement.consensus import Consensus, Statement
from mcore_batching.batch.agreement.figures import largest, least, total
from mcore_batching.batch.errors import BatchError
from mcore_batching.planning.errors import Argument
from mcore_batching.planning.integers import entries
from mcore_batching.rl.real_samples import numbers_of, real_indices


def sample_metrics(
    batch: Mapping[str, Any], fields: Sequence[str], *, group: dist.ProcessGroup | None = None
) -> dict[str, float]:
    """Mean, maximum and minimum of per-sample numbers, over the real samples of all ranks. A
    collective over ``group``, for ranks without samples too.

    Args:
        batch: field name to one value per sample; ``is_padding`` tells which are not real.
        fields: names of fields of one number per sample, the same on every rank.
        group: the data-parallel ranks; None for this process alone.

    Returns:
        ``field/mean``, ``field/max`` and ``field/min`` of each field, the same on all ranks; none
        of them if no rank has a real sample.

    Raises:
        BatchError: on every rank, if on any a field is absent or does not have one number per
            sample, or if the fields differ between ranks.
    """

    def numbers() -> dict[str, list[float]]:
        real = real_indices(batch)
        names = entries("fields", fields, BatchError)
        if not all(isinstance(name, str) for name in names):
            raise BatchError(Argument("fields"), f" must hold names of fields, got {names!r:.60}")
        return {name: numbers_of(batch, name, real) for name in names}

    def says(found: dict[str, list[float]]) -> Statement:
        numbers = found.values()
        return Statement(
            equal={"fields": list(found)},
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
    for name, count, added, most, fewest in zip(agreed.result, *found, strict=True):
        if count:
            metrics[f"{name}/mean"] = added / count
            metrics[f"{name}/max"] = most
            metrics[f"{name}/min"] = fewest
    return metrics
