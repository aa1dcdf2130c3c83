"""The import statements of a package, and the arrows and circles that they make."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

NOTHING: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Layer:
    """What a direct child of the package may import beside itself and `_version`."""

    at_any_time: frozenset[str] = frozenset()
    """Layers."""
    deferred: frozenset[str] = frozenset()
    """Layers that it may import inside functions and for type checking only."""
    outside: frozenset[str] | None = frozenset()
    """Packages beyond the standard library; None: any."""
    outside_deferred: frozenset[str] | None = field(default=None)
    """The same inside functions and for type checking; None: any."""


@dataclass(frozen=True)
class Import:
    """One imported module, as a dotted name; of the package itself if it is one of its modules."""

    module: str
    target: str
    line: int
    is_deferred: bool


def modules_of(package: Path) -> dict[str, Path]:
    """Dotted name to file of every module; a package's ``__init__`` has the package's name."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(package: Path) -> list[Import]:
    """Every import statement's targets, of all modules."""
    modules = modules_of(package)
    found = []
    for module, path in modules.items():
        for node, is_deferred in statements(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            else:
                base = node.module or ""
                if node.level:
                    parents = module.split(".") + ["__init__"] * (path.name == "__init__.py")
                    above = parents[: -node.level]
                    base = ".".join([*above, base] if base else above)
                names = (f"{base}.{alias.name}" for alias in node.names)
                targets = [name if name in modules else base for name in names]
            found += [
                Import(module, target, node.lineno, is_deferred)
                for target in dict.fromkeys(targets)
            ]
    return found


def statements(
    tree: ast.AST, is_deferred: bool = False
) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Import statements, each with True if importing the module does not run it."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node, is_deferred
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from statements(ast.Module(node.body, []), True)
            yield from statements(ast.Module(node.orelse, []), is_deferred)
        else:
            function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from statements(node, is_deferred or function)


def is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def wrong_arrows(package: Path, layers: Mapping[str, Layer]) -> list[str]:
    """Imports that the layers do not allow, or of modules that the package does not have."""
    root, modules = package.name, modules_of(package)

    def layer_of(name: str) -> str:
        return name.split(".")[1] if "." in name else "__init__"

    wrong = []
    for each in imports_of(package):
        mine = layers[layer_of(each.module)]
        if is_within(each.target, root):
            theirs = layer_of(each.target)
            allowed = theirs in mine.at_any_time | {layer_of(each.module), "_version"}
            allowed |= each.is_deferred and theirs in mine.deferred
            allowed &= each.target in modules
        else:
            name = each.target.partition(".")[0]
            outside = mine.outside_deferred if each.is_deferred else mine.outside
            allowed = outside is None or name in outside | sys.stdlib_module_names
        if not allowed:
            wrong.append(f"{each.module}:{each.line} imports {each.target}")
    return wrong


def circles(package: Path) -> list[str]:
    """A circle of modules, and one of each package's children taken as wholes, where there is one.

    A module that imports from the ``__init__`` of a package that holds it is a circle, too.
    """
    modules = modules_of(package)
    inside = [each for each in imports_of(package) if is_within(each.target, package.name)]
    upward = [
        f"{each.module}:{each.line} imports its own package {each.target}"
        for each in inside
        if each.module != each.target and is_within(each.module, each.target)
    ]
    arrows = {(each.module, each.target) for each in inside if each.target in modules}
    found = circle(arrows)
    for parent in [name for name, path in modules.items() if path.name == "__init__.py"]:
        depth = parent.count(".") + 2
        below = [pair for pair in arrows if all(is_within(name, parent) for name in pair)]
        between = {tuple(".".join(name.split(".")[:depth]) for name in pair) for pair in below}
        found += circle({(a, b) for a, b in between if a != b and parent not in (a, b)})
    return [*dict.fromkeys(found), *upward]


def circle(arrows: set[tuple[str, str]]) -> list[str]:
    sorter: TopologicalSorter[str] = TopologicalSorter()
    for start, end in sorted(arrows):
        sorter.add(end, start)
    try:
        sorter.prepare()
    except CycleError as error:
        return [" -> ".join(error.args[1])]
    return []
