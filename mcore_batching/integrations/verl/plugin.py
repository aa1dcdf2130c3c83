"""Entry point of group ``verl.plugins``: hooks verl if ``MCORE_BATCHING_VERL`` is 1.

``MCORE_BATCHING_VERL_SHARE_PREFIXES=1`` beside it shares prefixes.
"""

from __future__ import annotations

import os
import sys
import traceback

from mcore_batching.integrations.replacements import HookError
from mcore_batching.integrations.verl.hook import hook

VARIABLE = "MCORE_BATCHING_VERL"
SHARING = "MCORE_BATCHING_VERL_SHARE_PREFIXES"


def hook_if_asked() -> None:
    """`hook` verl under ``MCORE_BATCHING_VERL=1``; nothing where it is unset, empty or 0.

    Raises:
        HookError: another value, prefixes to be shared where it is unset, or verl's functions have
            another signature. Printed as well.
    """
    if os.environ.get(VARIABLE) == "0":  # turns both off, whatever the other says
        return
    try:
        shares = _is_set(SHARING)
        if _is_set(VARIABLE):
            print(hook(share_prefixes=shares), flush=True)
        elif shares:
            raise HookError(f"{SHARING}=1 shares nothing by itself: set {VARIABLE}=1, too")
    except Exception:
        # verl loads such entry points while it is imported, and only logs their errors.
        print("mcore_batching: verl keeps its own micro-batches, because", file=sys.stderr)
        traceback.print_exc()
        raise


def _is_set(variable: str) -> bool:
    value = os.environ.get(variable, "")
    if value not in ("", "0", "1"):
        raise HookError(f"{variable} must be 1, 0 or unset, got {value!r}")
    return value == "1"


hook_if_asked()
