"""Where tests find modules that they share, what only ``--long`` runs, and what runs at once."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

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

LAUNCH_BY_THEMSELVES = tuple(
    f"/test_{name}.py" for name in ("fault_battery", "harness", "stock_scripts", "stock_training")
)
"""Of `tests/distributed`: the others run their jobs in launches for all, see its `ranks`."""

if shutil.which("nvidia-smi") is None:
    # The CPU stand-in sets it too, but by then megatron-core has loaded the compiler: three seconds
    # of every process that the tests start.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"

# No machine is fast at all times: a case may take as long as it takes.
settings.register_profile("any machine", settings(), deadline=None)
settings.load_profile("any machine")
# `planning_cases.examples` takes its counts as being for this many.
settings.register_profile("long", settings(), max_examples=300)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--long",
        action="store_true",
        help="run the tests marked long as well, and three times as many random cases",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--long"):
        settings.load_profile("long")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests of a file one after the other, and those of all files that share launches."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            shares = "/distributed/" in f"/{file}" and not file.endswith(LAUNCH_BY_THEMSELVES)
            return "ranks" if shares else file

    return Scheduling(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--long"):
        return
    left_out = [item for item in items if item.get_closest_marker("long")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
