"""Rows that FP8 and FP4 kernels cannot take."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mcore_batching.flags import PREFIX
from mcore_batching.planning import ParallelDims, PlannerConfig, row_multiple_tokens


def low_precision_problems(
    config: Any, dims: ParallelDims, planner: PlannerConfig
) -> Iterator[str]:
    """Rows that FP8 or FP4 kernels cannot take, by the padding of rows."""
    # Scales are of blocks of tokens, which each rank's part of a row must fill.
    if config.fp4:
        name, tokens = "FP4", 32
    elif config.fp8:
        name, tokens = "FP8", _fp8_tokens(config, dims)
    else:
        return
    shards = dims.context_parallel * (dims.tensor_parallel if dims.sequence_parallel else 1)
    wanted, row = tokens * shards, row_multiple_tokens(dims, planner)
    if row % wanted:
        yield (
            f"{name} rows must divide by {tokens} on each rank, so by {wanted} in all, and are "
            f"padded to a multiple of {row}: set {PREFIX}pad-total-to {wanted}"
        )


def _fp8_tokens(config: Any, dims: ParallelDims) -> int:
    """Tokens on a rank that its FP8 kernels take multiples of."""
    if config.fp8_recipe == "blockwise" and dims.sequence_parallel:
        return 128  # activations are quantized in such blocks before they are gathered
    return 32 if config.fp8_recipe == "mxfp8" else 16
