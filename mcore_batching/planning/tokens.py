"""Padded tokens of samples and micro-batches.

With `context_parallel=2` (samples padded to multiples of 4) and `pad_total_to=16`, samples of 3, 5
and 0 tokens take 4 + 8 + 4 = 16 tokens, a row of 16. A sample of no tokens takes one alignment
unit, since an empty row segment breaks attention kernels.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from mcore_batching.planning.errors import ConfigError, named
from mcore_batching.planning.integers import round_up

if TYPE_CHECKING:
    from mcore_batching.planning.config import PlannerConfig
    from mcore_batching.planning.parallel_dims import ParallelDims


def sample_multiple_tokens(dims: ParallelDims, config: PlannerConfig) -> int:
    """Every padded sample is a multiple of this: the dims' alignment and `pad_each_to`."""
    # lcm, not max: both must divide it.
    return math.lcm(dims.sample_alignment_tokens, config.pad_each_to or 1)


def row_multiple_tokens(dims: ParallelDims, config: PlannerConfig) -> int:
    """Every padded micro-batch is a multiple of this: the dims' alignment and `pad_total_to`."""
    return math.lcm(dims.sample_alignment_tokens, config.pad_total_to or 1)


def padded_sample_tokens(length: int, dims: ParallelDims, config: PlannerConfig) -> int:
    """Tokens that a sample of `length` tokens occupies; one alignment unit if it has none."""
    return round_up(max(length, 1), sample_multiple_tokens(dims, config))


def padded_row_tokens(sum_of_padded_tokens: int, dims: ParallelDims, config: PlannerConfig) -> int:
    """Tokens of a micro-batch whose padded samples sum to `sum_of_padded_tokens`."""
    return round_up(sum_of_padded_tokens, row_multiple_tokens(dims, config))


def placeholder_tokens(dims: ParallelDims, config: PlannerConfig) -> int:
    """Tokens of a placeholder micro-batch: one real token and the padding around it."""
    return padded_row_tokens(padded_sample_tokens(1, dims, config), dims, config)


def needed_max_tokens_per_gpu(length: int, dims: ParallelDims, config: PlannerConfig) -> int:
    """The least `max_tokens_per_gpu` under which a sample of `length` tokens fits the cap."""
    row = padded_row_tokens(padded_sample_tokens(length, dims, config), dims, config)
    return -(-row // dims.context_parallel)  # the cap counts over the row's ranks


def row_capacity_tokens(dims: ParallelDims, config: PlannerConfig) -> int:
    """The largest padded micro-batch within the cap; a `ConfigError` if not even a placeholder
    fits."""
    cap = config.cap_tokens(dims)
    placeholder = placeholder_tokens(dims, config)
    if placeholder > cap:
        raise ConfigError(
            f"the least micro-batch takes {placeholder} tokens, the cap is {cap}; set "
            f"{named('max_tokens_per_gpu')} to {needed_max_tokens_per_gpu(1, dims, config)} or "
            f"more, or lower {named('pad_each_to')} and {named('pad_total_to')}"
        )
    # Rows are padded to the multiple: the cap's rest beyond the last one can hold nothing.
    multiple = row_multiple_tokens(dims, config)
    return cap // multiple * multiple
