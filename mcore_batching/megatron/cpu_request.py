"""The wish for the CPU stand-in, ``MCORE_BATCHING_CPU=1``, known before megatron.core is imported.

megatron-core decides as it is imported whether to use Transformer Engine, which runs on GPUs alone:
where the stand-in is asked for, this module makes ``import transformer_engine`` fail.
"""

from __future__ import annotations

import os
import sys
from typing import Any

ENVIRONMENT_VARIABLE = "MCORE_BATCHING_CPU"


def is_requested() -> bool:
    """True if ``MCORE_BATCHING_CPU`` asks for the stand-in."""
    return os.environ.get(ENVIRONMENT_VARIABLE, "") not in ("", "0")


def is_forced() -> bool:
    """True if ``MCORE_BATCHING_CPU=force`` asks for it even where there is CUDA."""
    return os.environ.get(ENVIRONMENT_VARIABLE) == "force"


def has_transformer_engine() -> bool:
    """True if this process has imported Transformer Engine."""
    return sys.modules.get("transformer_engine") is not None


# None in sys.modules makes `import` raise ImportError, as if the package were not installed.
if is_requested() and not has_transformer_engine():
    modules: dict[str, Any] = sys.modules
    modules["transformer_engine"] = None
