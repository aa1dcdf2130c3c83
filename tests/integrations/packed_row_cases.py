"""Two samples as a packed row, as a forward step of a stock script gets it."""

from __future__ import annotations

from typing import Any

import torch

from mcore_batching.batch import PackedMicroBatch, make_placeholder
from mcore_batching.batch.columns import Columns
from mcore_batching.batch.row_block import RowBlock
from mcore_batching.batch.row_index import Nodes
from mcore_batching.integrations.megatron_lm.script_batches import PackedRows
from mcore_batching.integrations.megatron_lm.stock_steps import STOCK_SCHEMA

PAD = 9
SAMPLES: dict[str, list[Any]] = {
    "tokens": [torch.tensor([1, 2, 3]), torch.tensor([4, 5])],
    "labels": [torch.tensor([2, 3, 7]), torch.tensor([5, 8])],
    "loss_mask": [torch.tensor([0.0, 1.0, 1.0]), torch.tensor([1.0, 1.0])],
    "position_ids": [torch.arange(3), torch.arange(2)],
    "total_lengths": [3, 2],
    "response_lengths": [0, 0],
}


def prepared(samples: dict[str, list[Any]], *, is_placeholder: bool = False) -> PackedMicroBatch:
    """The samples as one row, each padded to a multiple of 4."""
    columns = Columns.read(samples, STOCK_SCHEMA)
    count = len(columns.total_lengths)
    block = RowBlock(
        fields=columns,
        nodes=[Nodes.of(columns.total_lengths, range(count), None, 4, 1)],
        sample_indices=[() if is_placeholder else tuple(range(count))],
        pad_token_id=PAD,
        has_labels=True,
    )
    (row,) = block.rows()
    return row


def rows(counts_flops: bool = True, is_placeholder: bool = False) -> PackedRows:
    samples = SAMPLES
    if is_placeholder:
        samples = make_placeholder(STOCK_SCHEMA, list(SAMPLES), SAMPLES, pad_token_id=PAD)
    row = prepared(samples, is_placeholder=is_placeholder)
    return PackedRows(iter([row]), counts_flops=counts_flops)


EXPECTED = {
    "tokens": (torch.int64, [[1, 2, 3, PAD, 4, 5, PAD, PAD]]),
    "labels": (torch.int64, [[2, 3, 7, 0, 5, 8, 0, 0]]),
    "loss_mask": (torch.float32, [[0, 1, 1, 0, 1, 1, 0, 0]]),
    "position_ids": (torch.int64, [[0, 1, 2, 0, 0, 1, 0, 0]]),
    "cu_seqlens": (torch.int32, [[0, 3, 5]]),
    "cu_seqlens_padded": (torch.int32, [[0, 4, 8]]),
    "max_seqlen": (torch.int32, 4),
}
"""Type and values of each field of `rows` in a script's batch; others are None."""
