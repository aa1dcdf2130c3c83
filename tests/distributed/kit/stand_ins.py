"""Frameworks' modules, their own or small ones in their names, and empty ones for what they and
Megatron import and the tests do not need."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
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
        forget(*missing.names)


def forget(*roots: str) -> None:
    """Let these packages be imported anew."""
    for name in [each for each in sys.modules if each.partition(".")[0] in roots]:
        del sys.modules[name]


def write_package(folder: Path, files: dict[str, str]) -> None:
    """Write the modules of a package: their paths in it, without the suffix, and their text."""
    for name, text in files.items():
        path = folder / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        for parent in path.relative_to(folder).parents:
            (folder / parent / "__init__.py").touch()


def bare_packages(source: str | Path, names: Sequence[str]) -> dict[str, ModuleType]:
    """Packages of this folder with their modules, but not their start-up, which imports engines."""
    made = {name: ModuleType(name) for name in names}
    for name, package in made.items():
        package.__path__ = [str(Path(source, *name.split(".")))]
    return made


def module_of(path: Path) -> Any:
    """What a file makes, run as a module that cannot be imported by its name."""
    spec = importlib.util.spec_from_file_location(f"own_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
