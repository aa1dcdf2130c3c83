"""A job whose stages cost what a hidden model says, and that learns it while it trains."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from kit.exactness import arguments
from kit.groups import forget_job
from kit.model import adam, quick_model, transformer_config
from kit.objective import packed_objective
from kit.operations import passes_of
from kit.samples import VOCABULARY
from mcore_batching.integrations.megatron_lm.learnt_costs import take_over_learnt_costs
from mcore_batching.megatron import (
    CollectiveError,
    cost_learner,
    get_data_iterator,
    schedule_of,
    train_step,
)
from mcore_batching.megatron.job.row_groups import row_group
from mcore_batching.megatron.learning import pass_times
from mcore_batching.megatron.learning.pass_times import rows_of
from mcore_batching.megatron.standalone.bootstrap import build_model, pipeline_config
from mcore_batching.planning import CostModel, ParallelDims, predicted_step_time

CAP = 96
STALLED = 3
"""The step that stalls, and that has a NaN for a time and for a loss."""


class HiddenCosts:
    """Makes passes take what a hidden model says, on a clock of its own or by sleeping.

    Args:
        seconds_per_unit: of the hidden model.
        sleeps: False advances a clock that this process's passes alone move.
    """

    def __init__(self, seconds_per_unit: float, sleeps: bool) -> None:
        self._ahead = 1000.0 * dist.get_rank()  # no two clocks agree
        self._seconds_per_unit = seconds_per_unit
        self.sleeps = sleeps
        self._now = 0.0
        self.rows: list[tuple[int, ...]] = []
        self.sizes: Sequence[int] = ()
        self.model = CostModel()
        self.slower = 1.0
        self.chunks = 1
        self.breaks_clock = False

    def perf_counter(self) -> float:
        """In place of the clock by which passes are timed."""
        if self.breaks_clock:
            self.breaks_clock = False
            return math.nan
        return self._ahead + (time.perf_counter() if self.sleeps else self._now)

    def takes(self, backward: bool, slot: int, start: float) -> None:
        """Let a pass take its time, which its own computing is part of.

        Where ranks share a row, or experts, they wait for each other: the clock goes on from the
        latest's, by the time of the slowest. Blocks of ranks hold each other: the larger waits.
        """
        size = self.sizes[slot]
        cost = self.model.on_ranks(size).micro_batch(self.rows[slot]) / self.chunks
        cost *= self.model.backward_ratio if backward else 1.0
        seconds = self.slower * self._seconds_per_unit * cost
        experts = parallel_state.get_expert_model_parallel_group()
        waits_for = experts if experts.size() >= size else row_group(size)
        if waits_for is not None and waits_for.size() > 1 and not self.sleeps:
            latest = torch.tensor([self._now, seconds], dtype=torch.float64)
            dist.all_reduce(latest, dist.ReduceOp.MAX, group=waits_for)
            self._now, seconds = latest.tolist()
        self._now += seconds
        if self.sleeps:
            time.sleep(max(0.0, seconds - (time.monotonic() - start)))


@contextlib.contextmanager
def own_clock(hidden: HiddenCosts) -> Iterator[None]:
    """Let passes be timed by the clock of these costs."""
    clock = pass_times.time
    pass_times.time = SimpleNamespace(perf_counter=hidden.perf_counter)
    try:
        yield
    finally:
        pass_times.time = clock


def samples(count: int, seed: int, longest: int = CAP) -> dict[str, list[Any]]:
    """Random samples of log-normal length; where some may exceed the cap, some are long."""
    generator = random.Random(seed)
    lengths = [max(2, min(CAP, round(generator.lognormvariate(2.7, 0.8)))) for _ in range(count)]
    if longest > CAP:
        lengths[::8] = [generator.randint(CAP // 2, longest) for _ in lengths[::8]]
    return samples_of(lengths)


def samples_of(lengths: list[int]) -> dict[str, list[Any]]:
    """Random tokens of these lengths, the last one a response."""
    count = len(lengths)
    return {
        "tokens": [torch.randint(VOCABULARY, (length,)) for length in lengths],
        "total_lengths": lengths,
        "response_lengths": [1] * count,
        "advantages": [torch.ones(1)] * count,
        "rollout_log_probs": [torch.zeros(1)] * count,
        "ref_log_probs": [torch.zeros(1)] * count,
    }


def learn(
    dims: dict[str, Any],
    hidden: dict[str, Any],
    drift: float = 0.0,
    slower: list[float] | None = None,
    num_steps: int = 6,
    faults: bool = False,
    sleeps: bool = False,
    num_samples: int = 12,
    seconds_per_unit: float = 1e-5,
    max_context_parallel: int | None = None,
    cost_model: str | None = None,
) -> list[dict[str, Any]]:
    """Train while the costs are hidden; what each step was planned by, and how it went.

    The first step of every rank takes 50 times as long, as if it compiled; asleep, 3 times.

    Args:
        dims: of the job.
        hidden: the cost model, as arguments of `CostModel`.
        drift: by how much quadratic cost and that of a micro-batch grow each step.
        slower: of each global rank, by how much; None: none is.
        num_steps: optimizer steps.
        faults: in step `STALLED` the last rank takes 20 times as long and its loss is NaN, so that
            the update is skipped; its clock and the first rank's break once.
        sleeps: the stages really sleep.
        num_samples: of each data-parallel rank and step.
        seconds_per_unit: of the hidden model.
        max_context_parallel: ranks that may share a row; samples are up to so many times the cap.
        cost_model: None: costs are learnt, as where nothing else is asked for.

    Returns:
        for every step its ``plan`` (digest) and ``plan again`` (of the same samples), ``state``
        (what was learnt by then), ``lengths`` and ``ranks`` (of the whole plan), ``whole`` (it in
        JSON), ``hidden`` (the cost model), ``updated``, the whole step's ``seconds`` and
        those ``predicted`` (of this rank, or all); for the last, on the first rank, what was
        ``recorded``, and the ``cost model`` beside it.
    """
    shape = ParallelDims(**dims)
    longest = CAP * (max_context_parallel or 1)
    model = quick_model(shape, longest)
    args = arguments(
        shape,
        max_tokens_per_gpu=CAP,
        dynamic_batch_context_parallel=max_context_parallel,
        dynamic_batch_cost_model=cost_model,
        dynamic_batch_on_nonfinite="skip",
        dynamic_batch_plan_effort=60,
        dynamic_batch_record=tempfile.mkdtemp(),  # the first rank's alone is written to
    )
    optimizer = adam(model, distributed=False)
    costs = HiddenCosts(seconds_per_unit, sleeps)
    costs.chunks = shape.virtual_pipeline
    last = dist.get_rank() == dist.get_world_size() - 1
    seen = []
    with own_clock(costs):
        for step in range(num_steps):
            seed = 1000 * step + parallel_state.get_data_parallel_rank()
            data = samples(num_samples, seed, longest)
            iterators, counts = get_data_iterator(args, model, data)
            schedule = schedule_of(iterators)
            again, _ = get_data_iterator(args, model, data)
            costs.rows, costs.sizes = rows_of(schedule, 0), schedule.row_sizes(0)
            costs.model = _grown(CostModel(**hidden), (1 + drift) ** step)
            at_fault = faults and last and step == STALLED
            costs.slower = 1.0 if slower is None else slower[dist.get_rank()]
            costs.slower *= (3 if sleeps else 50) if step == 0 else 20 if at_fault else 1
            plan, lengths = schedule.step_plan(0)
            speed = schedule.learnt.seconds_per_unit if schedule.learnt else None
            seen.append(
                {
                    "plan": schedule.plan_digest,
                    "plan again": schedule_of(again).plan_digest,
                    "state": cost_learner().state_dict(),
                    "predicted": (speed or 0.0) * predicted_step_time(plan, lengths),
                    "lengths": lengths,
                    "ranks": plan.micro_batches,
                    "whole": plan.to_json(),
                    "hidden": json.loads(costs.model.to_json()),
                }
            )
            costs.breaks_clock = faults and step == STALLED and (last or dist.get_rank() == 0)
            dist.barrier()
            started = time.monotonic()
            with passes_of(model, costs.takes):
                result = train_step(_objective(at_fault), args, model, iterators, counts, optimizer)
            seen[-1]["seconds"] = time.monotonic() - started
            seen[-1]["updated"] = result.update_successful
    for file in Path(args.dynamic_batch_record).iterdir():
        seen[-1]["recorded" if file.suffix == ".jsonl" else "cost model"] = file.read_text()
    return seen


def in_turns(
    dims: dict[str, Any],
    steps: list[list[tuple[int, int]]],
    cap: int,
    kinds: list[str],
    objective: str,
    hidden_size: int,
) -> list[dict[str, tuple[float, float, int]]]:
    """Train on each step's samples once by each kind of cost model, in turns; nothing sleeps.

    Args:
        dims: of the job.
        steps: total and response length of the samples that a data-parallel rank has [steps].
        cap: tokens of a micro-batch.
        kinds: values of ``--dynamic-batch-cost-model``.
        objective: of `kit.objective`.
        hidden_size: of a dense model of 4 layers.

    Returns:
        of each step and kind the seconds of `train_step`, this process's own in it, and the number
        of micro-batches.
    """
    shape = ParallelDims(**dims)
    config = transformer_config(
        "dense", hidden_size=hidden_size, ffn_hidden_size=4 * hidden_size, **pipeline_config(shape)
    )
    model = build_model(config, vocab_size=VOCABULARY, max_sequence_length=cap)
    optimizer = adam(model, distributed=False)
    loss = functools.partial(packed_objective, name=objective)
    rank, ranks = parallel_state.get_data_parallel_rank(), shape.data_parallel
    seen = []
    for number, lengths in enumerate(steps):
        torch.manual_seed(number)
        data = samples_of([total for total, _ in lengths[rank::ranks]])
        data["response_lengths"] = responses = [each for _, each in lengths[rank::ranks]]
        for field in ("advantages", "rollout_log_probs", "ref_log_probs"):
            data[field] = [torch.full((each,), 0.5) for each in responses]
        took = {}
        for kind in kinds if number % 2 else kinds[::-1]:
            args = arguments(
                shape,
                max_tokens_per_gpu=cap,
                dynamic_batch_cost_model=kind,
                dynamic_batch_exchange=shape.data_parallel > 1,
            )
            iterators, counts = get_data_iterator(args, model, data)
            dist.barrier()
            started, own = time.monotonic(), time.process_time()
            train_step(loss, args, model, iterators, counts, optimizer)
            took[kind] = time.monotonic() - started, time.process_time() - own, counts[0]
        seen.append(took)
    return seen


def alternate(dims: dict[str, Any], hidden: list[dict[str, Any]], num_steps: int) -> list[Any]:
    """Train several models in turn, each with hidden costs of its own.

    Returns:
        what was learnt of each.
    """
    shape = ParallelDims(**dims)
    models = [quick_model(shape, CAP) for _ in hidden]
    optimizers = [adam(model, distributed=False) for model in models]
    args = arguments(
        shape, max_tokens_per_gpu=CAP, dynamic_batch_cost_model=None, dynamic_batch_plan_effort=60
    )
    costs = HiddenCosts(1e-5, sleeps=False)
    with own_clock(costs):
        for step in range(num_steps):
            data = samples(12, 1000 * step + parallel_state.get_data_parallel_rank())
            for model, optimizer, coefficients in zip(models, optimizers, hidden, strict=True):
                iterators, counts = get_data_iterator(args, model, data)
                schedule = schedule_of(iterators)
                costs.rows, costs.sizes = rows_of(schedule, 0), schedule.row_sizes(0)
                costs.model = CostModel(**coefficients)
                with passes_of(model, costs.takes):
                    train_step(_objective(False), args, model, iterators, counts, optimizer)
    assert cost_learner() is cost_learner(models[0])
    return [cost_learner(model).state_dict() for model in models]


def _grown(model: CostModel, factor: float) -> CostModel:
    return replace(
        model,
        quadratic=model.quadratic * factor,
        per_micro_batch=model.per_micro_batch * factor,
    )


def _objective(is_nan: bool) -> Any:
    def loss(*given: Any) -> Any:
        share, metrics = packed_objective(*given)
        return share * (math.nan if is_nan else 1.0), metrics

    return loss


def resume(**parameters: Any) -> dict[str, Any]:
    """`learn`, then plan by what was saved.

    Returns:
        what was saved (``state``, ``cost model``), and the model that was planned by, or the error:
        where every rank goes on from the state (``resumed``), the first alone does (``alone``), the
        first alone learns no costs (``flag``), a checkpoint holds something else (``unreadable``),
        every rank is given the file that the job wrote (``file``).
    """
    (told,) = box = [learn(**parameters)[-1].get("cost model", "")]
    dist.broadcast_object_list(box, src=0)
    file = Path(tempfile.mkdtemp()) / "cost_model.json"
    file.write_text(box[0])
    state = json.loads(json.dumps(cost_learner().state_dict()))
    found: dict[str, Any] = {"state": state, "cost model": told}
    shape = ParallelDims(**parameters["dims"])
    first, data = dist.get_rank() == 0, samples(8, 0)
    for name in ("resumed", "alone", "flag", "unreadable", "file"):
        forget_job()
        if name != "alone" or first:
            cost_learner().load_state_dict(state)
        flag = {"flag": "fixed" if first else "auto", "file": str(file)}.get(name, "auto")
        args = arguments(
            shape,
            max_tokens_per_gpu=CAP,
            dynamic_batch_cost_model=flag,
            use_dynamic_batch_size=True,
        )
        if name == "unreadable":
            saved = SimpleNamespace(dynamic_batch_learnt_costs={"of": "another version"})
            take_over_learnt_costs(args, saved)
        try:
            iterators, _ = get_data_iterator(args, quick_model(shape, CAP), data)
            found[name] = json.loads(schedule_of(iterators).cost_model.to_json())
        except CollectiveError as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found
