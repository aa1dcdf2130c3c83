"""Rollouts of several steps, whose later ones are planned while the first runs."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from kit.exactness import arguments, log_probs_of
from kit.faults import my_samples, small_model
from kit.groups import forget_job
from kit.model import adam
from kit.objective import packed_objective
from mcore_batching.batch.errors import described
from mcore_batching.megatron import (
    add_fields,
    forward_only,
    get_data_iterator,
    schedule_of,
    train_step,
)
from mcore_batching.megatron.job.job import job_of
from mcore_batching.megatron.rollout import maker, plan_ahead
from mcore_batching.megatron.rollout.data_iterator import rollout_of
from mcore_batching.megatron.rollout.maker import Maker
from mcore_batching.megatron.rollout.plan_ahead import PlansAhead
from mcore_batching.planning import ParallelDims, PlanningError
from mcore_batching.planning.planning_process import Call, PlanRequest

GATE_SECONDS = 30.0
_SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}


class Gate:
    """Holds up the planning of later steps on this rank until it is opened."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.were_opened: list[bool] = []
        self._ask = Maker.ask

    def ask(self, of: Maker, *request: Any) -> None:
        self.were_opened.append(self.event.wait(GATE_SECONDS))
        self._ask(of, *request)

    @contextlib.contextmanager
    def open_at_first_pass(self, model: list[Any]) -> Iterator[None]:
        """So that a call which waited for later steps would find it closed."""
        self.event.clear()
        hook = model[-1].register_forward_pre_hook(lambda *unused: self.event.set())
        yield
        hook.remove()


def _plan(args: Any, model: list[Any]) -> tuple[Any, Any]:
    """A rollout, whose data the caller overwrites at once."""
    data = my_samples({"data_parallel": args.data_parallel}, "empty")
    iterators, counts = get_data_iterator(args, model, data)
    for values in data.values():
        for value in values:
            if isinstance(value, torch.Tensor):
                value.zero_()
        values.clear()
    return iterators, counts


def _train(args: Any, model: list[Any], gate: Gate) -> list[Any]:
    """Two rollouts, the second with forward passes first; all that comes of them.

    Returns:
        first the plans' digests, then the rest.
    """
    digests: list[str] = []
    found: list[Any] = [digests]
    optimizer = adam(model, distributed=False)
    for with_fields in (False, True):
        gate.event.clear()
        iterators, counts = _plan(args, model)
        found.append(counts[0])
        if with_fields:
            with gate.open_at_first_pass(model):
                outputs = forward_only(log_probs_of, args, model, iterators, counts)
            add_fields(iterators, outputs)
            found.append([value.tolist() for value in outputs.get("log_probs", [])])
        for step in range(len(counts)):
            with gate.open_at_first_pass(model) if step == 0 else contextlib.nullcontext():
                done = train_step(
                    packed_objective, args, model, iterators, counts, optimizer, step=step
                )
            found.append([done.metrics, done.grad_norm, done.totals.num_samples])
        schedule = schedule_of(iterators)
        digests.append(schedule.plan_digest)
        plans = [schedule.step_plan(step)[0].digest() for step in range(len(counts))]
        found += [list(counts), plans, schedule.steps, schedule.num_samples]
    parameters = b"".join(p.detach().numpy().tobytes() for m in model for p in m.parameters())
    return [*found, hashlib.sha256(parameters).hexdigest()]


def compare(dims: dict[str, Any], reference: str, planner: dict[str, Any]) -> dict[str, Any]:
    """Training whose later steps are planned ahead, and not; rank 0's process is lost, or absent.

    Returns:
        ``found``: by way what came of it, and of it ``not ahead``; ``were_opened``: for each plan
        of a later step, if the first pass was before it; ``said``: of rank 0's, by way.
    """
    args = arguments(ParallelDims(**dims), global_batch_size=5, **planner)
    args.data_parallel = dims.get("data_parallel", 1)
    gate = Gate()
    found: dict[str, list[Any]] = {}
    said: dict[str, list[str]] = {}
    for way in ("not ahead", "ahead", "killed", "stopped", "absent"):
        forget_job()
        model = small_model(dims, reference)
        args.dynamic_batch_no_plan_ahead = way == "not ahead"
        with contextlib.ExitStack() as stack:
            said[way] = _heard(stack)
            asked = gate.ask if way in ("not ahead", "ahead") else _losing(way)
            stack.enter_context(
                mock.patch.object(Maker, "ask", lambda *given, asked=asked: asked(*given))
            )
            if way == "absent" and dist.get_rank() == 0:
                stack.enter_context(mock.patch("sys.executable", "/nowhere/python"))
            stack.enter_context(mock.patch.object(maker, "ANSWER_SECONDS", 60.0))
            if way == "stopped":
                stack.enter_context(mock.patch.object(maker, "ANSWER_SECONDS", 0.5))
            found[way] = _train(args, model, gate)
    return {"found": found, "were_opened": gate.were_opened, "said": said}


def _heard(stack: contextlib.ExitStack) -> list[str]:
    """What this rank says of plans that it makes itself."""
    said: list[str] = []

    def hears(line: str) -> None:
        if "rank 0 plans" in line:
            said.append(line)

    stack.enter_context(mock.patch.object(plan_ahead, "say", hears))
    return said


def _losing(way: str) -> Callable[..., None]:
    """`Maker.ask`, before whose first call something happens to rank 0's process."""
    ask, calls = Maker.ask, iter(range(1000))

    def asked(of: Maker, *request: Any) -> None:
        if next(calls) == 0 and dist.get_rank() == 0 and way in _SIGNALS:
            assert of._process is not None
            os.kill(of._process.pid, _SIGNALS[way])
        ask(of, *request)

    return asked


def mishaps(dims: dict[str, Any], reference: str, planner: dict[str, Any]) -> dict[str, Any]:
    """What becomes of rollouts that are not trained on, and of those that cannot be planned.

    Returns:
        by what happens, errors, and what a rollout that is planned after it comes to.
    """
    args = arguments(ParallelDims(**dims), global_batch_size=5, **planner)
    args.data_parallel = dims.get("data_parallel", 1)
    model, gate = small_model(dims, reference), Gate()
    told: dict[str, Any] = {}

    def planned() -> Any:
        schedule = schedule_of(_plan(args, model)[0])
        return [schedule.plan_digest, schedule.num_microbatches, schedule.steps]

    told["at first"] = planned()
    with mock.patch.object(Maker, "ask", lambda *given: gate.ask(*given)):
        kept = [_plan(args, model) for _ in range(3)]
        told["repr"] = repr(kept[0][1])
        waiting = threading.active_count()
        del kept[0], kept[1]
        gate.event.set()
        told["abandoned"] = planned()
    told["kept"] = [list(kept[0][1]), kept[0][1] == told["abandoned"][1], repr(kept[0][1])]

    iterators, counts = _plan(args, model)
    if dist.get_rank() == 0:
        list(counts)  # the other ranks know the first step alone when plans are gathered
    told["plans"], told["digests"] = [], []
    for step in range(len(counts)):
        made = rollout_of(iterators).of_step(step)
        told["plans"].append(made.step_plan(step)[0].digest())
        told["digests"].append(made.plan_digest)

    def refuse(request: Any) -> Any:
        is_main = threading.current_thread() is threading.main_thread()
        if dist.get_rank() == dist.get_world_size() - 1 and not is_main:
            raise PlanningError("refused, on purpose")
        return plans[type(request)](request)

    plans: dict[type, Any] = {PlanRequest: PlanRequest.plan, Call: Call.plan}
    lost = mock.Mock(side_effect=lambda of, plan, request: maker.settle(plan, OSError("gone")))
    with (
        mock.patch.object(Maker, "ask", lambda *given: lost(*given)),
        mock.patch.object(PlanRequest, "plan", refuse),
        mock.patch.object(Call, "plan", refuse),
    ):
        iterators, counts = _plan(args, model)
        optimizer = adam(model, distributed=False)
        errors = told["errors"] = []
        for step in (0, 1, 1):
            try:
                train_step(packed_objective, args, model, iterators, counts, optimizer, step=step)
            except Exception as error:
                errors.append(described(error))
        try:
            forward_only(log_probs_of, args, model, iterators, counts)
        except Exception as error:
            errors.append(described(error))
    told["after an error"] = planned()
    strict = copy.copy(args)
    strict.dynamic_batch_on_oversize = "error"
    try:
        _plan(strict, model)
    except Exception as error:
        told["oversize"] = described(error)
    told["after a sample over the cap"] = planned()
    told["threads"] = threading.active_count() - waiting
    ahead = job_of(args).memory.only(PlansAhead)
    assert ahead._maker is not None
    told["requests"] = ahead._maker.requests.qsize()
    return told
