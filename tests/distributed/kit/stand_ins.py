"""Empty modules for what frameworks and Megatron import and the tests do not need."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock


@dataclasses.dataclass(frozen=True)
class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules of these names, and those in them, in `sys.meta_path`."""

    names: tuple[str, ...]

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        del path, target
        if any(name == each or name.startswith(f"{each}.") for each in self.names):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        known = {"__path__": [], "__spec__": spec, "__name__": spec.name, "__version__": "99"}
        return MagicMock(name=spec.name, **known)

    def exec_module(self, module: ModuleType) -> None:
        del module


@contextlib.contextmanager
def stood_in(*names: str) -> Iterator[None]:
    """Stand-ins for those of these modules that are not installed, while others are imported."""
    missing = StandIns(tuple(name for name in names if importlib.util.find_spec(name) is None))
    sys.meta_path.append(missing)
    try:
        yield
    finally:
        sys.meta_path.remove(missing)
        for name in list(sys.modules):
            if name.partition(".")[0] in missing.names:
                del sys.modules[name]
