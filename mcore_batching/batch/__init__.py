"""Samples as fields with declared kinds, packed into rows, and their outputs back in order.

Needs torch and the standard library; never imports megatron.
"""

from mcore_batching.batch.advantages import TEMPORAL_ESTIMATORS, compute_advantages
from mcore_batching.batch.collate import pack
from mcore_batching.batch.context_parallel import gather_response, owned_response_mask
from mcore_batching.batch.default_schema import DEFAULT_SCHEMA
from mcore_batching.batch.errors import BatchError, OrderError, SchemaError, SplitGroupError
from mcore_batching.batch.fields import Field, Kind
from mcore_batching.batch.left_padded import LeftPadded, response_values
from mcore_batching.batch.left_padding import left_pad, left_pad_packed, pack_left_padded, unpad
from mcore_batching.batch.loss import (
    StepTotals,
    owned_num_tokens,
    response_loss_masks,
    sample_mean,
    step_totals,
    token_mean,
)
from mcore_batching.batch.masked import masked_mean, masked_variance, masked_zscore
from mcore_batching.batch.metrics import (
    GroupStatistics,
    group_statistics,
    real_indices,
    real_samples,
    sample_metrics,
)
from mcore_batching.batch.order import apply_order, restore_order
from mcore_batching.batch.outcome import OUTCOME_ESTIMATORS, outcome_advantages
from mcore_batching.batch.packed import PackedMicroBatch
from mcore_batching.batch.padding_samples import pad_batch, required_batch_multiple
from mcore_batching.batch.placeholder import check_filled, make_placeholder
from mcore_batching.batch.right_aligned import right_align, right_aligned_rows
from mcore_batching.batch.schema import Schema
from mcore_batching.batch.selection import step_batches, take
from mcore_batching.batch.split_groups import check_groups_are_local
from mcore_batching.batch.temporal import (
    discounted_returns,
    generalized_advantages,
    last_token_rewards,
)
from mcore_batching.batch.zigzag import (
    merge_packed,
    packed_positions,
    slice_packed,
    zigzag_merge,
    zigzag_positions,
    zigzag_slice,
)

__all__ = [
    "DEFAULT_SCHEMA",
    "OUTCOME_ESTIMATORS",
    "TEMPORAL_ESTIMATORS",
    "BatchError",
    "Field",
    "GroupStatistics",
    "Kind",
    "LeftPadded",
    "OrderError",
    "PackedMicroBatch",
    "Schema",
    "SchemaError",
    "SplitGroupError",
    "StepTotals",
    "apply_order",
    "check_filled",
    "check_groups_are_local",
    "compute_advantages",
    "discounted_returns",
    "gather_response",
    "generalized_advantages",
    "group_statistics",
    "last_token_rewards",
    "left_pad",
    "left_pad_packed",
    "make_placeholder",
    "masked_mean",
    "masked_variance",
    "masked_zscore",
    "merge_packed",
    "outcome_advantages",
    "owned_num_tokens",
    "owned_response_mask",
    "pack",
    "pack_left_padded",
    "packed_positions",
    "pad_batch",
    "real_indices",
    "real_samples",
    "required_batch_multiple",
    "response_loss_masks",
    "response_values",
    "restore_order",
    "right_align",
    "right_aligned_rows",
    "sample_mean",
    "sample_metrics",
    "slice_packed",
    "step_batches",
    "step_totals",
    "take",
    "token_mean",
    "unpad",
    "zigzag_merge",
    "zigzag_positions",
    "zigzag_slice",
]
