"""Entry point of group ``verl.plugins``: hooks verl if ``MCORE_BATCHING_VERL`` is 1."""

from __future__ import annotations

import os
import sys
import traceback

from mcore_batching.integrations.replacements import HookError
from mcore_batching.integrations.verl.micro_batches import hook

VARIABLE = "MCORE_BATCHING_VERL"


def hook_if_asked() -> None:
    """`hook` verl under ``MCORE_BATCHING_VERL=1``; nothing where it is unset, empty or 0.

    Raises:
        HookError: another value, or verl's functions have another signature. Printed as well.
    """
    value = os.environ.get(VARIABLE, "")
    if value == "0":  # turns all off, whatever else is set
        return
    try:
        if value not in ("", "1"):
            raise HookError(f"{VARIABLE} must be 1, 0 or unset, got {value!r}")
        if value:
            print(hook(), flush=True)
    except Exception:
        # verl loads such entry points while it is imported, and only logs their errors.
        print("mcore_batching: verl keeps its own micro-batches, because", file=sys.stderr)
        traceback.print_exc()
        raise


hook_if_asked()
