"""Where tests find the modules that they share, and what only ``--long`` runs."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
from hypothesis import settings

TESTS = Path(__file__).resolve().parent
EXAMPLES = TESTS.parent / "examples"
SHARED = ("batch", "distributed")
"""Folders of `batch_cases` and `kit`; `planning_cases` lies in this one."""
SCRIPTS = ("data", "sft", "grpo")
"""Folders of the examples' modules, which lie beside their scripts as under torchrun."""
sys.path[:0] = [
    *(str(EXAMPLES / name) for name in SCRIPTS),
    *(str(TESTS / name) for name in SHARED),
]

if shutil.which("nvidia-smi") is None:
    # The CPU stand-in sets it too, but by then megatron-core has loaded the compiler: three seconds
    # of every process that the tests start.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"

# `planning_cases.examples` takes its counts as being for this many.
settings.register_profile("long", max_examples=300)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--long",
        action="store_true",
        help="run the tests marked long as well, and three times as many random cases",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--long"):
        settings.load_profile("long")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--long"):
        return
    left_out = [item for item in items if item.get_closest_marker("long")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
