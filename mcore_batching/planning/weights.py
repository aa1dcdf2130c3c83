"""What the `balance` option weighs.

Guarantees: a weight depends on the sample lengths and the options alone, and never
shrinks as samples are added.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mcore_batching.planning.tokens import padded_row_tokens, padded_sample_tokens

if TYPE_CHECKING:
    from mcore_batching.planning.config import PlannerConfig
    from mcore_batching.planning.cost import CostModel
    from mcore_batching.planning.parallel_dims import ParallelDims
    from mcore_batching.planning.splitting import Weight


def row_tokens(
    samples: Sequence[int], lengths: Sequence[int], dims: ParallelDims, config: PlannerConfig
) -> int:
    """Padded tokens of a micro-batch of these sample indices."""
    padded = sum(padded_sample_tokens(lengths[sample], dims, config) for sample in samples)
    return padded_row_tokens(padded, dims, config)


def micro_batch_weight(
    lengths: Sequence[int], dims: ParallelDims, config: PlannerConfig, cost_model: CostModel
) -> Weight:
    """The weight of a micro-batch under `config.balance`: padded tokens for "tokens", else cost."""
    if config.balance == "tokens":
        return lambda samples: float(row_tokens(samples, lengths, dims, config))
    return lambda samples: cost_model.micro_batch([lengths[sample] for sample in samples])
