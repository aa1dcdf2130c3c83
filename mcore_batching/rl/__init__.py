"""Batches of reinforcement learning: padding samples, metrics, groups, advantages, left padding.

Needs torch and the standard library; never imports megatron.
"""

from mcore_batching.rl.advantages import SplitGroupError, compute_advantages
from mcore_batching.rl.left_padding import LeftPadded, left_pad, response_values, unpad
from mcore_batching.rl.padding_samples import pad_batch, required_batch_multiple
from mcore_batching.rl.real_samples import real_samples, sample_metrics

__all__ = [
    "LeftPadded",
    "SplitGroupError",
    "compute_advantages",
    "left_pad",
    "pad_batch",
    "real_samples",
    "required_batch_multiple",
    "response_values",
    "sample_metrics",
    "unpad",
]
