"""`hook`: ``rearrange_micro_batches`` and ``restore_dynamic_batch`` of verl, replaced by ours."""

from __future__ import annotations

import functools
import importlib

from mcore_batching.integrations.replacements import (
    MARK,
    Hook,
    Replacement,
    check_signature,
    in_place_of,
)

_MODULE = "verl.utils.seqlen_balancing"


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
    from mcore_batching.integrations.verl import micro_batches
    from mcore_batching.integrations.verl.shared_prefixes import SharedPrefixes

    module = importlib.import_module(_MODULE)
    sharing = SharedPrefixes() if share_prefixes else None
    replacements = []
    for name, settings in (("rearrange_micro_batches", [sharing]), ("restore_dynamic_batch", [])):
        original, ours = getattr(module, name), getattr(micro_batches, name)
        stand_in = functools.partial(ours, original, *settings)
        check_signature(f"{_MODULE}.{name}", original, stand_in, whole=True)
        replacements.append(Replacement(name, original, in_place_of(original, stand_in)))
    if sharing is not None:
        sharing.place = getattr(replacements[0].ours, MARK)
    return Hook([module], replacements)
