"""Samples as one packed row, for tests of what reads rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mcore_batching.batch import DEFAULT_SCHEMA, PackedMicroBatch, Schema
from mcore_batching.batch.columns import Columns
from mcore_batching.batch.row_block import RowBlock
from mcore_batching.batch.row_index import Nodes
from mcore_batching.planning.forest import Forest


def pack(
    samples: Mapping[str, Any],
    *,
    sample_indices: Sequence[int],
    schema: Schema = DEFAULT_SCHEMA,
    sample_alignment_tokens: int = 1,
    row_alignment_tokens: int = 1,
    forest: Forest | None = None,
    device: str = "cpu",
    **layout: int,
) -> PackedMicroBatch:
    """The row of all samples, which are checked."""
    columns = Columns.read(samples, schema)
    places = range(len(columns.total_lengths))
    alignments = sample_alignment_tokens, row_alignment_tokens
    block = RowBlock(
        fields=columns,
        nodes=[Nodes.of(columns.total_lengths, places, forest, *alignments)],
        sample_indices=[tuple(sample_indices)],
        device=torch.device(device),
        **layout,  # type: ignore[arg-type]
    )
    return block.rows()[0]
