"""The planner in SkyRL's token-based micro-batches."""

from mcore_batching.integrations.skyrl.iterator import hook

__all__ = ["hook"]
