"""`hook`: ``rearrange_micro_batches`` and ``restore_dynamic_batch`` of verl, replaced by ours."""

from __future__ import annotations

import functools
import importlib

from mcore_batching.integrations.replacements import (
    Hook,
    Replacement,
    check_signature,
    in_place_of,
)

_MODULE = "verl.utils.seqlen_balancing"


def hook() -> Hook:
    """Replace both functions in every loaded module of verl.

    Returns:
        the replaced functions; its ``undo`` puts verl's own back.

    Raises:
        HookError: they are hooked already, or have another signature in this version of verl.
    """
    from mcore_batching.integrations.verl import micro_batches

    module = importlib.import_module(_MODULE)
    replacements = []
    for name in ("rearrange_micro_batches", "restore_dynamic_batch"):
        original, ours = getattr(module, name), getattr(micro_batches, name)
        stand_in = functools.partial(ours, original)
        check_signature(f"{_MODULE}.{name}", original, stand_in, whole=True)
        replacements.append(Replacement(name, original, in_place_of(original, stand_in)))
    return Hook([module], replacements)
