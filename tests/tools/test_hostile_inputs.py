"""The command where its surroundings fail: streams, disks, signals; and files written whole."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from kit.patience import patience

from mcore_batching.planning.plans.files import write_whole

REPOSITORY = Path(__file__).resolve().parents[2]
CAP = ("--max-tokens-per-gpu", "10")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("out", ["> /dev/full", "--out /dev/full"])
def test_a_full_disk_is_an_error_of_one_line(tmp_path: Path, out: str) -> None:
    finished = subprocess.run(
        ["sh", "-c", f"echo 6 | {sys.executable} -m mcore_batching plan - {' '.join(CAP)} {out}"],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=patience(60),
    )
    assert finished.returncode == 2, finished.stderr
    assert finished.stderr.count("\n") == 1
    assert "No space" in finished.stderr


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
