"""The engine inside slime, and inside frameworks that batch by the same three functions."""

from mcore_batching.integrations.slime.hook import Hook, HookError, hook

__all__ = ["Hook", "HookError", "hook"]
