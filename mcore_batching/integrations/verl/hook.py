"""`hook`: ``rearrange_micro_batches`` and ``restore_dynamic_batch`` of verl, replaced by ours."""

from __future__ import annotations

import functools
import importlib

from mcore_batching.integrations.replacements import Hook, replacing


def hook(*, share_prefixes: bool = False) -> Hook:
    """Replace both functions in every loaded module of verl.

    Args:
        share_prefixes: samples that begin others, as turns of a trajectory begin the next ones, are
            computed in those, in verl's Megatron engine.

    Returns:
        the replaced functions; its ``undo`` puts verl's own back.

    Raises:
        HookError: they are hooked already, or have another signature in this version of verl.
    """
    # Here, since verl imports the plugin always: where it is off these would be loaded for nothing.
    from mcore_batching.integrations.verl import micro_batches
    from mcore_batching.integrations.verl.shared_prefixes import SharedPrefixes

    module = importlib.import_module("verl.utils.seqlen_balancing")
    sharing = SharedPrefixes() if share_prefixes else None
    rearrange = functools.partial(micro_batches.rearrange_micro_batches, sharing)
    restore = micro_batches.restore_dynamic_batch
    hooked = Hook(
        [module],
        [
            replacing(module, "rearrange_micro_batches", rearrange),
            replacing(module, "restore_dynamic_batch", restore),
        ],
    )
    if sharing is not None:
        # It adds verl's forward at the first step, which cannot be imported yet.
        sharing.hook = hooked
    return hooked
