"""Rollouts of several steps, of which the later ones are planned while earlier ones run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from kit.calls import my_samples, small_model
from kit.exactness import arguments, log_probs_of
from kit.model import adam
from kit.objective import packed_objective
from kit.workers import is_planning_rank
from mcore_batching.batch.errors import described
from mcore_batching.megatron import (
    forward_only,
    get_data_iterator,
    schedule_of,
    train_step,
)
from mcore_batching.megatron.plan import Planner
from mcore_batching.planning import ParallelDims, PlanningError
from mcore_batching.planning.worker import PlanRequest


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


def _errors(*calls: Callable[[], Any]) -> list[str]:
    errors = []
    for call in calls:
        try:
            call()
        except Exception as error:
            errors.append(described(error))
    return errors


def mishaps(dims: dict[str, Any], reference: str, planner: dict[str, Any]) -> dict[str, Any]:
    """What becomes of rollouts that are not trained on, and of those that cannot be planned.

    Returns:
        by what happens, errors, and what a rollout that is planned after it comes to.
    """
    args = arguments(ParallelDims(**dims), global_batch_size=5, **planner)
    args.data_parallel = dims.get("data_parallel", 1)
    model = small_model(dims, reference)
    optimizer = adam(model, distributed=False)
    told: dict[str, Any] = {}

    def planned() -> Any:
        schedule = schedule_of(_plan(args, model)[0])
        return [schedule.plan_digest, schedule.num_microbatches, schedule.steps]

    def step(rollout: tuple[Any, Any], number: int) -> Callable[[], Any]:
        iterators, counts = rollout
        return lambda: train_step(
            packed_objective, args, model, iterators, counts, optimizer, step=number
        )

    told["at first"] = planned()
    kept = [_plan(args, model) for _ in range(3)]
    told["repr"] = repr(kept[0][1])
    del kept[0], kept[1]
    told["abandoned"] = planned()
    told["kept"] = [list(kept[0][1]), kept[0][1] == told["abandoned"][1], repr(kept[0][1])]

    rollout = _plan(args, model)
    plan, calls = Planner.plan, iter(range(100))

    def refuse(*given: Any) -> Any:
        if next(calls) >= 0 and is_planning_rank():
            raise PlanningError("refused, on purpose")
        return plan(*given)

    with mock.patch.object(Planner, "plan", refuse):
        told["not planned"] = _errors(
            step(rollout, 0),
            step(rollout, 1),
            step(rollout, 1),
            lambda: forward_only(log_probs_of, args, model, *rollout),
        )
    rollout = _plan(args, model)
    read = PlanRequest.read

    def damaged(request: PlanRequest, document: bytes) -> Any:
        return read(request, document[:-1])

    if not is_planning_rank():
        with mock.patch.object(PlanRequest, "read", damaged):
            told["damaged"] = _errors(step(rollout, 1))
    else:
        told["damaged"] = _errors(step(rollout, 1))
    iterators, _ = _plan(args, model)
    told["early"] = _errors(lambda: [iterators[0].get_next(["tokens"]) for _ in range(1000)])
    # A rank that is ahead of the others is no reason to hang.
    rollout = _plan(args, model)
    told["apart"] = _errors(step(rollout, int(is_planning_rank())))
    told["after an error"] = planned()
    strict = copy.copy(args)
    strict.dynamic_batch_on_oversize = "error"
    told["oversize"] = _errors(lambda: _plan(strict, model))
    told["after a sample over the cap"] = planned()
    return told
