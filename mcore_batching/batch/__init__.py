"""Packed micro-batches: fields with declared kinds, rows, outputs in order, and shares of a loss.

Needs torch and the standard library; never imports megatron.
"""

from mcore_batching.batch.errors import BatchError, OrderError, SchemaError
from mcore_batching.batch.fields import Field, Fill, Kind, make_placeholder
from mcore_batching.batch.loss import (
    StepTotals,
    prompt_mean,
    sample_mean,
    token_mean,
    token_sum,
    trajectory_mean,
)
from mcore_batching.batch.order import apply_order, restore_order
from mcore_batching.batch.row import PackedMicroBatch, gather_response
from mcore_batching.batch.schema import DEFAULT_SCHEMA, Schema

__all__ = [
    "DEFAULT_SCHEMA",
    "BatchError",
    "Field",
    "Fill",
    "Kind",
    "OrderError",
    "PackedMicroBatch",
    "Schema",
    "SchemaError",
    "StepTotals",
    "apply_order",
    "gather_response",
    "make_placeholder",
    "prompt_mean",
    "restore_order",
    "sample_mean",
    "token_mean",
    "token_sum",
    "trajectory_mean",
]
