"""`mcore_batching.batch` stands on torch alone: proved in a fresh interpreter."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Loading a forbidden package fails, installed or not.
GUARD = """
import sys

class Forbid:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {forbidden}:
            raise ImportError("imports " + name)

sys.meta_path.insert(0, Forbid())
{statement}
"""


def run_guarded(statement: str, forbidden: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", GUARD.format(forbidden=forbidden, statement=statement)],
        capture_output=True,
        text=True,
        timeout=120,
    )


FORBIDDEN = ("megatron", "transformer_engine", "rich", "matplotlib")


def test_batch_imports_no_megatron() -> None:
    done = run_guarded("import mcore_batching.batch", FORBIDDEN)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["megatron.core", "torch"])
def test_the_proof_can_fail(name: str) -> None:
    done = run_guarded(f"import {name}", (*FORBIDDEN, "torch"))
    assert done.returncode != 0
    assert f"ImportError: imports {name.partition('.')[0]}" in done.stderr
