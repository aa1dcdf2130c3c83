"""The engine inside slime, and inside frameworks that batch by the same functions."""

from mcore_batching.integrations.replacements import Hook, HookError
from mcore_batching.integrations.slime.hook import hook, init
from mcore_batching.integrations.slime.rollout_manager import hook_schedule

__all__ = ["Hook", "HookError", "hook", "hook_schedule", "init"]
