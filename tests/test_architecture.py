"""Imports point down and never in a circle, read from the source of every module.

Imports inside functions and under ``TYPE_CHECKING`` count as well, but for the few that a layer may
make only there. Needs neither torch nor megatron, apart from one proof in a fresh process.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest
from kit.patience import patience

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGE = REPOSITORY / "mcore_batching"

LAYERS = {
    "planning": ("", "*"),
    "batch": ("planning torch", ""),
    "rl": ("batch planning torch", ""),
    "flags": ("planning", "*"),
    "megatron": ("batch flags planning *", ""),
    "integrations": ("megatron batch flags planning *", ""),
    "tools": ("flags planning", "megatron *"),
    "run": ("", "integrations megatron *"),
    "__main__": ("tools", "*"),
    "__init__": ("planning", "integrations batch *"),
    "_version": ("", "*"),
}
"""What a direct child of the package may import beside itself, `_version` and the standard library:
at any time, and inside functions and for type checking. Children or packages; ``*``: any package.
"""


class Import(NamedTuple):
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
                assert not node.level, f"{module}:{node.lineno}: imports are absolute"
                names = (f"{node.module}.{alias.name}" for alias in node.names)
                targets = [name if name in modules else str(node.module) for name in names]
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
            function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            yield from statements(node, is_deferred or function)


def is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def wrong_arrows(package: Path, layers: Mapping[str, tuple[str, str]]) -> list[str]:
    """Imports that the layers do not allow, or of modules that the package does not have."""
    modules, wrong = modules_of(package), []
    for each in imports_of(package):
        mine, theirs = (f"{name}.__init__".split(".")[1] for name in (each.module, each.target))
        at_any_time, deferred = layers[mine]
        allowed = {mine, "_version", *f"{at_any_time} {deferred * each.is_deferred}".split()}
        if is_within(each.target, package.name):
            is_allowed = each.target in modules and theirs in allowed
        else:
            name = each.target.partition(".")[0]
            is_allowed = "*" in allowed or name in allowed | sys.stdlib_module_names
        if not is_allowed:
            wrong.append(f"{each.module}:{each.line} imports {each.target}")
    return wrong


def circles(package: Path) -> list[str]:
    """A circle of each package's children taken as wholes, where there is one: no module is in a
    circle of modules unless some are.

    A module that imports from the ``__init__`` of a package that holds it is a circle, too.
    """
    modules = modules_of(package)
    inside = [each for each in imports_of(package) if is_within(each.target, package.name)]
    found = [
        f"{each.module}:{each.line} imports its own package {each.target}"
        for each in inside
        if each.module != each.target and is_within(each.module, each.target)
    ]
    arrows = sorted({(each.module, each.target) for each in inside if each.target in modules})
    for parent in [name for name, path in modules.items() if path.name == "__init__.py"]:
        sorter: TopologicalSorter[str] = TopologicalSorter()
        depth = parent.count(".") + 2
        for arrow in arrows:
            start, end = (".".join(name.split(".")[:depth]) for name in arrow)
            if all(is_within(name, parent) for name in arrow) and start != end:
                sorter.add(end, start)
        try:
            sorter.prepare()
        except CycleError as error:
            found.append(" -> ".join(error.args[1]))
    return found


def test_every_import_is_one_that_its_layer_may_make() -> None:
    assert wrong_arrows(PACKAGE, LAYERS) == []


def test_nothing_imports_in_a_circle() -> None:
    assert circles(PACKAGE) == []


FABRICATED = {
    "__init__": "def late():\n    from house.upper import roof\n",
    "lower/__init__": "from house.lower.ground import LEVEL\n",
    "lower/ground": "import json\n",
    "lower/stairs": "from house.lower import ground\n",
    "upper/__init__": "",
    "upper/roof": "import numpy, house.lower.stairs\nfrom house.lower import LEVEL\n",
}
HOUSE = {"__init__": ("", "upper"), "lower": ("", ""), "upper": ("lower *", "")}


UPWARD = ["house.lower.ground:2 imports house.upper.roof"]
AROUND = ["house.upper -> house.lower -> house.upper"]


@pytest.mark.parametrize(
    ("changes", "arrows", "around"),
    [
        ({}, [], []),
        (
            {"lower/ground": "if TYPE_CHECKING:\n    from house.upper import roof\n"},
            UPWARD,
            AROUND,
        ),
        ({"lower/ground": "def up():\n    import house.upper.roof\n"}, UPWARD, AROUND),
        ({"lower/stairs": "def up():\n    import yaml"}, ["house.lower.stairs:2 imports yaml"], []),
        (
            {"lower/stairs": "from house.lower import LEVEL\n"},
            [],
            ["house.lower.stairs:1 imports its own package house.lower"],
        ),
        ({"upper/roof": "import house.gone\n"}, ["house.upper.roof:1 imports house.gone"], []),
        # Packages wait for each other, though their modules do not.
        (
            {
                "lower/deep/__init__": "",
                "lower/deep/well": "from house.lower import ground\n",
                "lower/deep/lid": "",
                "lower/ground": "from house.lower.deep import lid\n",
            },
            [],
            ["house.lower.ground -> house.lower.deep -> house.lower.ground"],
        ),
    ],
)
def test_the_checker_sees_each_fault(
    tmp_path: Path, changes: dict[str, str], arrows: list[str], around: list[str]
) -> None:
    house = tmp_path / "house"
    for name, text in (FABRICATED | changes).items():
        path = house / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert wrong_arrows(house, HOUSE) == arrows
    assert circles(house) == around


LOADED = """
import sys
before = set(sys.modules)
{code}
loaded = {{name.partition(".")[0] for name in set(sys.modules) - before}}
own = set(sys.stdlib_module_names) | {{"mcore_batching"}}
print(" ".join(sorted(loaded - own)))
"""
COMMAND = """
import io
sys.stdin = io.StringIO("5\\n3\\n")
from mcore_batching.tools.cli import main
assert main(["plan", "-", "--max-tokens-per-gpu", "10"]) == 0
"""


def third_party_loaded_by(code: str, path: Path | None = None) -> set[str]:
    """Top-level modules outside Python's own library that `code` imports in a fresh process."""
    folders = [str(REPOSITORY), *([str(path)] if path else [])]
    finished = subprocess.run(
        [sys.executable, "-c", LOADED.format(code=code)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(folders)},
        capture_output=True,
        text=True,
        timeout=patience(120),
    )
    assert finished.returncode == 0, finished.stderr
    return set(finished.stdout.splitlines()[-1].split())


@pytest.mark.parametrize(
    "code",
    [
        "import mcore_batching.planning",
        "import mcore_batching.tools.cli, mcore_batching.tools.report",
        "import mcore_batching.integrations.slime",
        COMMAND,
    ],
    ids=["planning", "tools", "rollout manager", "command"],
)
def test_a_laptop_needs_the_standard_library_only(code: str) -> None:
    assert third_party_loaded_by(code) == set()


def test_batch_and_rl_load_torch_and_no_megatron() -> None:
    pytest.importorskip("torch")
    loaded = third_party_loaded_by("import mcore_batching.batch, mcore_batching.rl")
    assert "torch" in loaded
    assert not loaded & {"megatron", "transformer_engine", "rich", "matplotlib"}


def test_the_proof_sees_what_a_module_loads(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("")
    (tmp_path / "leaky.py").write_text("import mcore_batching\nimport torch\n")
    assert third_party_loaded_by("import leaky", tmp_path) == {"leaky", "torch"}
