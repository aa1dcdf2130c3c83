"""Files of strangers: plans, records, cost models and data are JSON or text, and bounded in size.

Python objects are made of bytes in the agreement between ranks alone, which are the job's own.
"""

from __future__ import annotations

import ast
import json
import pickle
from pathlib import Path

import pytest
from recorded_jobs import recorded_job, the_file

from mcore_batching.integrations.megatron_lm.sft import jsonl
from mcore_batching.integrations.megatron_lm.sft.conversations import parse_record
from mcore_batching.integrations.megatron_lm.sft.errors import SftDataError, SftRecordError
from mcore_batching.planning import CostModel, MCoreBatchingError, Plan, json_text, records
from mcore_batching.planning.records import RecordError, read_records
from mcore_batching.tools.cli import main

PACKAGE = Path(__file__).resolve().parents[2] / "mcore_batching"
BETWEEN_RANKS = {"batch/consensus.py", "megatron/consensus.py", "megatron/flat_values.py"}

RUNS_CODE = {"eval", "exec", "compile", "__import__"}
UNPICKLERS = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
HARMLESS = {"pickle.dumps", "pickle"}


def makes_objects(source: str) -> set[str]:
    """What a module's source uses of all that makes objects, or runs code, out of bytes."""
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


@pytest.mark.parametrize(
    "source",
    [
        "import marshal",
        "from pickle import loads",
        "import pickle\npickle.load(file)",
        "torch.load(file)",
        "load(file, weights_only=False)",
        "numpy.load(file, allow_pickle=True)",
        "torch.distributed.broadcast_object_list(values)",
        "from torch.distributed import all_gather_object",
        "value = eval(text)",
    ],
)
def test_the_proof_sees_each_way(source: str) -> None:
    assert makes_objects(source)


class Payload:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


CAP = ("--max-tokens-per-gpu", "100")
DEEP = "[" * 100_000
TEXTS = {
    "bytes": bytes(range(256)) * 20,
    "deep": DEEP.encode(),
    "an object": b'{"format": "mcore-batching/plan", "version": 1}',
    "digits": b"9" * 5000,
    "empty": b"",
}


@pytest.mark.parametrize("what", [*TEXTS, 0, 2, 5], ids=lambda what: f"{what}")
def test_what_is_no_json_or_text_is_refused_and_nothing_is_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str | int
) -> None:
    """Among it objects pickled by three protocols."""
    ran, lengths = tmp_path / "ran", tmp_path / "lengths.txt"
    lengths.write_text("6\n4\n")
    content = TEXTS[what] if isinstance(what, str) else pickle.dumps(Payload(ran), what)
    folder = tmp_path / "records"
    folder.mkdir()
    for name in ("x.json", "x.jsonl", "x.csv", "x.pt", "records/steps.jsonl"):
        (tmp_path / name).write_bytes(content + b"\n" if content else b"")
    bad = str(tmp_path / "x")
    for command in (
        ["check", f"{bad}.json", str(lengths)],
        ["plan", str(lengths), *CAP, "--cost-model", f"{bad}.json"],
        ["plan", f"{bad}.jsonl", *CAP, "--column", "n"],
        ["plan", f"{bad}.csv", *CAP, "--column", "n"],
        ["replay", str(folder)],
        ["replay", f"{bad}.pt"],
        ["compare", f"{bad}.jsonl", *CAP, "--column", "n"],
    ):
        if what == "empty" and command[1].endswith(".jsonl"):
            continue  # no samples
        assert main(command) == 2, command
        output = capsys.readouterr()
        assert output.out == ""
        assert output.err.startswith("mcore-batching: ")
        assert output.err.count("\n") == 1
    with pytest.raises((SftDataError, SftRecordError)):
        parse_record(jsonl.JsonLines([f"{bad}.pt"])[0])
    assert not ran.exists()


def test_documents_and_lines_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded_job(tmp_path / "records", [0.5])
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "a", "completion": "b"}\n' * 2 + f'{{"prompt": "{"a" * 2000}"}}\n')
    for module in (json_text, records, jsonl):
        monkeypatch.setattr(module, "MAX_JSON_CHARACTERS", 1000)
    longer = json.dumps({"format": "x" * 1000})
    for read in (CostModel.from_json, Plan.from_json):
        with pytest.raises(MCoreBatchingError, match="longer than the 1000 characters"):
            read(longer)
    file = the_file(tmp_path / "records")
    number = len(file.read_text().splitlines()) + 1
    with file.open("a") as more:
        more.write("0" * 2000)  # no end of a line either: not taken for one that was cut
    with pytest.raises(RecordError, match=f":{number}: .*longer than the 1000 characters"):
        read_records(file)
    with pytest.raises(SftDataError, match=r"data\.jsonl:3: a line may have at most 1000 bytes"):
        jsonl.JsonLines([str(data)])
