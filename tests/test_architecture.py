"""Imports point down and never in a circle, read from the source of every module.

Imports inside functions and under ``TYPE_CHECKING`` count as well, but for the few that a layer may
make only there. Needs neither torch nor megatron, apart from one proof in a fresh process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from import_graph import NOTHING, Layer, circles, imports_of, wrong_arrows
from kit.patience import patience

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGE = REPOSITORY / "mcore_batching"

TORCH = frozenset({"torch"})
LAYERS = {
    "planning": Layer(),
    "batch": Layer(at_any_time=frozenset({"planning"}), outside=TORCH, outside_deferred=TORCH),
    "rl": Layer(
        at_any_time=frozenset({"batch", "planning"}), outside=TORCH, outside_deferred=TORCH
    ),
    "flags": Layer(at_any_time=frozenset({"planning"})),
    "megatron": Layer(at_any_time=frozenset({"batch", "flags", "planning"}), outside=None),
    "integrations": Layer(
        at_any_time=frozenset({"megatron", "batch", "flags", "planning"}), outside=None
    ),
    "tools": Layer(at_any_time=frozenset({"flags", "planning"}), deferred=frozenset({"megatron"})),
    "run": Layer(deferred=frozenset({"integrations", "megatron"})),
    "__main__": Layer(at_any_time=frozenset({"tools"})),
    "__init__": Layer(
        at_any_time=frozenset({"planning"}), deferred=frozenset({"integrations", "batch"})
    ),
    "_version": Layer(),
}


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
    "upper/roof": "import numpy\nfrom house.lower import LEVEL\nfrom ..lower.stairs import up\n",
}
HOUSE = {
    "__init__": Layer(deferred=frozenset({"upper"})),
    "lower": Layer(outside_deferred=NOTHING),
    "upper": Layer(at_any_time=frozenset({"lower"}), outside=None),
}


def build(folder: Path, changes: Mapping[str, str]) -> Path:
    for name, text in (FABRICATED | dict(changes)).items():
        path = folder / "house" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / "house"


def test_a_sound_package_passes(tmp_path: Path) -> None:
    house = build(tmp_path, {})
    assert len(imports_of(house)) == 7
    assert wrong_arrows(house, HOUSE) == circles(house) == []


UPWARD = ["house.lower.ground:2 imports house.upper.roof"]
AROUND = [
    "house.upper.roof -> house.lower -> house.lower.ground -> house.upper.roof",
    "house.upper -> house.lower -> house.upper",
]


@pytest.mark.parametrize(
    ("changes", "arrows", "around"),
    [
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
    house = build(tmp_path, changes)
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
