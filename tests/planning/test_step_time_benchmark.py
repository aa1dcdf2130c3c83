"""The exit status of `tests/benchmarks/bench_step_time.py`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

FILE = Path(__file__).resolve().parents[1] / "benchmarks" / "bench_step_time.py"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module, with nothing to measure."""
    spec = importlib.util.spec_from_file_location("bench_step_time", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "bench_step_time", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "argv", ["bench_step_time.py"])
    monkeypatch.setattr(module, "sources", lambda data: [])
    monkeypatch.setattr(module, "lockstep_checks", lambda draws: [])
    monkeypatch.setattr(module, "packing_checks", lambda from_sources: [])
    return module


@pytest.mark.parametrize(
    ("what", "measured", "out_of_reach", "status"),
    [
        ("time/floor, a case", 1.0, False, 0),
        ("time/floor, a case", 1.1, False, 1),
        ("gain on a peer, a case", 1.1, True, 0),
        ("seconds, a case", 1.1, False, 0),
        ("seconds at little effort, a case", 1.1, False, 0),
    ],
)
def test_a_missed_target_fails_unless_it_is_of_seconds(
    benchmark: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    what: str,
    measured: float,
    out_of_reach: bool,
    status: int,
) -> None:
    check = benchmark.Check(what, 1.0, measured, out_of_reach=out_of_reach)
    met = benchmark.Check("micro-batches over the cap, a case", 0, 0)
    monkeypatch.setattr(benchmark, "checks", lambda results: [check, met])
    assert benchmark.main() == status
    printed = capsys.readouterr().out
    assert what in printed
    assert met.what in printed
