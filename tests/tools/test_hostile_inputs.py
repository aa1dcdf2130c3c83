"""The command where its surroundings fail: streams, disks, signals, locales, byte order marks."""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from kit.patience import patience

from mcore_batching.planning import CostModel, Plan
from mcore_batching.tools import files
from mcore_batching.tools.cli import main

REPOSITORY = Path(__file__).resolve().parents[2]
MARK = "\ufeff".encode()
CAP = ("--max-tokens-per-gpu", "10")


def shell(script: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `script`, in which $MCB is the command, in `folder`, where lengths.txt lies."""
    (folder / "lengths.txt").write_text("6\n4\n3\n9\n2\n14\n")
    settings = {"PYTHONPATH": str(REPOSITORY), "MCB": f"{sys.executable} -m mcore_batching"}
    return subprocess.run(
        ["sh", "-c", script],
        cwd=folder,
        env={**os.environ, **settings, **environment},
        capture_output=True,
        text=True,
        timeout=patience(60),
    )


needs_full = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")


@pytest.mark.parametrize(
    ("script", "message"),
    [
        pytest.param("$MCB plan lengths.txt {cap} > /dev/full", "No space", marks=needs_full),
        pytest.param(
            "$MCB plan lengths.txt {cap} --out /dev/full", "write /dev/full", marks=needs_full
        ),
        ("$MCB plan lengths.txt {cap} >&-", "standard output is closed"),
        ("$MCB plan - {cap} <&-", "standard input is closed"),
    ],
)
def test_input_and_output_that_fail_exit_74(tmp_path: Path, script: str, message: str) -> None:
    finished = shell(script.format(cap=" ".join(CAP)), tmp_path)
    assert finished.returncode == 74, finished.stderr
    assert finished.stderr.count("\n") == 1
    assert message in finished.stderr


@needs_full
def test_an_error_that_nobody_can_read_keeps_its_status(tmp_path: Path) -> None:
    for closed in ("2>&-", "2>/dev/full"):
        finished = shell(f"$MCB plan none.txt --max-tokens-per-gpu 9 {closed}", tmp_path)
        assert (finished.returncode, finished.stdout) == (2, "")


def test_an_interrupted_command_says_so_in_one_line(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    command = [sys.executable, "-m", "mcore_batching", "plan", "-", *CAP, "--out", str(out)]
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


def test_a_file_that_cannot_be_finished_stays_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "plan.json"
    out.write_text("old")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        files.write_whole(out, "new")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


def test_files_written_whole_keep_links_and_modes(tmp_path: Path) -> None:
    out, link, pipe = tmp_path / "plan.json", tmp_path / "link", tmp_path / "pipe"
    out.write_text("old")
    out.chmod(0o640)
    link.symlink_to(out)
    files.write_whole(link, "new")
    assert link.is_symlink()
    assert out.read_text() == "new"
    assert stat.S_IMODE(out.stat().st_mode) == 0o640
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    files.write_whole(pipe, b"new")
    assert os.read(reader, 10) == b"new"
    os.close(reader)
    with pytest.raises(IsADirectoryError) as caught:
        files.write_whole(tmp_path, "new")
    assert str(caught.value) == f"[Errno 21] Is a directory: '{tmp_path}'"


def test_a_byte_order_mark_is_no_part_of_the_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lengths.txt").write_bytes(MARK + b"6\n4\n")
    plan, costs = tmp_path / "plan.json", tmp_path / "costs.json"
    costs.write_bytes(MARK + CostModel().to_json().encode())
    lengths, flags = str(tmp_path / "lengths.txt"), [*CAP, "--cost-model", str(costs)]
    assert main(["plan", lengths, *flags, "--out", str(plan)]) == 0
    plan.write_bytes(MARK + plan.read_bytes())
    assert main(["check", str(plan), lengths]) == 0
    assert Plan.from_json(plan.read_text(encoding="utf-8")).num_samples == 2
    capsys.readouterr()
    assert main(["plan", lengths, *CAP]) == 0
    of_file = capsys.readouterr().out
    cap = " ".join(CAP)
    for locale in ("C.UTF-8", "C"):
        piped = shell(
            f"printf '\\357\\273\\2776\\n4\\n' | $MCB plan - {cap}",
            tmp_path,
            **ASCII | {"LC_ALL": locale},
        )
        assert (piped.returncode, piped.stdout) == (0, of_file), piped.stderr


ASCII = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C", "PYTHONIOENCODING": ""}


@pytest.mark.parametrize(
    "script", ["$MCB plan --help", "$MCB compare lengths.txt --max-tokens-per-gpu 20"]
)
def test_a_locale_without_utf_8_gets_all_output(tmp_path: Path, script: str) -> None:
    finished = shell(script, tmp_path, **ASCII)
    assert (finished.returncode, finished.stderr) == (0, "")
    assert finished.stdout.isascii()


def test_the_package_starts_one_process() -> None:
    """Another could have the working directory on its path; tests of this one see it has not."""
    starts = re.compile(
        r"^\s*(import|from) +(subprocess|multiprocessing|pty|asyncio)|futures\.process"
        r"|ProcessPoolExecutor|\.multiprocessing|\bos\.(fork|exec|spawn|posix_spawn|system|popen)",
        re.MULTILINE,
    )
    for path in sorted((REPOSITORY / "mcore_batching").rglob("*.py")):
        if path.name != "planning_process.py":
            assert not starts.search(path.read_text(encoding="utf-8")), path
