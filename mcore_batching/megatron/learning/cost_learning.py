"""Learning what passes cost while training runs, unless ``--dynamic-batch-cost-model`` tells it.

Every forward and backward pass of every model chunk is timed where it runs, in `train_step` and in
stock training. All ranks add up what they measured within the planning protocol's first agreement
and go on with the same model (`planning.learning.learnt_costs`). What ranks wait for each other
inside of passes is left out (`pass_times`).
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from megatron.core import parallel_state
from megatron.core.utils import unwrap_model

from mcore_batching.batch.agreement.figures import Figure, largest, least, rank_total
from mcore_batching.megatron import compat
from mcore_batching.megatron.job.job import Job, job_of
from mcore_batching.megatron.learning.pass_times import (
    MAX_SHARED_PASSES,
    MAX_SLOTS,
    SharedTimes,
    TimedStep,
    costs_of_slots,
    mark,
    places_of_slots,
    rows_of,
)
from mcore_batching.megatron.rows.prepared_step import PreparedStep
from mcore_batching.megatron.topology import model_chunks
from mcore_batching.planning import CostModel, ParallelDims, PlannerConfig
from mcore_batching.planning.costs.layer_costs import costs_of_stage
from mcore_batching.planning.learning.fit import WINDOW_STEPS, evidence, relearnt, slowness
from mcore_batching.planning.learning.learnt_costs import LearntCosts, Timing
from mcore_batching.planning.pipeline import Schedule

_BUT_FOR_ROUNDING = 1 - 1e-9
"""The same samples in another order cost the same but for this factor; any between the rounding of
a few thousand additions and a real difference of costs would do."""


class CostLearner:
    """Costs that the present job has learnt of a model, and the times that it learns from.

    `learnt` is the same on every rank; None before the first planning.
    """

    def __init__(self) -> None:
        self.learnt: LearntCosts | None = None
        self._is_warm = False
        self._shares_rows = False
        self._unread: deque[TimedStep] = deque(maxlen=WINDOW_STEPS)
        # The newest step's rows, kept until all ranks know who waited for whom: those of this rank
        # by slot, and those that ranks share, of which the passes' times are yet to be joined.
        self._alone: dict[int, Timing] = {}
        self._shared: SharedTimes | None = None
        self._num_slots = 0  # of that step
        self._alone_steps: deque[list[Timing]] = deque(maxlen=WINDOW_STEPS)
        self._shared_steps: deque[list[Timing]] = deque(maxlen=WINDOW_STEPS)

    def state_dict(self) -> dict[str, Any]:
        """Learnt costs as numbers in dicts and lists; save it with the model's checkpoint."""
        return {} if self.learnt is None else self.learnt.to_data()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what another job had learnt; call it on every rank, before planning.

        Raises:
            ConfigError: it is not from `state_dict`.
        """
        self.learnt = LearntCosts.from_data(state) if state else None

    def statistics(self) -> dict[str, float]:
        """Learnt costs for a log: name to value, in the units of a `CostModel`."""
        if self.learnt is None:
            return {}
        model = self.learnt.cost_model
        shared = {
            "context-parallel overhead": model.context_parallel_overhead,
            "context-parallel cost": model.context_parallel_fixed,
        }
        return {
            "quadratic cost": model.quadratic,
            "micro-batch cost": model.per_micro_batch,
            "backward over forward": model.backward_ratio,
            **(shared if self._shares_rows else {}),
        }

    def begin(self, first_guess: CostModel) -> CostModel:
        """The model to plan with: what is known by now, or the first guess."""
        if self.learnt is None:
            self.learnt = LearntCosts(cost_model=first_guess)
        return self.learnt.cost_model

    @contextlib.contextmanager
    def timing(self, prepared: PreparedStep) -> Iterator[None]:
        """Time the passes of a training step that runs inside."""
        # Around Megatron's own forward and backward step: what a stage waits for its neighbours is
        # outside.
        marks: list[Any] = []
        with compat.schedules.around_passes(lambda: marks.append(mark())):
            yield
        # The first step of a process compiles kernels and allocates memory.
        if not self._is_warm:
            self._is_warm = True
            return
        schedule, step = prepared.schedule, prepared.step
        rows, stage = rows_of(schedule, step), parallel_state.get_pipeline_model_parallel_rank()
        order = Schedule(dims=schedule.dims).order(stage, len(rows))
        if len(marks) == 2 * len(order):  # else the schedule is none that is known here
            shares = schedule.has_sizes_of_rows
            self._shared = SharedTimes.of(schedule, step) if shares else None
            sizes = schedule.row_sizes(step) if shares else [1] * len(rows)
            self._unread.append(TimedStep(rows, sizes, order, marks, self._shared))

    def evidence(self, dims: ParallelDims, config: PlannerConfig) -> dict[str, Figure]:
        """This rank's measurements, of the steps that have ended on the device.

        Dims tell if ranks wait for each other in every slot, the config if they share rows.
        """
        assert self.learnt is not None
        self._shares_rows = config.max_context_parallel is not None
        self._alone = {}
        # What a rank without news says drops rows on all: a least time of 0, a largest cost of inf.
        shared, costs = [0.0] * MAX_SHARED_PASSES, [math.inf] * MAX_SLOTS
        has_news = 0
        # On a GPU a step is over some time after it was launched: what is not is read next time,
        # without waiting for it here.
        while self._unread and self._unread[0].is_over:
            has_news, step = 1, self._unread.popleft()
            seconds = step.seconds()
            timings = step.timings(seconds)
            self._alone = {s: row for s, row in enumerate(timings) if row.context_parallel == 1}
            self._num_slots = len(timings)
            # In lockstep only rows that nobody waited in count, and `learn` knows which.
            if not dims.in_lockstep:
                self._alone_steps.append(list(self._alone.values()))
            if step.shared is not None and step.shared is self._shared:
                shared = step.shared.seconds(seconds, slowness(self._alone_steps, self.learnt))
            if not self._unread:  # else ranks may have read different steps
                costs = costs_of_slots([self._units(timing) for timing in timings])
        model = self.learnt.cost_model
        stage = costs_of_stage(model, dims, parallel_state.get_pipeline_model_parallel_rank())
        figures = {
            "steps timed": largest(has_news),
            "evidence": rank_total(evidence(self._alone_steps, self.learnt, stage=stage)),
        }
        if self._shares_rows:
            figures["seconds of shared passes"] = least(shared)
        if dims.in_lockstep:
            figures["costs of slots"] = largest(costs)
        return figures

    def _units(self, timing: Timing) -> float:
        assert self.learnt is not None
        return self.learnt.units(timing.lengths, timing.context_parallel)

    def learn(self, figures: Mapping[str, Any]) -> None:
        """Know what all ranks have measured, `evidence` joined over them."""
        assert self.learnt is not None
        if not figures["steps timed"]:
            return  # nothing changes: samples that are planned twice have one plan
        # Of ranks in lockstep only the costliest row of a slot was waited for by nobody.
        costs = figures.get("costs of slots")
        if costs is not None:
            self._alone_steps.append(self._costliest(self._alone.items(), costs))
        seconds = figures.get("seconds of shared passes")
        if self._shared is not None and seconds is not None:
            timed = self._shared.timings(seconds)
            self._shared_steps.append(
                [row for _, row in timed] if costs is None else self._costliest(timed, costs)
            )
        self._shared = None
        self.learnt = relearnt(self.learnt, figures["evidence"], self._shared_steps)

    def _costliest(
        self, rows: Iterable[tuple[int, Timing]], costs: Sequence[float]
    ) -> list[Timing]:
        """Of rows with their slots, those that no rank of the slot had to wait for longer."""
        places = places_of_slots(self._num_slots)
        return [
            row
            for slot, row in rows
            if slot in places and self._units(row) >= costs[places[slot]] * _BUT_FOR_ROUNDING
        ]


class CostLearners:
    """The learners of the models of a job, each with costs of its own, as an actor and a critic."""

    def __init__(self) -> None:
        self._first = CostLearner()
        # Weak keys: ranks collect garbage at different times, so what a dead model has learnt goes
        # to nobody.
        self._of_models: weakref.WeakKeyDictionary[Any, CostLearner] = weakref.WeakKeyDictionary()
        self._is_taken = False

    def of(self, model: Any) -> CostLearner:
        """The learner of a model, or with None of the first model whose training is planned, also
        before there is one."""
        if model is None:
            return self._first
        chunk = unwrap_model(model_chunks(model)[0])
        if chunk not in self._of_models:
            # The first model gets what was loaded from a checkpoint before there was a model.
            self._of_models[chunk] = CostLearner() if self._is_taken else self._first
            self._is_taken = True
        return self._of_models[chunk]


def learners_of(job: Job) -> CostLearners:
    """Of a job; they learn where `Options.learns_cost_model` is true."""
    return job.memory.only(CostLearners)


def cost_learner(model: Any = None) -> CostLearner:
    """The learner of a model, on Megatron's present process groups. Not a collective.

    Args:
        model: this rank's model chunks; None: the first model whose training is planned, also
            before there is one.
    """
    return learners_of(job_of()).of(model)
