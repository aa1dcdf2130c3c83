"""Megatron-LM's own planning of micro-batches, from a checkout of its dev branch."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import os
import re
import sys
from pathlib import Path
from typing import Any
from unittest import mock

CHECKOUT = "MCORE_BATCHING_MEGATRON_DEV"
"""Environment variable that names the checkout."""


def scheduling_file(name: str = "data_schedule_utils") -> Path | None:
    """The file with rules, of `default_dynamic_cp` by default; None without a checkout."""
    path = Path(os.environ.get(CHECKOUT, ""), "megatron/core/datasets", f"{name}.py")
    return path if path.is_file() else None


@functools.cache
def scheduling_module(path: Path) -> Any:
    """That file as a module. What it imports is empty: the rules use nothing of it."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    imported = {
        part
        for line in re.findall(r"^from (\S+) import|^import (\S+)", path.read_text(), re.MULTILINE)
        for whole in line
        for part in itertools.accumulate(whole.split("."), "{}.{}".format)
        if whole.startswith(("torch", "megatron"))
    }
    with mock.patch.dict(sys.modules, {name: mock.MagicMock() for name in imported}):
        spec.loader.exec_module(module)
    return module
