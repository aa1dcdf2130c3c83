"""A rollout and its plan, whose later steps may still be made in a thread."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, overload

from mcore_batching.batch import Schema
from mcore_batching.megatron.job.job import Job
from mcore_batching.megatron.rollout.planning_protocol import plan_rollout
from mcore_batching.megatron.rollout.rollout import RolloutRequest
from mcore_batching.megatron.rollout.rollout_batch import REQUIRED_FIELDS
from mcore_batching.megatron.rows.schedule import MicroBatchSchedule
from mcore_batching.planning.integers import as_integer


class PlannedRollout:
    """A batch and its plan, shared by the iterators of one `get_data_iterator` call.

    Args:
        schedule: the batch's micro-batches; where `wait` is given those of its first step.
        wait: gives those of all steps, once they are made; None: they are.
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
        self._for_forward_passes: PlannedRollout | None = None

    @property
    def schedule(self) -> MicroBatchSchedule:
        """The micro-batches of training. Waits until all steps are planned.

        Where other ranks might be waiting for this one, it is read in the work of an agreement.

        Raises:
            CollectiveError: on every rank, if planning failed on any.
        """
        if self._wait is not None:
            self._schedule = self._wait()
            self._wait = None
        return self._schedule

    def of_step(self, step: Any) -> MicroBatchSchedule:
        """A schedule that holds a step; waits for later ones than the first, as `schedule`.

        Args:
            step: which optimizer step; what is none is refused by `MicroBatchSchedule.check_step`.
        """
        return self._first if as_integer(step) == 0 else self.schedule

    def of_slot(self, slot: int) -> MicroBatchSchedule:
        """A schedule that holds a micro-batch, if any does, counted over all steps."""
        return self._first if slot < len(self._first.micro_batches) else self.schedule

    def replace(self, schedule: MicroBatchSchedule) -> None:
        """Go on with another schedule; all iterators walk it from now on."""
        self._first = self._schedule = schedule
        self._wait = None
        # It holds the rollout data as they were: made anew, of the fields that are there now.
        self._for_forward_passes = None

    def for_forward_passes(self, job: Job, model: Any) -> PlannedRollout:
        """Itself, or the same batch as planned for forward passes alone.

        A collective over all ranks where it has to be made, at the first call under
        ``--dynamic-batch-forward-only-plan own`` or a cap of forward passes.

        Args:
            job: the present one.
            model: this rank's model chunks.
        """
        # Planning is a collective; `forward_only` has compared this among the ranks.
        if not job.options.has_own_forward_plan:
            return self
        if self._for_forward_passes is None:
            shared = self.schedule
            # Fields that were added need not be on all stages, and no plan needs them.
            request = RolloutRequest(
                job,
                model,
                Schema(tuple(shared.schema[name] for name in REQUIRED_FIELDS)),
                # In the order of the rollout data: packing again must not depend on training's
                # plan.
                steps=[sorted(i for indices in step for i in indices) for step in shared.steps],
                cost_model=shared.cost_model,
                forward_only=True,
                training=shared,
            )
            given = {name: shared.rollout_data[name] for name in REQUIRED_FIELDS}
            own = plan_rollout(request, given).schedule
            own = dataclasses.replace(
                own,
                rollout_data=shared.rollout_data,
                schema=shared.schema,
                template=shared.template,
                # A framework's layout pads samples less than these dims ask for.
                dims=shared.dims,
                moves=shared.moves,
            )
            self._for_forward_passes = PlannedRollout(own)
        return self._for_forward_passes


class NumMicroBatches(Sequence[int]):
    """The number of micro-batches of each step, as a list whose later entries are waited for.

    Args:
        rollout: whose first step is planned.
    """

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
