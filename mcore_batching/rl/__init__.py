"""Batches of reinforcement learning: padding samples, metrics, groups, advantages, left padding.

Needs torch and the standard library; never imports megatron.
"""

from mcore_batching.rl.advantages import (
    OUTCOME_ESTIMATORS,
    compute_advantages,
    outcome_advantages,
)
from mcore_batching.rl.group_locality import SplitGroupError, check_groups_are_local
from mcore_batching.rl.left_padding import (
    LeftPadded,
    left_pad,
    left_pad_packed,
    pack_left_padded,
    response_values,
    unpad,
)
from mcore_batching.rl.metrics import (
    GroupStatistics,
    group_statistics,
    masked_mean,
    masked_variance,
    masked_zscore,
    sample_metrics,
)
from mcore_batching.rl.padding_samples import pad_batch, required_batch_multiple
from mcore_batching.rl.real_samples import real_indices, real_samples

__all__ = [
    "OUTCOME_ESTIMATORS",
    "GroupStatistics",
    "LeftPadded",
    "SplitGroupError",
    "check_groups_are_local",
    "compute_advantages",
    "group_statistics",
    "left_pad",
    "left_pad_packed",
    "masked_mean",
    "masked_variance",
    "masked_zscore",
    "outcome_advantages",
    "pack_left_padded",
    "pad_batch",
    "real_indices",
    "real_samples",
    "required_batch_multiple",
    "response_values",
    "sample_metrics",
    "unpad",
]
