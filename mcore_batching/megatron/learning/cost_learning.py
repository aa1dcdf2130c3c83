"""Learning what passes cost while training runs, unless ``--dynamic-batch-cost-model`` tells it.

Every forward and backward pass of every model chunk is timed where it runs, around Megatron's own
forward and backward step: what a stage waits for its neighbours is outside. On a GPU the times are
read when the next step is planned, by then without waiting. All ranks add up what they measured
within the planning protocol's first agreement and go on with the same model
(`mcore_batching.planning.cost_learning`).

Passes are timed in `train_step` and in stock training, and the model is learnt when training's
micro-batches are planned. The first step of a process, which compiles and allocates, does not
count. What ranks wait for each other inside of passes is left out by
`mcore_batching.megatron.learning.shared_times`; transfers between passes are told by
`mcore_batching.megatron.learning.round_trips`.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from mcore_batching.batch.figures import Figure, largest, least, rank_total
from mcore_batching.megatron import compat
from mcore_batching.megatron.learning.pass_times import (
    TimedStep,
    is_over,
    mark,
    rows_of,
    seconds_between,
)
from mcore_batching.megatron.learning.round_trips import RoundTrips
from mcore_batching.megatron.learning.shared_times import (
    NUM_LEAST,
    NUM_SLOTS,
    Rivals,
    SharedTimes,
    costs_of_slots,
    places_of_slots,
)
from mcore_batching.megatron.rows.prepared_step import PreparedStep
from mcore_batching.megatron.rows.schedule import MicroBatchSchedule
from mcore_batching.planning import CostModel, ParallelDims
from mcore_batching.planning.cost_fit import Timing, is_usable
from mcore_batching.planning.cost_learning import evidence, relearnt
from mcore_batching.planning.damping import WINDOW_STEPS
from mcore_batching.planning.learnt_costs import LearntCosts, StepReview
from mcore_batching.planning.pipeline import Schedule

_RANKS = 1 << 20
"""More than there are: a rank travels in the lower digits of a number, behind its value."""
_STEPS_BETWEEN_MESSAGES = 100
"""A job of a day prints some hundred lines at most, whatever the reasons are."""

_Rows = list[tuple[int, Timing]]
"""Timed rows with their slots."""
_TimedRows = tuple[_Rows, Rivals | None]
"""Those of a step, and what may have been waited for in each slot."""


class CostLearner:
    """Costs that the present job has learnt of a model, and the times that it learns from.

    Attributes:
        learnt: the same on every rank; None before the first planning.
        review: of the last step that was timed, over all ranks; None before there is one.
    """

    def __init__(self) -> None:
        self.learnt: LearntCosts | None = None
        self.review: StepReview | None = None
        self._stage: int = parallel_state.get_pipeline_model_parallel_rank()
        self._num_stages: int = parallel_state.get_pipeline_model_parallel_world_size()
        self._dims = ParallelDims(
            data_parallel=parallel_state.get_data_parallel_world_size(),
            pipeline_parallel=self._num_stages,
            virtual_pipeline=parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
        )
        self._trips = RoundTrips(
            self._dims,
            stage=self._stage,
            replica=parallel_state.get_data_parallel_rank(),
            speaks=parallel_state.get_context_parallel_rank() == 0
            and parallel_state.get_tensor_model_parallel_rank() == 0,
        )
        self._is_warm = False
        self._unread: deque[TimedStep] = deque(maxlen=WINDOW_STEPS)
        self._newest: TimedStep | None = None
        self._steps: deque[_TimedRows] = deque(maxlen=WINDOW_STEPS)
        self._shares_rows = self._in_lockstep = False
        self._waiting: tuple[TimedStep, dict[int, Timing]] | None = None
        self._shared: SharedTimes | None = None
        self._rivals: Rivals | None = None
        self._shared_steps: deque[_TimedRows] = deque(maxlen=WINDOW_STEPS)
        self._last: tuple[float, float, float, float] | None = None
        self._num_reviews = 0
        self._said_at: int | None = None

    def state_dict(self) -> dict[str, Any]:
        """Learnt costs as numbers in dicts and lists; save it with the model's checkpoint."""
        return {} if self.learnt is None else self.learnt.to_data()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what another job had learnt; call it on every rank, before planning.

        Args:
            state: from `state_dict`. Where the number of pipeline stages has changed, stages are
                taken to be equal.

        Raises:
            ConfigError: something else.
        """
        self.learnt = LearntCosts.from_data(state).on_stages(self._num_stages) if state else None

    def statistics(self) -> dict[str, float]:
        """Learnt costs for a log: name to value."""
        if self.learnt is None:
            return {}
        model = self.learnt.cost_model
        planned = self.learnt.planning_model(self._dims)
        transfers = {
            "transfers' cost": planned.per_micro_batch - model.per_micro_batch,
            "transfers' cost of a token": planned.linear - model.linear,
        }
        shared = {
            "context-parallel overhead": model.context_parallel_overhead,
            "context-parallel cost": model.context_parallel_fixed,
        }
        return {
            "quadratic cost": model.quadratic,
            "micro-batch cost": model.per_micro_batch,
            "backward over forward": model.backward_ratio,
            "slowest stage over mean": max(self.learnt.stage_factors, default=1.0),
            **(transfers if self._num_stages > 1 else {}),
            **(shared if self._shares_rows else {}),
        }

    def begin(self, first_guess: CostModel) -> CostModel:
        """The model to plan with, as far as is known by now.

        Args:
            first_guess: the model before anything was learnt.
        """
        if self.learnt is None:
            self.learnt = LearntCosts(cost_model=first_guess)
        return self.learnt.planning_model(self._dims)

    @contextlib.contextmanager
    def timing(self, prepared: PreparedStep) -> Iterator[None]:
        """Time the passes of a training step that runs inside.

        Args:
            prepared: the step, the same rows on all stages.
        """
        began, marks = mark(), []
        with compat.around_passes(lambda: marks.append(mark())):
            yield
        if not self._is_warm:
            self._is_warm = True
            return
        self._newest = None
        schedule, step = prepared.schedule, prepared.step
        rows, sizes = rows_of(schedule, step), schedule.row_sizes(step)
        order = Schedule(dims=schedule.dims).order(self._stage, len(rows))
        if len(marks) == 2 * len(order):  # else the schedule is none that is known here
            predicted = predicted_seconds(schedule, step)
            shared = SharedTimes.of(schedule, step) if schedule.has_sizes_of_rows else None
            own_sizes = [1] * len(rows) if shared is None else list(sizes)
            rivals = None
            if schedule.plans and schedule.dims.in_lockstep:
                rivals = Rivals.of(*schedule.step_plan(step), schedule.cost_model.window)
            self._newest = TimedStep(
                rows, own_sizes, order, began, marks, predicted, shared, rivals
            )
            self._unread.append(self._newest)
            self._shared, self._rivals = shared, rivals

    def evidence(
        self, *, shares_rows: bool = False, in_lockstep: bool = False
    ) -> dict[str, Figure]:
        """This rank's measurements.

        Reads the passes of the steps that have ended on the device. The same on every rank:

        Args:
            shares_rows: rows may be on several ranks.
            in_lockstep: ranks wait for each other in every slot, as with expert parallelism.
        """
        assert self.learnt is not None
        self._shares_rows, self._in_lockstep = shares_rows, in_lockstep
        self._waiting = None
        newest = None
        shared, costs = [0.0] * NUM_LEAST, [math.inf] * NUM_SLOTS
        has_news = 0
        while self._unread and all(map(is_over, self._unread[0].marks)):
            has_news, step = 1, self._unread.popleft()
            newest = step if step is self._newest else None
            seconds = step.seconds()
            timings = step.timings(seconds)
            if step.shared is not None and step.shared is self._shared:
                shared = step.shared.seconds(seconds, self.learnt.factor(self._stage))
            if in_lockstep and step.rivals is None:
                self._waiting = step, timings
                costs = costs_of_slots([self._units(timings[slot]) for slot in sorted(timings)])
            else:
                self._count(step, timings.items())
        steps = [self._counting(*each) for each in self._steps]
        sums = evidence(steps, self.learnt, stage=self._stage, num_stages=self._num_stages)
        took, expected, measured, predicted = self._last or (0.0, 0.0, 0.0, 0.0)
        self._last = None
        # In thousandths, and the rank behind them: the largest tells both.
        slowest = int(min(1000 * took / expected, 1e6)) * _RANKS if expected else 0
        trips, idle = self._trips.told(newest)
        figures = {
            "steps timed": largest(has_news),
            "evidence": rank_total(sums),
            "seconds of passes": rank_total(took),
            "predicted seconds of passes": rank_total(expected),
            "seconds of step": largest(measured),
            "predicted seconds of step": largest(predicted),
            "slowest rank": largest(slowest + dist.get_rank()),
            "round trips": rank_total(trips),
            "idle before round trips": largest(idle),
        }
        if shares_rows:
            figures["seconds of shared passes"] = least(shared)
        if in_lockstep:
            figures["costs of slots"] = largest(costs)
        return figures

    def _units(self, timing: Timing) -> float:
        assert self.learnt is not None
        return self.learnt.units(timing.lengths, timing.context_parallel)

    def _counting(self, rows: _Rows, rivals: Rivals | None) -> list[Timing]:
        """Of timed rows, those that tell what they cost, by what is known now."""
        assert self.learnt is not None
        return [row for _, row in rows] if rivals is None else rivals.costliest(rows, self.learnt)

    def _count(self, step: TimedStep, timings: Iterable[tuple[int, Timing]]) -> None:
        """Learn from these rows of a step, those that other ranks share aside."""
        assert self.learnt is not None
        alone = [(slot, each) for slot, each in timings if each.context_parallel == 1]
        self._steps.append((alone, step.rivals))
        usable = [each for each in self._counting(alone, step.rivals) if is_usable(each)]
        speed = (self.learnt.seconds_per_unit or 0.0) * self.learnt.factor(self._stage)
        span = seconds_between(step.marks[0], step.marks[-1])
        self._last = (
            sum(each.forward_seconds + each.backward_seconds for each in usable),
            sum(speed * self._units(each) for each in usable),
            span if math.isfinite(span) else 0.0,
            step.predicted_seconds,
        )

    def learn(self, figures: Mapping[str, Any]) -> None:
        """Know what all ranks have measured, the same on every rank; nothing new, nothing changes,
        so that samples that are planned twice have one plan.

        Args:
            figures: what `evidence` gave, joined over all ranks.
        """
        assert self.learnt is not None
        if not figures["steps timed"]:
            return
        took, expected = figures["seconds of passes"], figures["predicted seconds of passes"]
        if self._waiting is not None:
            step, timings = self._waiting
            rows = self._costliest(timings.items(), len(timings), figures["costs of slots"])
            self._count(step, rows)
        if self._shared is not None and self._shares_rows and self._knows_stages:
            timed = self._shared.timings(figures["seconds of shared passes"])
            self._shared_steps.append((timed, self._rivals))
            for each in self._counting(*self._shared_steps[-1]):
                took += each.forward_seconds + each.backward_seconds
                expected += (self.learnt.seconds_per_unit or 0.0) * self._units(each)
        self._shared = None
        measured, predicted = figures["seconds of step"], figures["predicted seconds of step"]
        slowest = int(figures["slowest rank"])
        if expected and predicted and measured:
            self.review = StepReview(
                predicted_seconds=predicted,
                measured_seconds=measured,
                passes_over_predicted=took / expected,
                slowest_rank=slowest % _RANKS,
                slowest_over_predicted=slowest // _RANKS / 1000,
            )
            self._say(self.review)
        transfers = self._trips.learn(figures["round trips"], figures["idle before round trips"])
        shared = [self._counting(*each) for each in self._shared_steps]
        self.learnt = relearnt(self.learnt, figures["evidence"], shared, transfers)

    def _costliest(
        self, rows: Iterable[tuple[int, Timing]], num_slots: int, costs: Sequence[float]
    ) -> _Rows:
        """Of rows with their slots, those that no rank of the slot had to wait for longer."""
        places = places_of_slots(num_slots)
        return [
            (slot, row)
            for slot, row in rows
            if slot in places and self._units(row) == costs[places[slot]]
        ]

    @property
    def _knows_stages(self) -> bool:
        """True if the least time of several stages does not depend on which is the quickest."""
        assert self.learnt is not None
        learnt_twice = self.learnt.num_steps >= 2 and len(self.learnt.stage_factors) > 0
        return self._num_stages == 1 or learnt_twice

    def _say(self, review: StepReview) -> None:
        """Print why a step did not take what was predicted, where stock code prints its log."""
        self._num_reviews += 1
        said = self._said_at
        if review.reason and (said is None or self._num_reviews - said >= _STEPS_BETWEEN_MESSAGES):
            self._said_at = self._num_reviews
            if dist.get_rank() == dist.get_world_size() - 1:
                print(f"mcore_batching: {review}", flush=True)


def predicted_seconds(schedule: MicroBatchSchedule, step: int) -> float:
    """Of a step: on this rank, of which the slowest counts, or on all where their plan is known.

    0 where costs are not learnt, or nothing was by then.
    """
    learnt = schedule.learnt
    if learnt is None:
        return 0.0
    if schedule.plans:
        return learnt.predicted_seconds_of_plan(*schedule.step_plan(step)) or 0.0
    return learnt.predicted_seconds(rows_of(schedule, step), schedule.dims) or 0.0
