"""The planning worker: the plans made in line, whatever happens to it, and gone with its parent."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_batching import CostModel, ParallelDims, PlannerConfig, PlanningError
from mcore_batching.planning import (
    OversizeSampleError,
    PlanFormatError,
    StepPlan,
    plan_step,
    worker,
)
from mcore_batching.planning.forest import forest_of_groups
from mcore_batching.planning.worker import (
    MOST_FAILURES,
    PlanningWorker,
    PlanRequest,
    PlanTicket,
)

DIMS = ParallelDims(data_parallel=4, pipeline_parallel=2)
COSTS = CostModel(quadratic=0.3, per_micro_batch=11.0)
REQUEST = PlanRequest(
    tuple(17 * (7 * number % 31) + 1 for number in range(48)),
    DIMS,
    PlannerConfig(max_tokens_per_gpu=1024, plan_effort=10),
    COSTS,
)
BYTES = REQUEST.plan()
PLAN = REQUEST.read(BYTES)
FOREST = forest_of_groups([20] * 8, [15] * 8, "aaaabbbb")
REPOSITORY = Path(__file__).resolve().parents[2]
LIMIT_SECONDS = 60.0


@pytest.fixture
def planner() -> Iterator[PlanningWorker]:
    planner = PlanningWorker()
    yield planner
    planner.close()


def plan_of(ticket: PlanTicket, seconds: float = LIMIT_SECONDS) -> StepPlan:
    ticket.wait(seconds)
    return ticket.request.read(ticket.result(seconds))


def is_gone(pid: int) -> bool:
    """True if no such process runs; one that nobody waited for has ended as well."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def starts_with(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Run `code` in the worker after its imports."""
    code = "import os, resource, time\nimport mcore_batching.planning.worker as it\n" + code
    start = worker._START.replace("\nserve()\n", f"\n{code}\nserve()\n")
    assert start != worker._START
    monkeypatch.setattr(worker, "_START", start)


def test_its_plans_are_those_made_in_line(planner: PlanningWorker) -> None:
    shared = dataclasses.replace(REQUEST.config, max_tokens_per_gpu=256, max_context_parallel=2)
    requests = [
        REQUEST,
        dataclasses.replace(REQUEST, forward_only=True),
        dataclasses.replace(REQUEST, config=shared),
        dataclasses.replace(REQUEST, lengths=()),
        dataclasses.replace(REQUEST, lengths=(20,) * 8, dims=ParallelDims(), forest=FOREST),
        # A request and a plan are larger than a pipe's buffer.
        PlanRequest(
            tuple(100_000 + number % 9973 for number in range(30_000)),
            DIMS,
            PlannerConfig(max_tokens_per_gpu=2**20, balance="none", packing="first-fit"),
            COSTS,
        ),
    ]
    tickets = [planner.submit(request) for request in requests]
    for ticket, request in zip(tickets, requests, strict=True):
        assert ticket.wait(LIMIT_SECONDS)
        plan = plan_of(ticket)
        given = request.lengths, request.dims, request.config, request.cost_model
        named = {"forward_only": request.forward_only, "forest": request.forest}
        assert plan == request.read(request.plan()) == plan_step(*given, **named)
        assert bool(plan.trees) == (request.forest is FOREST)
        assert (plan.cost_model, plan.forward_only) == (request.cost_model, request.forward_only)
    assert planner.complaint() is None


@given(st.integers(0, 8 * len(BYTES) - 1))
def test_a_plan_with_one_wrong_bit_is_refused(bit: int) -> None:
    damaged = bytearray(BYTES)
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(PlanFormatError, match="bytes that are no plan"):
        REQUEST.read(bytes(damaged))


@pytest.mark.parametrize(
    "changes",
    [
        {"lengths": REQUEST.lengths[:-1]},
        {"lengths": (*REQUEST.lengths, 1)},
        {"dims": dataclasses.replace(DIMS, tensor_parallel=2)},
        {"config": PlannerConfig(max_tokens_per_gpu=1024, plan_effort=11)},
        {"cost_model": CostModel()},
        {"forward_only": True},
    ],
)
def test_a_plan_of_another_request_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(PlanFormatError, match="48 samples for 4 ranks"):
        dataclasses.replace(REQUEST, **changes).read(BYTES)


def test_what_the_planner_refuses_is_raised_as_itself(planner: PlanningWorker) -> None:
    config = PlannerConfig(max_tokens_per_gpu=16, on_oversize="error")
    request = dataclasses.replace(REQUEST, config=config)
    with pytest.raises(PlanningError) as own:
        request.plan()
    ticket, pid = planner.submit(request), planner.pid
    with pytest.raises(OversizeSampleError) as raised:
        plan_of(ticket)
    assert str(raised.value) == str(own.value)
    assert plan_of(planner.submit(REQUEST)) == PLAN
    assert (planner.pid, planner.complaint()) == (pid, None)


SLEEPS = "it.plan_step = lambda *given, **named: time.sleep(1000)"
DAMAGES = "it.serialize = lambda plan: b'no plan'"
OTHER_RANKS = """
import dataclasses
from mcore_batching.planning.planner import plan_step
it.plan_step = lambda lengths, dims, *given, **named: plan_step(
    lengths, dataclasses.replace(dims, data_parallel=2), *given, **named
)
"""
NO_MEMORY = """
it.plan_step = lambda *given, **named: bytearray(2**34)
resource.setrlimit(resource.RLIMIT_AS, (2**33, 2**33))
"""
UNKNOWN = dataclasses.replace(REQUEST, lengths=type("Unknown", (tuple,), {})(REQUEST.lengths))
"""Lengths that cannot be sent: their class is found nowhere."""


class Fault(NamedTuple):
    """What is wrong with a worker, and what is said of it."""

    complaint: str
    code: str = ""
    signal: signal.Signals | None = None
    python: str | None = sys.executable
    request: PlanRequest = REQUEST


FAULTS = [
    Fault("was ended by signal 9", signal=signal.SIGKILL),
    Fault("was ended by signal 15", signal=signal.SIGTERM),
    Fault("took more than 0.5 s", signal=signal.SIGSTOP),
    Fault("took more than 0.5 s", SLEEPS),
    Fault("took more than 0.5 s", SLEEPS, signal.SIGSTOP),
    Fault("ended with exit code 3", "os._exit(3)"),
    Fault("ended with exit code 1", "raise RuntimeError"),
    Fault("ended with exit code 0", python="/bin/true"),
    Fault("raised TypeError", "it.plan_step = None"),
    Fault("raised MemoryError", NO_MEMORY),
    Fault("closed its connection", "os.close(0); time.sleep(1000)"),
    Fault("sent no answer: UnpicklingError", "os.write(0, b'\\0\\0\\0\\5no pi')"),
    Fault("gave a wrong answer: 7 bytes that are no plan", DAMAGES),
    Fault("gave a wrong answer: a plan of 48 samples for 2 ranks", OTHER_RANKS),
    Fault("got no request: sys.executable is empty", python=None),
    Fault("got no request: sys.executable is empty", python=""),
    Fault("got no request: .*No such file", python="/nowhere/python"),
    Fault("got no request: .*Permission denied", python=str(REPOSITORY)),
    Fault("got no request.*: PicklingError", request=UNKNOWN),
]


@pytest.mark.parametrize("fault", FAULTS)
def test_after_a_fault_the_plan_is_made_in_line_and_the_reason_is_given_once(
    planner: PlanningWorker, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    starts_with(monkeypatch, fault.code)
    monkeypatch.setattr(sys, "executable", fault.python)
    wait = 0.5 if "0.5" in fault.complaint else LIMIT_SECONDS
    reasons = []
    for _ in range(MOST_FAILURES + 2):
        ticket = planner.submit(fault.request)
        pid = planner.pid
        second = ticket if pid is None else planner.submit(fault.request)
        if pid is not None and fault.signal is not None:
            os.kill(pid, fault.signal)
        assert plan_of(ticket, wait) == plan_of(second, wait) == PLAN
        assert pid is None or is_gone(pid)
        reasons.append(planner.complaint() or "")
    assert pid is None
    assert re.search(fault.complaint, reasons[0])
    assert "failed 3 times" in reasons[MOST_FAILURES]
    assert "".join(reasons) == reasons[0] + reasons[MOST_FAILURES]


def test_failures_count_only_where_no_plan_came_between(
    planner: PlanningWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(2 * MOST_FAILURES + 2):
        with monkeypatch.context() as patch:
            if number % 2:
                starts_with(patch, "os._exit(3)")
            assert plan_of(planner.submit(REQUEST)) == PLAN
        assert (planner.pid is None) == bool(number % 2)
        planner.close()


def test_its_surroundings_are_not_its_parents(
    planner: PlanningWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No modules of the working directory or PYTHONPATH, not the user's script, no open files, no
    Ctrl-C, no torch."""
    for name in ("random", "json", "mcore_batching", "sitecustomize", "__main__"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('not this one')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTHONSTARTUP", str(tmp_path / "random.py"))
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    report = tmp_path / "report"
    starts_with(
        monkeypatch,
        "print(sys.argv[0], *os.listdir('/proc/self/fd'), *sys.modules, "
        f"file=open({str(report)!r}, 'w'))",
    )
    with (tmp_path / "inherited").open("w") as inherited:
        os.set_inheritable(inherited.fileno(), True)
        assert plan_of(planner.submit(REQUEST)) == PLAN
    pid = planner.pid
    assert pid is not None
    os.kill(pid, signal.SIGINT)
    assert plan_of(planner.submit(REQUEST)) == PLAN
    assert (planner.pid, planner.complaint()) == (pid, None)
    assert os.getpgid(pid) == pid  # Ctrl-C is for the terminal's group
    program, *words = report.read_text().split()
    assert program == "-c"
    files = [word for word in words if word.isdecimal()]
    assert len(files) <= 5, files  # three of its own, the report, the folder that is listed
    packages = {word.split(".")[0] for word in words}
    assert "mcore_batching" in packages
    assert not packages & {"torch", "megatron", "numpy"}
    of_this = {word.split(".")[1] for word in words if word.startswith("mcore_batching.")}
    assert of_this == {"planning", "_version"}


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_fork_of_its_parent_does_not_end_it(planner: PlanningWorker) -> None:
    plan_of(planner.submit(REQUEST))
    pid = planner.pid
    fork = os.fork()
    if fork == 0:
        planner.close()
        os._exit(0)
    assert os.waitpid(fork, 0)[1] == 0
    assert plan_of(planner.submit(REQUEST)) == PLAN
    assert (planner.pid, planner.complaint()) == (pid, None)


def own_a_worker(moment: str, is_stopped: bool) -> None:
    """Start a worker, print its process id and that of a fork when it is at some moment, and sleep:
    a program of its own."""
    if moment == "plans":
        starts_with(pytest.MonkeyPatch(), SLEEPS)
    planner = PlanningWorker()
    ticket, pid = planner.submit(REQUEST), planner.pid or 0
    if moment == "waits":
        ticket.wait(LIMIT_SECONDS)
    elif moment == "plans":
        time.sleep(1)
    if is_stopped:
        os.kill(pid, signal.SIGSTOP)
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
    # It keeps the worker's input open, as a worker of a data loader may.
    fork = os.fork()
    if fork:
        print(pid, fork, flush=True)
    time.sleep(1000)


@pytest.mark.parametrize("is_leader", [True, False], ids=["own session", "session of others"])
@pytest.mark.parametrize("is_stopped", [False, True], ids=["runs", "stopped"])
@pytest.mark.parametrize("moment", ["starts", "plans", "waits"])
def test_it_is_gone_with_a_parent_that_is_killed(
    moment: str, is_stopped: bool, is_leader: bool
) -> None:
    owner_code = f"from test_worker import own_a_worker; own_a_worker({moment!r}, {is_stopped})"
    folders = f"{REPOSITORY}{os.pathsep}{Path(__file__).parent}"
    with subprocess.Popen(
        [sys.executable, "-c", owner_code],
        env=os.environ | {"PYTHONPATH": folders},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=is_leader,
    ) as owner:
        assert owner.stdout is not None
        pid, fork = map(int, owner.stdout.readline().split())
        try:
            assert not is_gone(pid)
            owner.kill()
            owner.wait()
            given_up = time.monotonic() + LIMIT_SECONDS
            while not is_gone(pid):
                assert time.monotonic() < given_up
                time.sleep(0.02)
        finally:
            os.kill(fork, signal.SIGKILL)
