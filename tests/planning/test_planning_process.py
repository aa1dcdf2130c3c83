"""The process that plans: the same plans, nothing of its parent's surroundings, gone with it."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mcore_batching import CostModel, ParallelDims, PlannerConfig, PlanningError
from mcore_batching.planning import planning_process
from mcore_batching.planning.planning_process import PlanningProcess, PlanRequest

DIMS = ParallelDims(data_parallel=4, pipeline_parallel=2)
COSTS = CostModel(quadratic=0.3, per_micro_batch=11.0)
REQUEST = PlanRequest(
    tuple(17 * (7 * number % 31) + 1 for number in range(48)),
    DIMS,
    PlannerConfig(max_tokens_per_gpu=1024),
    COSTS,
)
REPOSITORY = Path(__file__).resolve().parents[2]
LIMIT_SECONDS = 25.0


@pytest.fixture
def process() -> Iterator[PlanningProcess]:
    process = PlanningProcess()
    yield process
    process.end()


def is_gone(pid: int) -> bool:
    """True if no such process runs; one that nobody waited for has ended as well."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def becomes_true(condition: Callable[[], bool]) -> bool:
    given_up = time.monotonic() + LIMIT_SECONDS
    while not condition() and time.monotonic() < given_up:
        time.sleep(0.05)
    return condition()


def test_its_plans_are_those_made_here(process: PlanningProcess) -> None:
    shared = PlannerConfig(max_tokens_per_gpu=256, max_context_parallel=2)
    for config in (REQUEST.config, shared):
        request = PlanRequest(REQUEST.lengths, DIMS, config, COSTS)
        plan = process.plan(request)
        assert plan == request.plan()
        assert plan.digest() == request.plan().digest()
        forward = PlanRequest(REQUEST.lengths, DIMS, config, COSTS, forward_only=True)
        assert process.plan(forward) == forward.plan()
    own, its = (os.getpriority(os.PRIO_PROCESS, pid) for pid in (0, process.pid))
    # Training has the processor first; no process is nicer than 19.
    assert its == min(19, own + planning_process.NICENESS)


def test_what_the_planner_refuses_is_said_and_the_process_stays(process: PlanningProcess) -> None:
    refused = PlannerConfig(max_tokens_per_gpu=16, on_oversize="error")
    with pytest.raises(PlanningError, match="OversizeSampleError: sample 22 has"):
        process.plan(PlanRequest(REQUEST.lengths, DIMS, refused, COSTS))
    assert process.plan(REQUEST) == REQUEST.plan()


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_that_has_ended_is_an_error(process: PlanningProcess, by: int) -> None:
    os.kill(process.pid, by)
    for _ in range(2):
        with pytest.raises((EOFError, OSError)):
            process.plan(REQUEST)


def test_one_that_is_stopped_ends_all_the_same() -> None:
    process = PlanningProcess()
    os.kill(process.pid, signal.SIGSTOP)
    process.end()
    assert is_gone(process.pid)


def test_a_fork_of_its_owner_does_not_end_it(process: PlanningProcess) -> None:
    fork = os.fork()
    if fork == 0:
        process.end()
        os._exit(0)
    os.waitpid(fork, 0)
    assert process.plan(REQUEST) == REQUEST.plan()


@pytest.mark.parametrize("executable", [None, "", "/nowhere/python", str(REPOSITORY)])
def test_without_a_python_there_is_no_process(
    executable: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", executable)
    with pytest.raises((FileNotFoundError, PermissionError)):
        PlanningProcess()


def test_what_is_no_python_makes_no_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    for executable in ("/bin/true", "/bin/echo"):
        monkeypatch.setattr("sys.executable", executable)
        process = PlanningProcess()
        with pytest.raises((EOFError, OSError, pickle.UnpicklingError)):
            process.plan(REQUEST)
        process.end()


def test_its_surroundings_are_not_its_parents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Modules in the working directory and on PYTHONPATH, other settings, nothing to write to."""
    for name in ("random", "json", "mcore_batching", "sitecustomize", "__main__"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('not this one')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTHONSTARTUP", str(tmp_path / "random.py"))
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))  # as on a read-only file system
    try:
        process = PlanningProcess()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    plan = process.plan(REQUEST)
    process.end()
    assert plan.digest() == REQUEST.plan().digest()
    assert not list(tmp_path.glob("__pycache__"))


def test_it_loads_neither_torch_nor_megatron(
    process: PlanningProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    listing = "import json, sys; print(json.dumps(sorted(sys.modules)))"
    start = planning_process._START.replace("\nserve(", f"\n{listing}\nsys.exit()\nserve(")
    words = [*process._process.args]  # type: ignore[misc]
    words[words.index(planning_process._START)] = start
    loaded = json.loads(subprocess.run(words, capture_output=True, check=True).stdout)
    assert "mcore_batching.planning.planner" in loaded
    packages = {name.split(".")[0] for name in loaded}
    assert not packages & {"torch", "megatron"}
    of_this = {name for name in loaded if name.startswith("mcore_batching.")}
    assert {name.split(".")[1] for name in of_this} <= {"planning", "_version"}


def _own_and_wait(pipe: Any) -> None:
    process = PlanningProcess()
    plan = process.plan(REQUEST)
    pipe.send((process.pid, plan.digest()))
    # Holds the process's input open after its owner is gone, as a worker of a data loader may.
    if os.fork() == 0:
        time.sleep(2 * LIMIT_SECONDS)
        os._exit(0)
    threading.Event().wait()


@pytest.mark.parametrize(("how", "stopped"), [("fork", True), ("spawn", False)])
def test_it_is_gone_with_a_parent_that_is_killed(how: str, stopped: bool) -> None:
    context = multiprocessing.get_context(how)
    here, there = context.Pipe()
    owner = context.Process(target=_own_and_wait, args=(there,))
    owner.start()
    assert here.poll(LIMIT_SECONDS)
    pid, digest = here.recv()
    assert digest == REQUEST.plan().digest()
    assert not is_gone(pid)
    assert owner.pid is not None
    if stopped:
        os.kill(pid, signal.SIGSTOP)
    os.kill(owner.pid, signal.SIGKILL)
    owner.join()
    assert becomes_true(lambda: is_gone(pid))


@pytest.mark.long
def test_many_plans_take_no_more_memory_and_a_busy_core_only_time(
    process: PlanningProcess,
) -> None:
    def resident_kib() -> int:
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))

    core = {min(os.sched_getaffinity(0))}
    os.sched_setaffinity(process.pid, core)
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    os.sched_setaffinity(busy.pid, core)
    try:
        seen = []
        for number in range(2000):
            lengths = tuple(length + number for length in REQUEST.lengths[:8])
            request = PlanRequest(lengths, DIMS, REQUEST.config, COSTS)
            plan = process.plan(request)
            if number % 200 == 0:
                assert plan == request.plan()
                seen.append(resident_kib())
    finally:
        busy.kill()
        busy.wait()
    assert seen[-1] < 1.02 * seen[1]
