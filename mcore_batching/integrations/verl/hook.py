"""`hook`: ``rearrange_micro_batches`` and ``restore_dynamic_batch`` of verl, replaced by ours."""

from __future__ import annotations

import importlib

from mcore_batching.integrations.replacements import Hook, replacing

NAMES = ("rearrange_micro_batches", "restore_dynamic_batch")


def hook() -> Hook:
    """Replace both functions in every loaded module of verl.

    Returns:
        the replaced functions; its ``undo`` puts verl's own back.

    Raises:
        HookError: they are hooked already, or have another signature in this version of verl.
    """
    # Here, since verl imports the plugin always: where it is off these would be loaded for nothing.
    from mcore_batching.integrations.verl import micro_batches

    module = importlib.import_module("verl.utils.seqlen_balancing")
    return Hook([module], [replacing(module, name, getattr(micro_batches, name)) for name in NAMES])
