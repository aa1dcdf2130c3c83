"""Batches of reinforcement learning: padding samples, metrics, prompt groups, advantages, left padding.

Needs torch and the standard library; never imports megatron.
"""

from mcore_batching.rl.advantages import TEMPORAL_ESTIMATORS, compute_advantages
from mcore_batching.rl.group_locality import check_groups_are_local
from mcore_batching.rl.left_padded import LeftPadded, response_values
from mcore_batching.rl.left_padding import left_pad, left_pad_packed, pack_left_padded, unpad
from mcore_batching.rl.masked import masked_mean, masked_variance, masked_zscore
from mcore_batching.rl.metrics import (
    GroupStatistics,
    group_statistics,
    real_indices,
    real_samples,
    sample_metrics,
)
from mcore_batching.rl.outcome import OUTCOME_ESTIMATORS, outcome_advantages
from mcore_batching.rl.padding_samples import pad_batch, required_batch_multiple
from mcore_batching.rl.right_aligned import right_align, right_aligned_rows
from mcore_batching.rl.temporal import (
    discounted_returns,
    generalized_advantages,
    last_token_rewards,
)

__all__ = [
    "OUTCOME_ESTIMATORS",
    "TEMPORAL_ESTIMATORS",
    "GroupStatistics",
    "LeftPadded",
    "check_groups_are_local",
    "compute_advantages",
    "discounted_returns",
    "generalized_advantages",
    "group_statistics",
    "last_token_rewards",
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
    "right_align",
    "right_aligned_rows",
    "sample_metrics",
    "unpad",
]
