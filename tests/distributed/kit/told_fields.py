"""Undeclared fields whose kinds the samples of some ranks leave open."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state

from kit.exactness import arguments
from kit.faults import small_model
from mcore_batching.batch import DEFAULT_SCHEMA
from mcore_batching.megatron import add_fields, get_data_iterator, schedule_of
from mcore_batching.megatron.job.job import job_of
from mcore_batching.megatron.rollout.planning_protocol import begin_step
from mcore_batching.megatron.rollout.rollout import RolloutRequest
from mcore_batching.megatron.rows.schedule import MicroBatchSchedule
from mcore_batching.planning import ParallelDims

TELLING, OPEN, EMPTY = [(5, 2), (4, 4), (6, 3)], [(6, 6), (3, 3)], []
"""Total and response lengths by which rows per token and per response token differ, or do not."""


def told_fields(
    dims: dict[str, Any], reference: str, planner: dict[str, Any] | None = None
) -> dict[str, Any]:
    """What becomes of such fields, call by call; the message where one is refused."""
    shape = ParallelDims(**dims)
    model, args = small_model(dims, reference), arguments(shape, **(planner or {}))
    replica, replicas = parallel_state.get_data_parallel_rank(), shape.data_parallel
    is_last_stage = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    # The first rank to have samples leaves the field open, and so does one more; the last is empty.
    shapes = [OPEN, TELLING, OPEN, EMPTY][:replicas]

    def rows(shapes: list[tuple[int, int]], kind: int) -> list[torch.Tensor]:
        return [torch.full((each[kind],), float(each[1])) for each in shapes]

    def data(shapes: list[tuple[int, int]], **fields: Any) -> dict[str, Any]:
        totals = [total for total, _ in shapes]
        responses = [response for _, response in shapes]
        tokens = [torch.arange(total) for total in totals]
        lengths = {"total_lengths": totals, "response_lengths": responses}
        return {"tokens": tokens, **lengths, **fields}

    def planned(given: dict[str, Any] | None) -> MicroBatchSchedule:
        return schedule_of(get_data_iterator(args, model, given)[0])

    def planned_at_once(given: dict[str, Any] | None) -> MicroBatchSchedule:
        """As in a stock script."""
        job = job_of(args)
        request = RolloutRequest(job, model, DEFAULT_SCHEMA, lambda: given, one_step=True)
        return begin_step(request)()

    own = shapes[replica]
    mine, kind = rows(own, 1), 0 if replica else 1
    contrary = [(5, 2), (4, 1)]

    def added(name: str, values: list[torch.Tensor], shapes: Any) -> MicroBatchSchedule:
        iterators, _ = get_data_iterator(args, model, data(shapes))
        add_fields(iterators, {name: values})
        return schedule_of(iterators)

    def images(shapes: list[tuple[int, int]]) -> list[Any]:
        return [{"pixels": torch.rand(2)} if replica == 1 else None for _ in shapes]

    whole = [OPEN, OPEN, OPEN, EMPTY][replica]
    calls: dict[str, tuple[str, Callable[[], MicroBatchSchedule]]] = {
        "told": ("a", lambda: planned(data(own, a=mine))),
        "none": ("b", lambda: planned(None if is_last_stage else data(own, b=mine))),
        "open": ("c", lambda: planned(data(whole, c=rows(whole, 1)))),
        "later": ("a", lambda: planned(data(whole, a=rows(whole, 1)))),
        "differ": ("d", lambda: planned(data(contrary, d=rows(contrary, kind)))),
        "unlike": ("e", lambda: planned(data(own, e=[0.5 for _ in own] if replica else mine))),
        # None tells of no kind: as metadata the others' images would not reach the model.
        "lacking": ("j", lambda: planned(data(own, j=images(own)))),
        "added": ("f", lambda: added("f", mine, own)),
        "added later": ("f", lambda: added("f", rows(whole, 1), whole)),
        "added differ": ("g", lambda: added("g", rows(contrary, kind), contrary)),
    }
    if shape.pipeline_parallel == 1:
        del calls["none"]  # the last stage is the only one
    if not planner:
        calls["at once"] = ("h", lambda: planned_at_once(data(own, h=mine)))
        calls["at once open"] = ("i", lambda: planned_at_once(data(whole, i=rows(whole, 1))))
    return {name: _seen(*each) for name, each in calls.items()}


def _seen(field: str, call: Callable[[], MicroBatchSchedule]) -> Any:
    try:
        schedule = call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    pairs = zip(
        schedule.rollout_data[field], schedule.rollout_data["response_lengths"], strict=True
    )
    return {
        "kind": schedule.schema[field].kind.name,
        "placeholder": [len(value) for value in schedule.samples((), [field])[field]],
        # Every sample has its own value, wherever it went.
        "values": all(value.tolist() == [float(length)] * length for value, length in pairs),
    }
