"""A rollout and its plan, whose later steps may still be made in a thread."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, overload

from mcore_batching.megatron.job.job import Job
from mcore_batching.megatron.rollout.maker import Plan
from mcore_batching.megatron.rollout.plan_ahead import PlansAhead
from mcore_batching.megatron.rollout.rollout import RolloutRequest
from mcore_batching.megatron.rows.schedule import MicroBatchSchedule
from mcore_batching.planning.integers import as_integer


class PlannedRollout:
    """A batch and its plan, shared by the iterators of one `get_data_iterator` call.

    Args:
        schedule: the batch's micro-batches; where `wait` is given those of its first step.
        wait: gives those of all steps, once they are made.
        num_steps: of all steps, with `wait`.
    """

    def __init__(
        self,
        schedule: MicroBatchSchedule,
        wait: Callable[[], MicroBatchSchedule] | None = None,
        num_steps: int | None = None,
    ) -> None:
        self._first = self._schedule = schedule
        self._wait = wait
        self.num_steps: int = len(schedule.steps) if num_steps is None else num_steps
        # The same batch as planned for forward passes alone, once it has been.
        self.for_forward_passes: PlannedRollout | None = None

    @property
    def schedule(self) -> MicroBatchSchedule:
        """The micro-batches of training. Waits until all steps are planned, and raises what failed
        then: read it in the work of an agreement."""
        if self._wait is not None:
            self._schedule = self._wait()
            self._wait = None
        return self._schedule

    def of_step(self, step: Any) -> MicroBatchSchedule:
        """A schedule that holds a step, if any does; waits for later ones, as `schedule`."""
        return self._first if as_integer(step) == 0 else self.schedule

    def of_slot(self, slot: int) -> MicroBatchSchedule:
        """A schedule that holds a micro-batch, if any does, counted over all steps."""
        return self._first if slot < len(self._first.micro_batches) else self.schedule

    def num_microbatches(self) -> Sequence[int]:
        """Of each step: a list, or as long as later ones are made a `NumMicroBatches`."""
        if self._wait is None:
            return self._schedule.num_microbatches
        return NumMicroBatches(self)

    def replace(self, schedule: MicroBatchSchedule) -> None:
        """Go on with another schedule; all iterators walk it from now on."""
        self._first = self._schedule = schedule
        self._wait = None
        # It holds the rollout data as they were: made anew, of the fields that are there now.
        self.for_forward_passes = None


def with_later_steps(
    request: RolloutRequest,
    first: MicroBatchSchedule,
    num_steps: int,
    plan_later: Callable[[RolloutRequest], MicroBatchSchedule],
) -> PlannedRollout:
    """A rollout whose later steps are planned in a thread. A collective as `PlansAhead.connect`.

    `plan_later` gives their schedule, by the job and the plans of another request; a collective.
    """

    def make(job: Job, operation: str, plan: Plan) -> MicroBatchSchedule:
        del operation
        later = plan_later(dataclasses.replace(request, job=job, plan=plan))
        return first.followed_by(later)

    wait = request.job.memory.only(PlansAhead).begin_rollout(request.job, make)
    return PlannedRollout(first, wait, num_steps)


class NumMicroBatches(Sequence[int]):
    """The number of micro-batches of each step, as a list whose later entries are waited for."""

    def __init__(self, rollout: PlannedRollout) -> None:
        self._num_steps = rollout.num_steps
        self._first = len(rollout.of_step(0).steps[0])
        # Until they are known: the rollout's samples need not live as long as this.
        self._rollout: PlannedRollout | None = rollout
        self._all: list[int] = []

    def _known(self) -> list[int]:
        if self._rollout is not None:
            self._all = self._rollout.schedule.num_microbatches
            self._rollout = None
        return self._all

    def __len__(self) -> int:
        return self._num_steps

    @overload
    def __getitem__(self, step: int) -> int: ...
    @overload
    def __getitem__(self, step: slice) -> list[int]: ...
    def __getitem__(self, step: int | slice) -> int | list[int]:
        return self._first if step == 0 else self._known()[step]

    def __eq__(self, other: object) -> bool:
        return self._known() == (other._known() if isinstance(other, NumMicroBatches) else other)

    def __repr__(self) -> str:
        if self._rollout is None:
            return repr(self._all)
        return f"[{self._first}, and {self._num_steps - 1} that are being planned]"

    def __reduce__(self) -> tuple[type[list[int]], tuple[list[int]]]:
        return list, (self._known(),)  # copied and pickled as the list that it stands for
