"""The line on a terminal while work takes long."""

from __future__ import annotations

import contextlib
import io
import sys
import time
from pathlib import Path

import pytest

from mcore_batching.planning import ParallelDims, PlannerConfig, plan_batch
from mcore_batching.tools.cli import main, progress


class Terminal(io.StringIO):
    """Says that it is one."""

    def isatty(self) -> bool:
        return True


def on_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Standard error from now on. No fixture: pytest sets the stream again before the test."""
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(progress, "FIRST_SECONDS", 0.001)
    monkeypatch.setattr(progress, "EVERY_SECONDS", 0.001)
    assert isinstance(sys.stderr, Terminal)
    return sys.stderr


def wait_for(terminal: Terminal, text: str) -> None:
    deadline = time.monotonic() + 30
    while text not in terminal.getvalue():
        assert time.monotonic() < deadline, terminal.getvalue()
        time.sleep(0.001)


def test_long_work_tells_what_is_done_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    with progress.progress("planning") as tell:
        wait_for(terminal, "\rplanning: 0 s")
        tell(1, 4)
        wait_for(terminal, "\rplanning: step 1 of 4, 0 s, 0 s left")
    lines = terminal.getvalue().split("\r")
    assert lines[-1] == ""
    assert lines[-2].strip() == ""
    assert len(lines[-2]) >= max(map(len, lines[:-2]))


def test_an_error_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    with contextlib.suppress(KeyError), progress.progress("planning"):
        wait_for(terminal, "planning")
        raise KeyError
    end = terminal.getvalue()
    time.sleep(0.02)
    assert terminal.getvalue() == end


def test_nothing_but_a_terminal_sees_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "FIRST_SECONDS", 0.0)
    with progress.progress("planning") as tell:
        tell(1, 2)
        time.sleep(0.02)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(sys, "stderr", None)
    with progress.progress("planning"):
        pass


def test_plans_tell_each_step() -> None:
    told: list[tuple[int, int]] = []
    plan_batch(
        [5] * 7,
        ParallelDims(),
        PlannerConfig(max_tokens_per_gpu=9),
        samples_per_step=3,
        on_step=lambda *done: told.append(done),
    )
    assert told == [(1, 3), (2, 3), (3, 3)]


def test_the_command_shows_its_steps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    terminal = on_terminal(monkeypatch)
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("5\n700\n30\n" * 400)
    command = ["plan", str(lengths), "--max-tokens-per-gpu", "1000", "--pp", "4"]
    assert main([*command, "--samples-per-step", "60"]) == 0
    assert " of 20, " in terminal.getvalue()
