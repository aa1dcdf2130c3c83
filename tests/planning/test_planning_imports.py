"""What importing the planner imports, proved in a fresh process by a proof that can fail."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

LOADED = """
import sys
before = set(sys.modules)
{code}
loaded = {{name.partition(".")[0] for name in set(sys.modules) - before}}
own = set(sys.stdlib_module_names) | {{"mcore_batching"}}
print(" ".join(sorted(loaded - own)))
"""

BLOCKED = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ImportError(name + " is blocked")
        return None

sys.meta_path.insert(0, Blocker())
{code}
"""

COMMAND = """
import io
sys.stdin = io.StringIO("5\\n3\\n")
from mcore_batching.tools.cli import main
assert main(["plan", "-", "--max-tokens-per-gpu", "10"]) == 0
"""


def run(code: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    folders = [str(REPOSITORY), *([str(path)] if path else [])]
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(folders)},
        capture_output=True,
        text=True,
        timeout=60,
    )


def third_party_loaded_by(code: str, path: Path | None = None) -> set[str]:
    """Top-level modules outside Python's own library that `code` imports in a fresh process."""
    finished = run(LOADED.format(code=code), path)
    assert finished.returncode == 0, finished.stderr
    return set(finished.stdout.splitlines()[-1].split())


@pytest.mark.parametrize(
    "code",
    [
        "import mcore_batching",
        "import mcore_batching.planning",
        "import mcore_batching.tools.cli, mcore_batching.tools.report",
        COMMAND,
    ],
    ids=["package", "planning", "cli", "command"],
)
def test_nothing_outside_the_standard_library_is_imported(code: str) -> None:
    assert third_party_loaded_by(code) == set()


def test_the_proof_can_fail(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("")
    (tmp_path / "leaky_planner.py").write_text("import mcore_batching\nimport torch\n")
    assert third_party_loaded_by("import leaky_planner", tmp_path) == {"leaky_planner", "torch"}


def test_the_command_works_where_none_of_them_can_be_imported() -> None:
    blocked = ("torch", "megatron", "numpy", "rich", "tqdm", "matplotlib")
    finished = run(BLOCKED.format(blocked=blocked, code=COMMAND))
    assert finished.returncode == 0, finished.stderr
    assert "2 samples in 1 step, DP1, cap 10 tokens" in finished.stdout


def test_the_blocker_blocks(tmp_path: Path) -> None:
    (tmp_path / "rich.py").write_text("")
    assert run("import rich", tmp_path).returncode == 0
    finished = run(BLOCKED.format(blocked=("rich",), code="import rich"), tmp_path)
    assert finished.returncode == 1
    assert "rich is blocked" in finished.stderr
