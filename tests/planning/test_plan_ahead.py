"""Planning the next step while the present one trains."""

from __future__ import annotations

import os
import pickle
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import TimeoutError as NotThereYet
from pathlib import Path
from typing import Any, Literal

import plan_functions
import pytest

from mcore_batching.planning import CostModel, Layout, LengthError, PlannerConfig, plan_step
from mcore_batching.planning.ahead import PlanAhead, PlanAheadError

Where = Literal["process", "thread"]
WHERE: list[Where] = ["process", "thread"]
LAYOUT = Layout(data_parallel=2, pipeline_parallel=2)
CONFIG = PlannerConfig(max_tokens_per_gpu=400, plan_effort=50)


def lengths_of(step: int) -> list[int]:
    generator = random.Random(step)
    return [generator.randint(1, 300) for _ in range(40)]


@pytest.mark.parametrize("where", WHERE)
def test_plans_are_those_of_a_call_and_come_in_order(where: Where) -> None:
    costs = CostModel(quadratic=1 / 500)
    with PlanAhead(plan_step, where=where) as ahead:
        for step in range(3):
            ahead.start(lengths_of(step), LAYOUT, CONFIG, cost_model=costs)
        for step in range(3):
            plan = ahead.result()
            assert plan == plan_step(lengths_of(step), LAYOUT, CONFIG, costs)
            assert plan.cost_model == costs


@pytest.mark.parametrize("where", WHERE)
def test_errors_come_out_of_result_and_the_next_plan_is_made(where: Where) -> None:
    with PlanAhead(plan_step, where=where) as ahead:
        ahead.start([5, -1], LAYOUT, CONFIG)
        ahead.start([5], LAYOUT, CONFIG)
        with pytest.raises(LengthError, match="the length of sample 1") as caught:
            ahead.result()
        assert caught.value.index == 1
        assert ahead.result() == plan_step([5], LAYOUT, CONFIG)


@pytest.mark.parametrize("where", WHERE)
def test_a_plan_that_is_not_there_yet_can_be_asked_for_again(where: Where) -> None:
    with PlanAhead(plan_functions.sleep_for, where=where) as ahead:
        ahead.start(0.5)
        with pytest.raises(NotThereYet):
            ahead.result(timeout_seconds=0.01)
        assert ahead.result() == 0.5


@pytest.mark.parametrize("where", WHERE)
def test_the_caller_goes_on_meanwhile(where: Where) -> None:
    with PlanAhead(plan_functions.sleep_for, where=where) as ahead:
        started = time.perf_counter()
        ahead.start(2.0)
        with pytest.raises(NotThereYet):
            ahead.result(timeout_seconds=0)
        assert ahead.result() == 2.0
        assert time.perf_counter() - started >= 2.0


@pytest.mark.parametrize("where", WHERE)
def test_result_before_start(where: Where) -> None:
    with (
        PlanAhead(plan_step, where=where) as ahead,
        pytest.raises(PlanAheadError, match="call start before result"),
    ):
        ahead.result()


def test_the_process_is_another_and_stays_the_same() -> None:
    with PlanAhead(plan_functions.process_id) as ahead:
        ahead.start()
        ahead.start()
        first, second = ahead.result(), ahead.result()
    assert first == second != os.getpid()
    with PlanAhead(plan_functions.process_id, where="thread") as ahead:
        ahead.start()
        assert ahead.result() == os.getpid()


def is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_closing_ends_the_process_also_during_a_plan() -> None:
    ahead = PlanAhead(plan_functions.sleep_for)
    assert ahead._worker is not None
    process = ahead._worker._process.pid
    ahead.start(60.0)
    started = time.perf_counter()
    ahead.close()
    assert time.perf_counter() - started < 30
    assert not is_running(process)
    ahead.close()


ORPHAN = """
import os, signal, sys, time
from mcore_batching.planning.ahead import PlanAhead
ahead = PlanAhead(time.sleep)
print(ahead._worker._process.pid, flush=True)
for seconds in sys.argv[1:]:
    ahead.start(float(seconds))
    time.sleep(0.2)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("plans", [[], ["600"]], ids=["between plans", "during a plan"])
def test_the_process_ends_with_a_job_that_is_killed(plans: list[str]) -> None:
    killed = subprocess.run(
        [sys.executable, "-c", ORPHAN, *plans], stdout=subprocess.PIPE, text=True, timeout=60
    )
    assert killed.returncode == -signal.SIGKILL
    process = int(killed.stdout)
    ends = time.monotonic() + 30
    while is_running(process):
        assert time.monotonic() < ends
        time.sleep(0.05)


def test_printing_does_not_garble_the_answers(capfd: pytest.CaptureFixture[str]) -> None:
    with PlanAhead(plan_functions.shout) as ahead:
        ahead.start("a")
        ahead.start("b")
        assert (ahead.result(), ahead.result()) == ("A", "B")
    printed = capfd.readouterr()
    assert printed.out == ""
    assert "straight to standard output" in printed.err
    assert "by print" in printed.err


def test_a_process_that_ends_is_an_error() -> None:
    with PlanAhead(plan_functions.end_the_process) as ahead:
        ahead.start()
        with pytest.raises(PlanAheadError, match="the planning process ended with status 7"):
            ahead.result()


@pytest.mark.parametrize("what", ["function", "exception"])
def test_answers_that_cannot_travel_are_an_error(what: str) -> None:
    with PlanAhead(plan_functions.give) as ahead:
        ahead.start(what)
        with pytest.raises(PlanAheadError, match="cannot be pickled"):
            ahead.result()


def test_arguments_that_cannot_travel_are_an_error() -> None:
    with PlanAhead(plan_functions.give) as ahead:
        ahead.start(lambda: None)
        with pytest.raises((pickle.PicklingError, AttributeError)):
            ahead.result()
        ahead.start("function")
        with pytest.raises(PlanAheadError):
            ahead.result()


SCRIPT = """
import sys
print("started", flush=True)
from mcore_batching.planning.ahead import PlanAhead, PlanAheadError
def own(): pass
if __name__ == "__main__":
    try:
        PlanAhead(own)
    except PlanAheadError as error:
        print(error)
"""


def test_functions_of_the_script_are_refused_and_the_script_is_not_run_again(
    tmp_path: Path,
) -> None:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT + "    from mcore_batching.planning import plan_step\n")
    path.write_text(path.read_text() + "    PlanAhead(plan_step).close()\n")
    finished = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, timeout=60, check=True
    )
    started, error = finished.stdout.splitlines()
    assert started == "started"
    assert "is defined in the script that is being run" in error
    assert "set where='thread'" in error


def test_functions_that_the_other_process_cannot_find(monkeypatch: pytest.MonkeyPatch) -> None:
    function: Callable[..., Any] = type("Module", (), {})
    function.__module__ = "no_such_module"
    module = type(sys)("no_such_module")
    module.Module = function  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "no_such_module", module)
    with pytest.raises(PlanAheadError, match="cannot import the plan function") as caught:
        PlanAhead(function)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_unknown_place() -> None:
    with pytest.raises(PlanAheadError, match="where must be 'process' or 'thread', got 'gpu'"):
        PlanAhead(plan_step, where="gpu")  # type: ignore[arg-type]
