"""Streams, files and signals of the command, each in a real process: exit status and message."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kit.patience import patience

from mcore_batching.planning import CostModel, Plan
from mcore_batching.planning.files import write_whole
from mcore_batching.planning.plans.records import StepRecorder
from mcore_batching.tools import compare, options, plan, replay
from mcore_batching.tools.cli import main

REPOSITORY = Path(__file__).resolve().parents[2]
MARK = "\ufeff".encode()
CAP = "--max-tokens-per-gpu 900"
ASCII = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C", "PYTHONIOENCODING": ""}

LINES = 2**16
"""The limit on lines where input is endless, in place of `MAX_LINES`: these are read in seconds."""
WITH_FEWER_LINES = f"""
import runpy
from mcore_batching.tools import lengths_file
assert lengths_file.MAX_LINES == 2**23
lengths_file.MAX_LINES = {LINES}
runpy.run_module("mcore_batching", run_name="__main__")
"""

COMMANDS = {
    "plan": f"plan lengths.txt {CAP}",
    "check": "check plan.json lengths.txt",
    "compare": f"compare lengths.txt {CAP} --plan-effort 1",
    "replay": "replay records",
    "flags": "flags",
    "help": "plan --help",
    "version": "--version",
}
OUTPUTS = {
    ">&-": (74, "standard output is closed; redirect it to a file or to /dev/null"),
    ">/dev/full": (74, "cannot write standard output: [Errno 28] No space left on device"),
    "<&-": (0, ""),
    "2>&-": (0, ""),
    "": (0, ""),
}
READS = {
    f"plan - {CAP} <&-": (74, "cannot read <stdin>: [Errno 9] standard input is closed"),
    f"compare - {CAP} <&-": (74, "standard input is closed"),
    f"plan . {CAP}": (74, "cannot read .: [Errno 21] Is a directory: '.'"),
    f"plan none.txt {CAP}": (74, "cannot read none.txt: [Errno 2] No such file or directory"),
    f"plan none.txt {CAP} 2>&-": (74, ""),
    f"plan none.txt {CAP} 2>/dev/full": (74, ""),
    "check none.json lengths.txt": (74, "cannot read none.json"),
    "check plan.json none.txt": (74, "cannot read none.txt"),
    "replay none": (74, "cannot read none"),
    f"plan lengths.txt {CAP} --cost-model none": (74, "cannot read none"),
    f"plan lengths.txt {CAP} --model .": (74, "cannot read .: [Errno 21] Is a directory"),
    f"plan lengths.txt {CAP} --out /dev/full": (74, "cannot write /dev/full: No space left"),
    f"plan lengths.txt {CAP} --out none/plan.json": (74, "cannot write none/plan.json: No such"),
    f"plan lengths.txt {CAP} --plot none/plan.svg": (74, "cannot write none/plan.svg: No such"),
    # Wrong input, as far as it is read of endless ones.
    f"plan bytes {CAP}": (2, "cannot read bytes: 'utf-8' codec can't decode byte 0xff"),
    f"plan - {CAP} <bytes": (2, "cannot read <stdin>: 'utf-8' codec can't decode byte 0xff"),
    f"plan /dev/zero {CAP}": (2, "/dev/zero:1: longer than 33554432 characters"),
    f"plan - {CAP} </dev/zero": (2, "<stdin>:1: longer than 33554432 characters"),
    f"plan - {CAP} <endless": (2, f"<stdin>: more than {LINES} lines; give the samples of fewer"),
    "check /dev/zero lengths.txt": (2, "it is longer than the 33554432 characters"),
    f"plan lengths.txt {CAP} --cost-model /dev/zero": (2, "it is longer than the 33554432"),
    "replay /dev/zero": (
        2,
        "/dev/zero:1: not a record of a step: expected a record: it is longer than the 33554432",
    ),
    "plan lengths.txt --max-tokens-per-gpu 0": (2, "(--max-tokens-per-gpu) must be 1"),
    "check plan.json other.txt": (1, "plan.json: invariants hold, but it was made from other"),
    # Named pipes, whose writers come later, and byte order marks.
    f"plan pipe {CAP}": (0, ""),
    "check plan.json pipe": (0, ""),
    f"plan lengths.txt {CAP} --cost-model marked-costs.json": (0, ""),
    f"plan lengths.txt {CAP} --cost-model costs-pipe": (0, ""),
    "check plan-pipe lengths.txt": (0, ""),
    "replay records-pipe": (0, ""),
    "check marked.json marked.txt": (0, ""),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("streams")
    lengths = b"6\n4\n3\n9\n2\n14\n"
    (made / "lengths.txt").write_bytes(lengths)
    (made / "marked.txt").write_bytes(MARK + lengths)
    (made / "marked.csv").write_bytes(MARK + b"n\n" + lengths)
    (made / "other.txt").write_bytes(b"7" + lengths[1:])
    (made / "bytes").write_bytes(b"\xff\xfe\x00")
    (made / "marked-costs.json").write_bytes(MARK + CostModel().to_json().encode())
    (made / "fewer_lines.py").write_text(WITH_FEWER_LINES)
    plan = made / "plan.json"
    lengths_file = str(made / "lengths.txt")
    assert main(["plan", lengths_file, *CAP.split(), "--no-advice", "--out", str(plan)]) == 0
    (made / "marked.json").write_bytes(MARK + plan.read_bytes())
    recorder = StepRecorder(made / "records")
    for seconds in (1.0, 1.1):
        (step,) = Plan.from_json(plan.read_text()).steps
        recorder.append(step, [6, 4, 3, 9, 2, 14], seconds)
    recorder.close()
    return made


WRITERS = {
    "endless": "yes 55",
    "plan-pipe": "cat plan.json",
    "pipe": "cat lengths.txt",
    "costs-pipe": "cat marked-costs.json",
    "records-pipe": r"printf '\357\273\277' | cat - records/*.jsonl",
}


def run(
    folder: Path, script: str, output: int = subprocess.PIPE, **environment: str
) -> subprocess.CompletedProcess[str]:
    """A line of shell in which $MCB is the command."""
    settings = {"PYTHONPATH": str(REPOSITORY), "MCB": f"{sys.executable} -m mcore_batching"}
    return subprocess.run(
        ["sh", "-c", script],
        cwd=folder,
        env={**os.environ, **settings, **environment},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.PIPE,
        text=True,
        timeout=patience(60),
    )


def check(finished: subprocess.CompletedProcess[str], status: int, message: str) -> None:
    assert finished.returncode == status, finished
    if status and message:
        assert finished.stderr.count("\n") == 1, finished
        assert message in finished.stderr
        assert finished.stderr.startswith("mcore-batching: ")
    else:
        assert finished.stderr == ""
        assert bool(finished.stdout) == (status == 0)


@pytest.mark.parametrize("stream", OUTPUTS)
@pytest.mark.parametrize("command", COMMANDS)
def test_streams_of_every_command(folder: Path, command: str, stream: str) -> None:
    """All streams are open in a locale without UTF-8, which gets all output."""
    for unbuffered in ("", "1") if stream == ">/dev/full" else ("",):
        environment = {"PYTHONUNBUFFERED": unbuffered} | (ASCII if not stream else {})
        finished = run(folder, f"$MCB {COMMANDS[command]} {stream}", **environment)
        check(finished, *OUTPUTS[stream])
        assert stream or finished.stdout.isascii()


@pytest.mark.parametrize("command", COMMANDS)
def test_a_reader_that_leaves_early_gets_no_traceback(folder: Path, command: str) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    failed = run(folder, f"exec $MCB {COMMANDS[command]}", write_end)
    os.close(write_end)
    assert (failed.returncode, failed.stderr) == (141, "")


def test_a_reader_of_the_plan_that_leaves_early_gets_no_message(folder: Path) -> None:
    (folder / "many.txt").write_text("5\n" * 20_000)  # more than a pipe holds
    plan = f"$MCB plan many.txt {CAP} --balance none --no-advice --out /dev/stdout"
    finished = run(folder, f"({plan}; echo $? >status) | head -c 1")
    assert (finished.stdout, finished.stderr) == ("{", "")
    assert (folder / "status").read_text() == "141\n"


@pytest.mark.parametrize("command", READS)
def test_what_is_read_and_written(folder: Path, command: str) -> None:
    for name in {*WRITERS} & {*command.replace("<", "").split()}:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)
        writer = f"(sleep 0.3; exec {WRITERS[name]} >{name} 2>/dev/null) >/dev/null 2>&1 &"
        mcb = f"{sys.executable} fewer_lines.py" if name == "endless" else "$MCB"
        check(run(folder, f"{writer} {mcb} {command}"), *READS[command])
        return
    check(run(folder, f"$MCB {command}"), *READS[command])


@pytest.mark.parametrize("locale", [{}, ASCII], ids=["UTF-8", "ASCII"])
def test_input_is_the_same_by_every_way(folder: Path, locale: dict[str, str]) -> None:
    printed = {
        run(folder, f"{script} {CAP} --no-advice", **locale).stdout
        for script in (
            "$MCB plan lengths.txt",
            "$MCB plan - <marked.txt",
            "$MCB plan marked.csv",
            "cat marked.txt | $MCB plan /dev/stdin",
            "(sleep 0.3; cat lengths.txt) | $MCB plan -",
        )
    }
    assert len(printed) == 1
    assert printed.pop().startswith("6 samples in 1 step")


def test_an_interrupted_command_says_so_in_one_line(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    command = [sys.executable, "-m", "mcore_batching", "plan", "-", *CAP.split(), "--out", str(out)]
    with subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Not what the tests may run under: a shell's background jobs ignore the signal.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as running:
        assert running.stdin
        running.stdin.write("3\n" * 50_000)  # more than a pipe holds: it is being read
        running.stdin.flush()
        time.sleep(0.2)
        running.send_signal(signal.SIGINT)
        printed = running.communicate(timeout=patience(60))
    assert running.returncode == 130
    assert printed == ("", "mcore-batching: interrupted\n")
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_written_whole_or_stays_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, link = tmp_path / "plan.json", tmp_path / "link"
    out.write_text("old")
    link.symlink_to(out)
    write_whole(link, b"new")
    assert link.is_symlink()
    assert out.read_text() == "new"

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_whole(out, b"newer")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "plan.json": "new",
        "link": "new",
    }


def test_long_work_shows_a_bar_on_a_terminal_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "SECONDS", 0.01)
    shown = []
    for is_terminal in (False, True):
        monkeypatch.setattr(sys.stderr, "isatty", lambda is_terminal=is_terminal: is_terminal)
        with options.progress("planning") as count:
            for done in (None, 3):
                if done:
                    count(done, 10)
                time.sleep(0.2)
        shown.append(capsys.readouterr())
    assert (shown[0].out, shown[0].err, shown[1].out) == ("", "", "")
    first, *_, bar, _, last, end = shown[1].err.lstrip("\r").split("\r")
    assert re.fullmatch(r"planning: \d s *", first)
    assert re.fullmatch(r"planning: \[#{9} {21}\] 3/10, \d s *", bar)
    assert {len(first), len(bar)} == {79}
    assert (last, end) == (" " * 79, "")


@pytest.mark.parametrize(
    ("command", "parts"),
    [("plan --samples-per-step 2", 3), ("compare --plan-effort 1", 7), ("replay", 2)],
)
def test_commands_count_the_parts_of_their_work(
    folder: Path, monkeypatch: pytest.MonkeyPatch, command: str, parts: int
) -> None:
    counted = []

    @contextlib.contextmanager
    def collecting(_: str) -> Iterator[Callable[[int, int], None]]:
        yield lambda done, total: counted.append((done, total))

    name, *words = command.split()
    module = {"plan": plan, "compare": compare, "replay": replay}[name]
    monkeypatch.setattr(module, "progress", collecting)
    monkeypatch.chdir(folder)
    assert main([*COMMANDS[name].split(), *words]) == 0
    assert counted == [(done, parts) for done in range(1, parts + 1)]
