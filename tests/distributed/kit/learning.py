"""A job whose stages cost what a hidden model says, and that learns it while it trains."""

from __future__ import annotations

import contextlib
import json
import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from kit.exactness import arguments
from kit.model import adam, quick_model
from kit.objective import packed_objective
from kit.operations import passes_of
from kit.samples import samples_of
from mcore_batching.megatron import cpu_emulation, get_data_iterator, schedule_of, train_step
from mcore_batching.planning import CostModel, ParallelDims

CAP = 96


class HiddenCosts:
    """Makes passes take what a hidden model says, on a clock that they alone move."""

    def __init__(self, seconds_per_unit: float) -> None:
        self._now = 1000.0 * dist.get_rank()  # no two clocks agree
        self._seconds_per_unit = seconds_per_unit
        self.rows: list[tuple[int, ...]] = []
        self.sizes: Sequence[int] = ()
        self.model = CostModel()
        self.slower = 1.0
        self.chunks = 1

    def follow(self, schedule: Any, model: CostModel) -> None:
        """From now on passes are of this schedule's first step, at these costs."""
        rows = zip(schedule.steps[0], schedule.row_sizes(0), strict=True)
        nodes = [schedule.nodes(indices, size) for indices, size in rows]
        # Tokens of each node; padding is none of a sample.
        self.rows = [
            tuple(end - start for start, end in pairwise(each.offsets))[: len(each.paths)]
            for each in nodes
        ]
        self.sizes, self.model = schedule.row_sizes(0), model

    def perf_counter(self) -> float:
        """In place of the clock by which passes are timed."""
        return self._now

    def takes(self, backward: bool, slot: int) -> None:
        """Let a pass take its time; a row that ranks share ten times as long, since they wait."""
        size = self.sizes[slot]
        cost = self.model.on_ranks(size).micro_batch(self.rows[slot]) / self.chunks
        cost *= self.model.backward_ratio if backward else 1.0
        self._now += self.slower * self._seconds_per_unit * cost * (10 if size > 1 else 1)


@contextlib.contextmanager
def own_clock(hidden: HiddenCosts) -> Iterator[None]:
    """Let passes be timed by the clock of these costs."""
    clock = cpu_emulation.time
    cpu_emulation.time = SimpleNamespace(perf_counter=hidden.perf_counter)
    try:
        yield
    finally:
        cpu_emulation.time = clock


def samples(count: int, seed: int, longest: int = CAP) -> dict[str, list[Any]]:
    """Random samples of log-normal length; where some may exceed the cap, some are long."""
    generator = random.Random(seed)
    lengths = [max(2, min(CAP, round(generator.lognormvariate(2.7, 0.8)))) for _ in range(count)]
    if longest > CAP:
        lengths[::8] = [generator.randint(CAP // 2, longest) for _ in lengths[::8]]
    return samples_of(lengths)


def learn(
    dims: dict[str, Any],
    hidden: dict[str, Any],
    drift: float = 0.0,
    num_steps: int = 6,
    num_samples: int = 12,
    seconds_per_unit: float = 1e-5,
    max_context_parallel: int | None = None,
) -> list[dict[str, Any]]:
    """Train while the costs are hidden; what each step was planned by, and how it went.

    The first step of every rank takes 50 times as long, as if it compiled.

    Args:
        dims: of the job.
        hidden: the cost model, as arguments of `CostModel`.
        drift: by how much quadratic cost and that of a micro-batch grow each step.
        num_steps: optimizer steps.
        num_samples: of each data-parallel rank and step.
        seconds_per_unit: of the hidden model.
        max_context_parallel: ranks that may share a row; samples are up to so many times the cap.

    Returns:
        for every step its ``plan`` (digest) and ``plan again`` (of the same samples), ``costs`` and
        ``speed`` (None if unknown) that it was planned by, ``lengths`` and ``ranks`` (of the whole
        plan), ``sizes`` (of this rank's rows), ``hidden`` (the cost model); for the last, on the
        first rank, what was ``recorded``.
    """
    shape = ParallelDims(**dims)
    longest = CAP * (max_context_parallel or 1)
    model = quick_model(shape, longest)
    args = arguments(
        shape,
        max_tokens_per_gpu=CAP,
        dynamic_batch_context_parallel=max_context_parallel,
        dynamic_batch_cost_model="auto",
        dynamic_batch_plan_effort=60,
        dynamic_batch_record=tempfile.mkdtemp(),  # the first rank's alone is written to
    )
    optimizer = adam(model, distributed=False)
    costs = HiddenCosts(seconds_per_unit)
    costs.chunks = shape.virtual_pipeline
    seen = []
    with own_clock(costs):
        for step in range(num_steps):
            seed = 1000 * step + parallel_state.get_data_parallel_rank()
            data = samples(num_samples, seed, longest)
            iterators, counts = get_data_iterator(args, model, data)
            schedule = schedule_of(iterators)
            again, _ = get_data_iterator(args, model, data)
            costs.follow(schedule, _grown(CostModel(**hidden), (1 + drift) ** step))
            costs.slower = 50.0 if step == 0 else 1.0
            plan, lengths = schedule.step_plan(0)
            seen.append(
                {
                    "plan": schedule.plan_digest,
                    "plan again": schedule_of(again).plan_digest,
                    "costs": json.loads(schedule.settings.cost_model.to_json()),
                    "speed": schedule.settings.learnt and schedule.settings.learnt.seconds_per_unit,
                    "lengths": lengths,
                    "ranks": plan.micro_batches,
                    "sizes": list(schedule.row_sizes(0)),
                    "hidden": json.loads(costs.model.to_json()),
                }
            )
            with passes_of(model, costs.takes):
                train_step(packed_objective, args, model, iterators, counts, optimizer)
    for file in Path(args.dynamic_batch_record).glob("*.jsonl"):
        seen[-1]["recorded"] = file.read_text()
    return seen


def _grown(model: CostModel, factor: float) -> CostModel:
    return replace(
        model,
        quadratic=model.quadratic * factor,
        per_micro_batch=model.per_micro_batch * factor,
    )
