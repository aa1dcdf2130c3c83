"""Plans that are made ahead, in one process: which are used, and what comes in place of others."""

from __future__ import annotations

import dataclasses
import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from mcore_batching.batch import StepTotals
from mcore_batching.batch.agreement.consensus import Agreement
from mcore_batching.batch.agreement.figures import least, rank_total
from mcore_batching.megatron.job.consensus import JobConsensus
from mcore_batching.megatron.job.failure_watch import FailureWatch
from mcore_batching.megatron.rollout import plan_ahead
from mcore_batching.megatron.rollout.plan_ahead import PlansAhead
from mcore_batching.megatron.rollout.settings import Settings
from mcore_batching.megatron.rows.prepared_step import PreparedStep
from mcore_batching.planning import (
    ConfigError,
    CostModel,
    OversizeSampleError,
    ParallelDims,
    PlannerConfig,
    PlanningError,
)
from mcore_batching.planning.learn import LearntCosts
from mcore_batching.planning.planning_process import PlanRequest

SETTINGS = Settings(ParallelDims(), PlannerConfig(max_tokens_per_gpu=64), CostModel())
LENGTHS = [30, 20, 40, 10]
PATIENCE_SECONDS = 60.0


def request(lengths: list[int], settings: Settings = SETTINGS) -> PlanRequest:
    return PlanRequest(tuple(lengths), settings.dims, settings.config, settings.cost_model)


JOB: Any = SimpleNamespace(
    consensus=SimpleNamespace(for_thread=lambda: JobConsensus.__new__(JobConsensus)),
    options=None,
    memory=None,
    watch=FailureWatch(None),
)


@pytest.fixture(autouse=True)
def _no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr("torch.cuda.set_device", lambda device: None)


def connected() -> PlansAhead:
    ahead = PlansAhead()
    ahead.connect(JOB)
    return ahead


def begin(ahead: PlansAhead, asked: PlanRequest) -> None:
    """Let a plan be made ahead, in the place of the step that is made by it."""
    make: Any = lambda job, operation, plan: plan(asked)  # noqa: E731
    ahead.begin(JOB, make)


@pytest.fixture
def ahead() -> Iterator[PlansAhead]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    ahead = connected()
    ahead._seconds_in_line = PATIENCE_SECONDS  # as planning may take
    yield ahead
    assert ahead._maker is not None
    ahead._maker.end()
    dist.destroy_process_group()


def plans_in_line(ahead: PlansAhead, asked: PlanRequest) -> int:
    """How many plans this process makes to get one, which is the right one."""
    expected, plan = asked.plan(), PlanRequest.plan
    if ahead._ahead is not None:
        ahead._made()
    with mock.patch.object(PlanRequest, "plan", autospec=True, side_effect=plan) as counted:
        assert ahead.plan(asked) == expected
    return counted.call_count


def test_a_plan_that_was_made_ahead_is_used(ahead: PlansAhead) -> None:
    assert plans_in_line(ahead, request(LENGTHS)) == 1
    ahead._seconds_in_line = PATIENCE_SECONDS
    begin(ahead, request(LENGTHS))
    assert plans_in_line(ahead, request(LENGTHS)) == 0
    assert ahead._made() == request(LENGTHS).plan()
    assert plans_in_line(ahead, request(LENGTHS)) == 0  # as where the step is run again


@pytest.mark.parametrize(
    "asked",
    [
        request(LENGTHS[:3]),
        request(LENGTHS[::-1]),
        request(LENGTHS, Settings(SETTINGS.dims, SETTINGS.config, CostModel(quadratic=9.0))),
        request(
            LENGTHS,
            Settings(SETTINGS.dims, PlannerConfig(max_tokens_per_gpu=48), SETTINGS.cost_model),
        ),
    ],
    ids=["fewer", "in another order", "by other costs", "under another cap"],
)
def test_a_plan_of_something_else_is_not_used(
    ahead: PlansAhead, asked: PlanRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    begin(ahead, request(LENGTHS))
    assert plans_in_line(ahead, asked) == 1
    assert capsys.readouterr().out == ""


def test_a_step_that_cannot_be_made_is_left_to_the_main_thread(
    ahead: PlansAhead, capsys: pytest.CaptureFixture[str]
) -> None:
    errors = [ConfigError("no samples"), *[OSError("connection closed")] * 3]
    for error in errors:
        ahead.begin(JOB, mock.Mock(side_effect=error))
        assert plans_in_line(ahead, request(LENGTHS)) == 1
        # Raised on all ranks alike, or by messages: then other ranks may be elsewhere.
        ahead._seconds_in_line = PATIENCE_SECONDS
        begin(ahead, request(LENGTHS))
        assert plans_in_line(ahead, request(LENGTHS)) == isinstance(error, OSError)
    assert capsys.readouterr().out.count("ranks lost each other: connection closed") == 1
    assert ahead._maker is not None
    assert ahead._maker._thread.is_alive()


def test_what_cannot_be_planned_is_the_planners_own_error(
    ahead: PlansAhead, capsys: pytest.CaptureFixture[str]
) -> None:
    config = PlannerConfig(max_tokens_per_gpu=16, on_oversize="error")
    settings = Settings(SETTINGS.dims, config, SETTINGS.cost_model)
    begin(ahead, request(LENGTHS, settings))
    ahead._made()
    with pytest.raises(OversizeSampleError):
        ahead.plan(request(LENGTHS, settings))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("by", ["SIGKILL", "SIGSTOP"])
def test_a_process_that_is_lost_is_said_once(
    ahead: PlansAhead, by: str, capsys: pytest.CaptureFixture[str]
) -> None:
    maker = ahead._maker
    assert maker is not None
    assert maker._process is not None
    os.kill(maker._process.pid, signal.Signals[by])
    for number in range(4):
        ahead._seconds_in_line = 0.2 if number == 0 and by == "SIGSTOP" else PATIENCE_SECONDS
        begin(ahead, request([*LENGTHS, number + 1]))
        started = time.monotonic()
        assert plans_in_line(ahead, request([*LENGTHS, number + 1])) == 1
        # A stopped process is asked once, and not waited for again.
        assert time.monotonic() - started < PATIENCE_SECONDS / 2
    said = capsys.readouterr().out
    assert said.count("rank 0 plans in line, for which its device waits: ") == 1
    why = {"SIGKILL": f"planning process {maker._process.pid} failed", "SIGSTOP": "is late"}
    assert why[by] in said


def test_whoever_has_a_plan_may_ask_for_the_next_at_once(ahead: PlansAhead) -> None:
    """The process was still taken for busy, and the thread made the next plan of a rollout."""
    maker, plans = ahead._maker, [Future[Any](), Future[Any]()]
    assert maker is not None
    plans[0].add_done_callback(lambda first: maker.ask(plans[1], request(LENGTHS[:3])))
    maker.ask(plans[0], request(LENGTHS))
    assert plans[1].result(PATIENCE_SECONDS)[1] == request(LENGTHS[:3]).plan()


def test_a_full_disk_does_not_keep_a_step_from_being_planned(
    ahead: PlansAhead, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = mock.Mock(write=mock.Mock(side_effect=OSError("no space left on device")))
    ahead.begin(JOB, mock.Mock(side_effect=OSError("connection closed")))
    monkeypatch.setattr("sys.stdout", full)
    assert plans_in_line(ahead, request(LENGTHS)) == 1
    full.write.assert_called()


@pytest.mark.parametrize("is_of_these", [True, False])
def test_a_step_that_is_late_does_not_hold_up_the_next(
    ahead: PlansAhead, is_of_these: bool
) -> None:
    maker = ahead._maker
    assert maker is not None
    assert maker._process is not None
    os.kill(maker._process.pid, signal.SIGSTOP)
    started = time.monotonic()
    begin(ahead, request(LENGTHS))
    assert ahead._ahead is not None
    first = ahead._ahead.made
    if is_of_these:  # else nobody asks for it
        ahead._seconds_in_line = 0.2
        assert ahead._made() is None
        # Nor other ranks, whose threads wait for this one's messages of the step.
        with pytest.raises(PlanningError, match="CancelledError"):
            first.result(PATIENCE_SECONDS / 2)
    ahead._seconds_in_line = PATIENCE_SECONDS
    begin(ahead, request(LENGTHS))  # of which another number of samples is drawn
    begin(ahead, request(LENGTHS))
    assert ahead._made() is None
    assert time.monotonic() - started < PATIENCE_SECONDS / 2


@dataclasses.dataclass(frozen=True)
class Planned(Settings):
    """A schedule, as far as it is read here."""

    learnt: Any = None


@pytest.mark.parametrize(
    ("of_all", "is_of_these", "settings", "is_taken"),
    [
        (1, True, SETTINGS, True),
        (0, True, SETTINGS, False),  # another rank has not made it
        (0, False, SETTINGS, False),
        (0, True, dataclasses.replace(SETTINGS, cost_model=CostModel(quadratic=9.0)), False),
    ],
)
def test_a_step_is_taken_if_all_ranks_made_it_of_the_same(
    ahead: PlansAhead, of_all: int, is_of_these: bool, settings: Settings, is_taken: bool
) -> None:
    schedule: Any = Planned(**vars(SETTINGS))
    made = PreparedStep(schedule, 0, [], [], StepTotals(), [])
    ahead.begin(JOB, lambda of, operation, plan: made)
    says: list[Any] = []

    def agree(stage: str, work: Any, say: Any) -> Agreement[Any]:
        result = work()
        says.append(say(result).figures["made ahead"])
        return Agreement(result, {}, {"made ahead": of_all})

    job: Any = SimpleNamespace(
        options=SimpleNamespace(learns_cost_model=False), consensus=SimpleNamespace(agree=agree)
    )
    with mock.patch.object(Settings, "of", return_value=settings):
        taken, found = ahead.take(job, [], None, is_of_these=is_of_these)
    assert (taken, found) == (made if is_taken else None, settings)
    assert says == [least(int(is_of_these and settings is SETTINGS))]


def test_measurements_are_agreed_on_and_costs_are_those_of_the_step_s_beginning(
    ahead: PlansAhead,
) -> None:
    begin(ahead, request(LENGTHS))
    config, dims = PlannerConfig(max_tokens_per_gpu=64), ParallelDims(data_parallel=2)
    learner = mock.Mock(evidence=mock.Mock(return_value=[1.0]))
    learnt = LearntCosts(shape=CostModel(), cost_model=CostModel())
    before = Settings(dims, config, CostModel(), learnt)

    def agree(stage: str, work: Any, say: Any) -> Agreement[Any]:
        result = work()
        assert say(result).figures["pass times"] == rank_total([1.0])
        return Agreement(result, {}, {"made ahead": 0, "pass times": [3.0]})

    job: Any = SimpleNamespace(
        options=SimpleNamespace(learns_cost_model=True), consensus=SimpleNamespace(agree=agree)
    )
    with (
        mock.patch.object(Settings, "of", return_value=before),
        mock.patch.object(plan_ahead, "learners_of") as learners,
    ):
        learners.return_value.of.return_value = learner
        taken, settings = ahead.take(job, [], None, is_of_these=False)
    assert taken is None
    assert settings is before
    learner.evidence.assert_called_once_with(dims)
    learner.learn.assert_called_once_with([3.0])


def test_thread_and_process_end_with_the_job() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    ahead = connected()
    maker = ahead._maker
    assert maker is not None
    assert maker._process is not None
    # A step keeps its job, and that all that it remembers.
    job = SimpleNamespace(options=None, memory=ahead)
    ahead.begin(job, lambda of, operation, plan: [of, plan(request(LENGTHS))])
    ahead._seconds_in_line = PATIENCE_SECONDS
    assert ahead._made() is not None
    del ahead, job
    gc.collect()
    assert not maker._thread.is_alive()
    assert maker._process._process.poll() is not None
    dist.destroy_process_group()


def test_a_system_without_threads_left_fails_once(
    ahead: PlansAhead, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_thread = mock.Mock(side_effect=RuntimeError("can't start new thread"))
    maker, plan = ahead._maker, Future[Any]()
    assert maker is not None
    with monkeypatch.context() as patch:
        patch.setattr("threading.Thread.start", no_thread)
        maker.ask(plan, request(LENGTHS))
        anew = PlansAhead()
        with pytest.raises(RuntimeError, match="start new thread"):
            anew.connect(JOB)
    assert isinstance(plan.exception(timeout=0), RuntimeError)
    begin(ahead, request(LENGTHS))
    assert plans_in_line(ahead, request(LENGTHS)) == 0
    anew.connect(JOB)
    assert anew._maker is not None
    anew._maker.end()


@pytest.mark.long
def test_two_thousand_steps_take_no_more_memory(ahead: PlansAhead) -> None:
    def resident_kib() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))

    seen = []
    for number in range(2000):
        lengths = [length + number % 7 for length in LENGTHS]
        ahead._seconds_in_line = PATIENCE_SECONDS
        begin(ahead, request(lengths))
        assert ahead._made() is not None
        ahead.plan(request(lengths))
        if number % 200 == 0:
            seen.append(resident_kib())
    assert seen[-1] < 1.02 * seen[1]
    assert threading.active_count() < 10
