"""The watch of one rank over a store that others write to; with whole jobs in `distributed`."""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from kit.patience import patience

from mcore_batching.megatron import PipelineFailedError, PlanningFailedError, watch
from mcore_batching.megatron.watch import FailureWatch, watch_of_world


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "POLL_SECONDS", 0.01)


def two_ranks() -> list[FailureWatch]:
    store = dist.HashStore()
    return [FailureWatch(store, rank, num_ranks=2) for rank in range(2)]


def raised_by(watch: FailureWatch, exception: Exception) -> PipelineFailedError:
    """What becomes of an exception in a step."""
    with pytest.raises(PipelineFailedError) as info, watch.reporting("step"):
        raise exception
    return info.value


class NoMemoryError(Exception):
    def __str__(self) -> str:
        raise ValueError("this message cannot be made")


@pytest.mark.parametrize(
    ("raised", "text"),
    [
        (KeyError("x"), r"rank 0: step: KeyError: 'x' \(.*, in "),
        # contextlib takes an error that a StopIteration caused for the StopIteration itself.
        (StopIteration(), "rank 0: step: StopIteration"),
        (NoMemoryError(), "rank 0: step: .*NoMemoryError"),
        (SyntaxError("here", ("file", "one", "two", "text")), "SyntaxError: here"),  # no numbers
    ],
)
def test_a_failure_is_raised_on_the_rank_itself(raised: Exception, text: str) -> None:
    """With its cause, also where its message cannot be made."""
    ours, _ = two_ranks()
    error = raised_by(ours, raised)
    assert re.search(text, str(error))
    assert error.__cause__ is (None if isinstance(raised, StopIteration) else raised)


@pytest.mark.parametrize("ending", [KeyError, SystemExit, KeyboardInterrupt])
def test_another_rank_raises_the_first_cause_wherever_it_comes_by_next(
    ending: type[BaseException],
) -> None:
    """Also of a rank that is ended, which ends."""
    ours, theirs = two_ranks()
    raised = PipelineFailedError if ending is KeyError else ending
    with pytest.raises(raised), theirs.reporting("step"):
        raise ending("x")
    said = f"rank 1: step: {ending.__name__}: '?x"
    # Its own error, say of a closed connection, comes of the first one.
    assert re.search(said, str(raised_by(ours, OSError("connection closed"))))
    for _ in range(2):
        with pytest.raises(PipelineFailedError, match=said), ours.waiting():
            pytest.fail("must not begin")


CLOSED = RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1")


@pytest.mark.parametrize("lost", [CLOSED, dist.DistNetworkError("Broken pipe")])
def test_a_lost_connection_waits_for_the_report_of_the_rank_that_closed_it(
    lost: Exception,
) -> None:
    """The connection may be lost first; the rank that lost it used to name itself."""
    ours, theirs = two_ranks()
    late = threading.Timer(0.3, raised_by, (theirs, KeyError("x")))
    late.start()
    reported = pytest.raises(PipelineFailedError, match="rank 1: step: KeyError")
    with reported as info, ours.waiting():
        raise lost
    late.join()
    assert info.value.__cause__ is lost


def test_a_lost_connection_that_nobody_explains_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watch, "PEER_SECONDS", 0.1)
    assert "rank 0: step: RuntimeError: [gloo" in str(raised_by(two_ranks()[0], CLOSED))


def broken_store(error: Exception) -> Any:
    """A store of which every call raises."""
    calls = ("add", "check", "compare_set")
    return mock.Mock(**{f"{call}.side_effect": error for call in calls})


@pytest.mark.parametrize(("agent", "named"), [("", "rank 0: its process has ended"), ("True", "")])
def test_a_lost_store_names_the_rank_that_hosted_it(
    agent: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By itself and, from a loss, where ranks that share a micro-batch would join."""

    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", agent)
    store = broken_store(dist.DistNetworkError("Broken pipe"))
    watch = FailureWatch(store, 1, num_ranks=2)
    assert not watch.is_joined("loss", 2)
    assert (named or "rank 1: step: RuntimeError: [gloo") in str(raised_by(watch, CLOSED))


def hosting_rank() -> tuple[FailureWatch, FailureWatch]:
    """A rank that hosts the store, and another."""
    store = dist.HashStore()
    ours = FailureWatch(store, 0, num_ranks=2, hosted=store)
    return ours, FailureWatch(store, 1, num_ranks=2)


@pytest.mark.parametrize("ending", [KeyError, SystemExit])
def test_the_rank_that_hosts_the_store_stays_until_others_have_read(
    ending: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "LINGER_SECONDS", patience(20))
    ours, theirs = hosting_rank()
    read = threading.Event()

    def read_late() -> None:
        read.set()
        with contextlib.suppress(PipelineFailedError):
            theirs.raise_reported()

    late = threading.Timer(0.5, read_late)
    late.start()
    begun = time.monotonic()
    with pytest.raises((PipelineFailedError, SystemExit)), ours.reporting("step"):
        raise ending("on purpose")
    assert read.is_set()
    late.join()
    assert time.monotonic() - begun < patience(10)


def test_it_stays_for_a_bounded_time_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "LINGER_SECONDS", 0.3)
    ours, _ = hosting_rank()
    begun = time.monotonic()
    raised_by(ours, KeyError("x"))
    assert time.monotonic() - begun > 0.25
    begun = time.monotonic()
    with pytest.raises(PipelineFailedError):
        ours.raise_reported()
    assert time.monotonic() - begun < 0.25


def test_a_failure_aborts_the_process_groups_once_on_every_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On the one that raises, and from the thread of one that waits in a collective, for which the
    interpreter waits: a rank that a closed connection released first ended with SIGABRT."""
    ours, theirs = two_ranks()
    aborts: list[bool] = []
    begun, ended = threading.Event(), threading.Event()

    def abort() -> None:
        aborts.append(threading.current_thread() is threading.main_thread())
        if not aborts[-1]:
            begun.set()
            time.sleep(0.5)
            ended.set()

    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", abort)
    monkeypatch.setattr(watch, "GRACE_SECONDS", patience(60))  # or it ends this process

    def waits() -> None:
        with ours.waiting():
            raised_by(theirs, KeyError("x"))
            assert begun.wait(patience(3))

    with pytest.raises(PipelineFailedError):
        waits()
    ours.stop()
    assert ended.is_set()
    raised_by(theirs, KeyError("y"))
    assert aborts == [True, False]


def test_errors_without_a_failed_pipeline_stay_what_they_are() -> None:
    ours, _ = two_ranks()
    with pytest.raises(PlanningFailedError, match="rank 1: y"), ours.waiting():
        raise PlanningFailedError({1: "y"})
    with ours.waiting():
        pass


def test_a_store_that_takes_no_note_ends_the_job_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others see this rank's connections closed."""
    aborts: list[int] = []
    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", lambda: aborts.append(0))
    store = broken_store(dist.DistStoreError("no room"))
    error = raised_by(FailureWatch(store, 0, num_ranks=2), KeyError("x"))
    assert "rank 0: step: KeyError: 'x' (" in str(error)
    assert "the job's store took no note of it: DistStoreError: no room" in str(error)
    assert aborts == [0]


def test_ranks_that_share_a_micro_batch_join_or_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "ALIKE_SECONDS", 0.1)
    ours, theirs = two_ranks()
    with ours.reporting("step"), theirs.reporting("step"):
        assert not ours.is_joined("first", 2)
        assert theirs.is_joined("first", 2)
    with ours.reporting("step"), theirs.reporting("step"):
        assert not ours.is_joined("first", 2)  # another pipeline
    # Ranks that came to it unequally often before.
    with ours.reporting("step"), theirs.reporting("step"):
        ours.is_joined("first", 2)
        assert theirs.is_joined("first", 2)


def test_the_store_is_left_alone_outside_the_engines_calls() -> None:
    store = mock.Mock(**{"check.return_value": False})
    watch = FailureWatch(store, 0, num_ranks=2)
    time.sleep(0.1)
    assert store.check.call_count == 0
    with watch.waiting():
        time.sleep(0.1)
    assert store.check.call_count > 1
    time.sleep(0.05)
    before = store.check.call_count
    time.sleep(0.1)
    assert store.check.call_count == before


def test_a_call_inside_another_leaves_that_one_watched() -> None:
    """A recorded step gathers the plans of all ranks inside the pipeline's part."""
    ours, theirs = two_ranks()

    def run() -> None:
        with ours.reporting("step"):
            with ours.reporting("gathering plans"):
                pass
            raised_by(theirs, KeyError("x"))
            deadline = time.monotonic() + patience(10)
            while ours._failure is None and time.monotonic() < deadline:
                time.sleep(0.01)
            assert ours._failure is not None, "the thread reads the store"

    with pytest.raises(PipelineFailedError, match="rank 1: step: KeyError"):
        run()
    assert not ours._inside.is_set()


def test_it_ends_with_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    at_exit: list[Callable[[], None]] = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    watches = two_ranks()
    for end in at_exit:
        end()
    assert not any(watch._thread.is_alive() for watch in watches)


def test_one_process_has_no_watch() -> None:
    threads = threading.active_count()
    assert watch_of_world().is_joined("alone", 2)  # it has no peers
    with pytest.raises(KeyError), watch_of_world().reporting("step"):
        raise KeyError("x")
    assert threading.active_count() == threads


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux's full device")
@pytest.mark.parametrize("log", ["errors", "/dev/full"])
def test_a_rank_that_does_not_get_free_is_ended_with_the_cause(tmp_path: Path, log: str) -> None:
    """Its main thread waits in C++ as another rank fails. Where its log was full, its thread ended
    by the error of printing, and the rank waited on."""
    output, errors = tmp_path / "output", tmp_path / log
    child = os.fork()  # importing torch anew takes longer than all other tests here
    if child == 0:
        signal.alarm(int(patience(60)))
        # Never back into pytest, whatever happens.
        with contextlib.suppress(BaseException):
            for number, path in ((1, output), (2, errors)):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
            sys.stdout, sys.stderr = (os.fdopen(n, "w", closefd=False) for n in (1, 2))
            watch.GRACE_SECONDS = 0.1
            ours, theirs = two_ranks()
            print("before")
            with contextlib.suppress(PipelineFailedError), theirs.reporting("step"):
                raise KeyError("x")
            with ours.waiting():
                time.sleep(3600)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 86
    if log == "errors":
        assert output.read_text() == "before\n"
        printed = errors.read_text()
        assert "PipelineFailedError: " in printed
        assert "rank 1: step: KeyError: 'x'" in printed
        assert "rank 0 waited for it and cannot be released" in printed
