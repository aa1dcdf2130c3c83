"""`hook`: verl's ``rearrange_micro_batches``, ``restore_dynamic_batch`` and, where it has dynamic
context parallelism, the scheduler of that, replaced by ours."""

from __future__ import annotations

import importlib
import importlib.util

from mcore_batching.integrations.replacements import Hook, replacing

NAMES = ("rearrange_micro_batches", "restore_dynamic_batch")


def hook() -> Hook:
    """Replace these functions in every loaded module of verl.

    Returns:
        the replaced functions; its ``undo`` puts verl's own back.

    Raises:
        HookError: they are hooked already, or have another signature in this version of verl.
    """
    # Here, since verl imports the plugin always: where it is off these would be loaded for nothing.
    from mcore_batching.integrations.verl import dynamic_cp, micro_batches

    modules = [importlib.import_module("verl.utils.seqlen_balancing")]
    found = [replacing(modules[0], name, getattr(micro_batches, name)) for name in NAMES]
    if importlib.util.find_spec("verl.utils.dynamic_cp_scheduler"):
        modules.append(importlib.import_module("verl.utils.dynamic_cp_scheduler"))
        name = "get_megatron_dynamic_cp_scheduler_cls"
        found.append(replacing(modules[1], name, dynamic_cp.scheduler_class))
    return Hook(modules, found)
