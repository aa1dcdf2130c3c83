"""Files of strangers: plans, records, cost models and data are JSON or text, and bounded in size.

Python objects are made of bytes in the agreement between ranks alone, which are the job's own.
"""

from __future__ import annotations

import ast
import json
import os
import re
from pathlib import Path

import pytest

from mcore_batching.planning import CostModel, MCoreBatchingError, Plan, files
from mcore_batching.tools.cli import main

PACKAGE = Path(__file__).resolve().parents[2] / "mcore_batching"
BETWEEN_RANKS = {
    "batch/consensus.py",
    "batch/messages.py",
    "megatron/exchange.py",
    "megatron/job.py",
    "megatron/topology.py",
    "planning/worker.py",  # between a rank and the process that it has started, and plans to ranks
}

RUNS_CODE = {"eval", "exec", "compile", "__import__"}
UNPICKLERS = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
HARMLESS = {"pickle.dumps", "pickle"}


def makes_objects(source: str) -> set[str]:
    """Uses, in a module's source, of all that makes objects, or runs code, out of bytes."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            names = [node.func.id] if node.func.id in RUNS_CODE else []
        elif isinstance(node, ast.keyword) and node.arg in ("weights_only", "allow_pickle"):
            names = [node.arg]
        for name in names:
            parts = name.split(".")
            if (
                UNPICKLERS & {parts[0]}
                or name in RUNS_CODE | {"torch.load", "weights_only", "allow_pickle", "yaml.load"}
                or parts[-1].endswith(("_object", "_object_list"))
            ):
                found.add(name)
    return found - HARMLESS


def test_only_the_agreement_between_ranks_makes_objects_of_bytes() -> None:
    for path in sorted(PACKAGE.rglob("*.py")):
        module = path.relative_to(PACKAGE).as_posix()
        if module not in BETWEEN_RANKS:
            assert makes_objects(path.read_text(encoding="utf-8")) == set(), module


CAP = ("--max-tokens-per-gpu", "100")


@pytest.mark.parametrize("name", ["/dev/zero", "pipe"])
def test_a_job_refuses_devices_and_pipes_without_waiting(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="it is a device or a pipe; copy its content to a file"):
        files.read_document(tmp_path / name)


def test_the_package_starts_one_process() -> None:
    """Another could have the working directory on its path; tests of this one see it has not."""
    starts = re.compile(
        r"^\s*(import|from) +(subprocess|multiprocessing|pty|asyncio)|futures\.process"
        r"|ProcessPoolExecutor|\.multiprocessing|\bos\.(fork|exec|spawn|posix_spawn|system|popen)",
        re.MULTILINE,
    )
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.name != "worker.py":
            assert not starts.search(path.read_text(encoding="utf-8")), path


def test_what_a_terminal_would_act_on_is_escaped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In names of files, of columns and of keys."""
    escape = "\x1b[2J\x9b\u202e"
    folder = tmp_path / f"a{escape}"
    folder.mkdir()
    lengths = folder / "é.csv"
    lengths.write_text(f"{escape},b\n1,2\n")
    plan = folder / "plan.json"
    costs = folder / "costs.json"
    costs.write_text(json.dumps({**json.loads(CostModel().to_json()), escape: 1}))
    assert main(["plan", str(lengths), *CAP, "--column", "b", "--out", str(plan)]) == 0
    assert main(["check", str(plan), str(lengths), "--column", "b"]) == 0
    assert main(["check", str(plan), str(lengths), "--column", "c"]) == 2
    assert main(["plan", str(folder / "none.txt"), *CAP]) == 74
    assert main(["plan", str(lengths), *CAP, "--column", "b", "--cost-model", str(costs)]) == 2
    changed = json.loads(plan.read_text())
    changed["config"][escape] = 1
    plan.write_text(json.dumps(changed))
    assert main(["check", str(plan), str(lengths), "--column", "b"]) == 2
    assert main(["replay", str(folder)]) == 2
    with pytest.raises(MCoreBatchingError) as caught:  # as training prints it, too
        Plan.from_json(plan.read_text())
    printed = "".join(capsys.readouterr()) + str(caught.value)
    assert not {"\x1b", "\x9b", "\u202e"} & set(printed)
    assert "a\\x1b[2J\\x9b\\u202e/é.csv" in printed
