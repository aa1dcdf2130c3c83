"""The planner inside verl: its ``rearrange_micro_batches`` and ``restore_dynamic_batch``."""

from mcore_batching.integrations.verl.micro_batches import hook

__all__ = ["hook"]
