"""Packed micro-batches: fields with declared kinds, rows, outputs in order, and shares of a loss.

Needs torch and the standard library; never imports megatron.
"""

from mcore_batching.batch.consensus import DisagreementError, RankFailedError
from mcore_batching.batch.context_parallel import gather_response, owned_response_mask
from mcore_batching.batch.errors import BatchError, OrderError, SchemaError
from mcore_batching.batch.fields import Field, Fill, Kind
from mcore_batching.batch.loss import (
    StepTotals,
    owned_num_tokens,
    response_loss_masks,
    sample_mean,
    step_totals,
    token_mean,
)
from mcore_batching.batch.order import apply_order, restore_order
from mcore_batching.batch.pack import pack
from mcore_batching.batch.packed import PackedMicroBatch
from mcore_batching.batch.placeholder import make_placeholder
from mcore_batching.batch.schema import DEFAULT_SCHEMA, Schema
from mcore_batching.batch.select import step_batches, take
from mcore_batching.batch.zigzag import (
    merge_packed,
    packed_positions,
    slice_packed,
    zigzag_merge,
    zigzag_slice,
)

__all__ = [
    "DEFAULT_SCHEMA",
    "BatchError",
    "DisagreementError",
    "Field",
    "Fill",
    "Kind",
    "OrderError",
    "PackedMicroBatch",
    "RankFailedError",
    "Schema",
    "SchemaError",
    "StepTotals",
    "apply_order",
    "gather_response",
    "make_placeholder",
    "merge_packed",
    "owned_num_tokens",
    "owned_response_mask",
    "pack",
    "packed_positions",
    "response_loss_masks",
    "restore_order",
    "sample_mean",
    "slice_packed",
    "step_batches",
    "step_totals",
    "take",
    "token_mean",
    "zigzag_merge",
    "zigzag_slice",
]
