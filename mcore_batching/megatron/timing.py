"""Times of passes, and costs learnt from them under ``--dynamic-batch-cost-model auto``.

Every forward and backward pass of every model chunk is timed where it runs, in `train_step` and in
stock training. All ranks add up what they measured with the planning of the next step, and go on
with the same costs (`planning.learn`). A row that several ranks share under dynamic CP teaches
nothing: they wait for each other inside of it. With expert parallelism all rows are such, so it is
refused.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.utils import unwrap_model

from mcore_batching.flags import FIXED, FLAGS, LEARNT
from mcore_batching.megatron import compat
from mcore_batching.megatron.errors import DynamicBatchArgumentError
from mcore_batching.megatron.job import Job
from mcore_batching.megatron.topology import model_chunks
from mcore_batching.planning import CostModel, ParallelDims
from mcore_batching.planning.costs.cost import costs_of_stage
from mcore_batching.planning.learn import LearntCosts, TimedRow
from mcore_batching.planning.schedule import Pass, Schedule


def mark() -> torch.cuda.Event:
    """The time at which the device's current stream gets here."""
    # Not the host's clock: it only launches kernels, far ahead of the device.
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def seconds_between(start: torch.cuda.Event, end: torch.cuda.Event) -> float:
    """Between two marks that the device has got to."""
    return float(start.elapsed_time(end)) / 1e3  # CUDA counts milliseconds


@dataclass(frozen=True)
class TimedStep:
    """A step's passes as they were marked."""

    rows: Sequence[tuple[int, ...]]  # lengths of each micro-batch's samples; () to leave it out
    order: Sequence[Pass]
    marks: Sequence[Any]  # before and after each pass

    @property
    def is_over(self) -> bool:
        """True if the device has got to its end."""
        return all(mark.query() for mark in self.marks)

    def timed_rows(self) -> list[TimedRow]:
        """The time of each row, its passes through all of the stage's model chunks together."""
        seconds = [0.0] * len(self.rows)
        starts_and_ends = zip(self.marks[::2], self.marks[1::2], strict=True)
        for each, marks in zip(self.order, starts_and_ends, strict=True):
            seconds[each.slot] += seconds_between(*marks)
        return [
            TimedRow(lengths, took)
            for lengths, took in zip(self.rows, seconds, strict=True)
            if lengths
        ]


class CostLearner:
    """Costs of one model, and the times that they are learnt from.

    `learnt` is the same on every rank; None before the first planning.
    """

    def __init__(self) -> None:
        self.learnt: LearntCosts | None = None
        self._is_warm = False
        # Of more steps under way on the device the oldest one's times are dropped.
        self._unread: deque[TimedStep] = deque(maxlen=8)

    def begin(self, shape: CostModel, dims: ParallelDims) -> LearntCosts:
        """The costs as learnt so far; before the first step those of the model's shape.

        Raises:
            DynamicBatchArgumentError: with expert parallelism.
        """
        if dims.in_lockstep:
            raise DynamicBatchArgumentError(
                f"{FLAGS['cost_model']} {LEARNT} learns from passes in which no rank waits, and "
                "expert-parallel ranks wait for each other in every one: set it to "
                f"{FIXED}, or to a file of costs"
            )
        if self.learnt is None:
            self.learnt = LearntCosts(shape=shape, cost_model=shape)
        return self.learnt

    @contextlib.contextmanager
    def timing(self, rows: Sequence[tuple[int, ...]], dims: ParallelDims) -> Iterator[None]:
        """Time the passes of a training step that runs inside, of `rows_alone` of a schedule."""
        # Around Megatron's own forward and backward step: what a stage waits for its neighbours is
        # outside.
        marks: list[Any] = []
        with compat.around_passes(lambda: marks.append(mark())):
            yield
        # The first step of a process compiles kernels and allocates memory.
        if not self._is_warm:
            self._is_warm = True
            return
        stage = parallel_state.get_pipeline_model_parallel_rank()
        order = Schedule(dims=dims).order(stage, len(rows))
        if len(marks) == 2 * len(order):  # else the schedule is none that is known here
            self._unread.append(TimedStep(rows, order, marks))

    def evidence(self, dims: ParallelDims) -> list[float]:
        """This rank's part in the next costs, to be added up over all ranks: of steps that were not
        read yet, and that have ended on the device."""
        assert self.learnt is not None
        rows: list[TimedRow] = []
        # On a GPU a step is over some time after it was launched: what is not is read next time,
        # without waiting for it here.
        while self._unread and self._unread[0].is_over:
            rows += self._unread.popleft().timed_rows()
        stage = parallel_state.get_pipeline_model_parallel_rank()
        return self.learnt.evidence(rows, costs_of_stage(self.learnt.shape, dims, stage))

    def learn(self, evidence: Sequence[float]) -> LearntCosts:
        """The costs learnt from all ranks' `evidence`, added up."""
        assert self.learnt is not None
        self.learnt = self.learnt.after(evidence)
        return self.learnt


def learner_of(job: Job, model: Any) -> CostLearner:
    """The learner of one of a job's models, each with costs of its own, as an actor and a critic;
    it learns where `Options.learns_cost_model` is true."""
    chunk = unwrap_model(model_chunks(model)[0])
    learner: CostLearner = job.memory.learners.setdefault(chunk, CostLearner())
    return learner
