"""`Rollout`: a batch whose steps are planned and moved here as they are used.

    get_data_iterator    step 0 is planned and exchanged; a worker plans steps 1, 2, ...
    train_step 0         meanwhile
    train_step 1         the plan of step 1 is awaited, its samples move; it runs

Samples that stay on their rank (``--no-dynamic-batch-exchange``) are scheduled at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, overload

from mcore_batching.megatron.checks.validation import prepare_model
from mcore_batching.megatron.job.flat_values import flat, unflat
from mcore_batching.megatron.job.job import Job
from mcore_batching.megatron.job.row_groups import make_row_groups
from mcore_batching.megatron.rollout.exchange import exchange_step
from mcore_batching.megatron.rollout.plan import begin_plan, plan_locally, plan_together
from mcore_batching.megatron.rollout.rollout_batch import RolloutBatch
from mcore_batching.megatron.rollout.samples import Samples, Share, numbered
from mcore_batching.megatron.rollout.settings import Settings
from mcore_batching.megatron.rows.schedule import MicroBatchSchedule
from mcore_batching.megatron.topology import model_chunks
from mcore_batching.planning.integers import as_integer
from mcore_batching.planning.worker import PlanTicket


class Rollout:
    """A batch, shared by the iterators of one call.

    Attributes:
        schedule: of the steps that have been planned so far.
        num_steps: of all steps.
        for_forward_passes: the same batch as planned for forward passes alone, once it has been.
    """

    def __init__(
        self,
        schedule: MicroBatchSchedule,
        later: Samples | None = None,
        tickets: Sequence[PlanTicket | None] = (),
    ) -> None:
        self.schedule = schedule
        self.num_steps = len(schedule.steps) if later is None else len(later.steps)
        self.for_forward_passes: Rollout | None = None
        self._later, self._tickets = later, [*tickets]

    def planned(self, step: Any = None) -> MicroBatchSchedule:
        """The schedule of the steps up to this one at least, by default of all.

        A collective over all ranks if some of them is not planned yet.

        Raises:
            PlanningFailedError: on every rank, if a step cannot be planned.
        """
        last = self.num_steps - 1 if step is None else as_integer(step)
        if last is not None and last in range(self.num_steps):  # else it is refused by `check_step`
            while len(self.schedule.steps) <= last:
                assert self._later is not None
                number = len(self.schedule.steps)
                made = planned_step(self._later, number, self._tickets[number - 1])
                self.schedule = self.schedule.followed_by(made)
        if len(self.schedule.steps) == self.num_steps:
            self._later, self._tickets = None, []
        return self.schedule

    def check_step(self, step: Any, num_microbatches: Sequence[int]) -> None:
        """Refuse a step that there is not (`IndexError`), or counts of another plan as the caller
        holds them (`ValueError`)."""
        if as_integer(step) not in range(self.num_steps):
            raise IndexError(
                f"step must be 0 to {self.num_steps - 1}, got {step!r}; this batch has "
                f"{self.num_steps} steps"
            )
        self.schedule.check_count(step, num_microbatches)

    def num_microbatches(self) -> Sequence[int]:
        """Of each step: a list, or while later ones are not planned a `NumMicroBatches`."""
        return self.schedule.num_microbatches if self._later is None else NumMicroBatches(self)

    def replace(self, schedule: MicroBatchSchedule) -> None:
        """Go on with another schedule of all steps; all iterators walk it from now on."""
        self.schedule = schedule
        # It holds the rollout data as they were: made anew, of the fields that are there now.
        self.for_forward_passes = None


def plan_rollout(samples: Samples, ticket: PlanTicket | None = None) -> Rollout:
    """The rollout of samples that were read. A collective.

    `ticket` is of the first step's plan, on the planning rank where it was begun.

    Raises:
        PlanningFailedError: on every rank, if planning or the exchange failed on any.
        PlanMismatchError: on every rank, if they disagree on samples or plan.
    """
    job = samples.job
    if not job.options.exchanges_samples:
        return Rollout(plan_locally(samples))
    # First: the worker plans while the first step is planned in line.
    later_steps = range(1, len(samples.steps))
    tickets = [begin_plan(job, samples.request(step)) for step in later_steps]
    # Ranks compare the number of steps here, before collectives that follow from it.
    first = planned_step(samples, 0, ticket)
    if not later_steps:
        return Rollout(first)
    with job.agreement("copying samples of later steps"):
        # The caller may change its values before these are exchanged.
        data = unflat(flat(samples.batch.data))
        batch = dataclasses.replace(samples.batch, data=data)
        return Rollout(first, dataclasses.replace(samples, batch=batch), tickets)


def planned_step(
    samples: Samples, step: int, ticket: PlanTicket | None = None
) -> MicroBatchSchedule:
    """The schedule of one step of all ranks' samples, which have moved. A collective."""
    settings = samples.settings
    most = settings.config.max_context_parallel
    if most is not None:
        # All sizes that a row may have, before the plan: making a group is a collective over all
        # ranks, and a plan may give some size to rows of some ranks alone.
        make_row_groups(samples.job, settings.dims.row_sizes(most))
    return exchange_step(samples, step, plan_together(samples, step, ticket))


def plan_forward_passes(rollout: Rollout, job: Job, model: Any) -> Rollout:
    """The rollout, or the same batch as planned under the cap of forward passes. A collective over
    all ranks where it has to be made, at the first call under such a cap."""
    # `forward_only` has compared this among the ranks.
    if not job.options.has_own_forward_cap:
        return rollout
    if rollout.for_forward_passes is None:
        shared = rollout.planned()
        rollout.for_forward_passes = plan_rollout(_read_again(shared, job, model))
        rollout.for_forward_passes.planned()
    return rollout.for_forward_passes


def _read_again(shared: MicroBatchSchedule, job: Job, model: Any) -> Samples:
    """The samples of a schedule, from the ranks that run them in training."""
    with job.agreement("reading settings of forward passes") as agree:
        chunks = model_chunks(model)
        settings = Settings.of(
            job, chunks, shared.cost_model, training=shared.config, forward_only=True
        )
        # A framework's layout pads samples less than the settings' dims ask for.
        settings = dataclasses.replace(settings, dims=shared.dims)
        # Perhaps another model than was trained, such as a reference model.
        prepare_model(chunks, settings.dims, settings.config)
        for name, value in settings.comparable().items():
            agree.same(name, value)
        lengths, hosts = shared.own_lengths, shared.hosts
        steps = [sorted(i for row in step for i in row) for step in shared.steps]
        batch = RolloutBatch(
            shared.rollout_data,
            shared.schema,
            shared.template,
            lengths,
            shared.samples_per_step,
            steps,
            shared.vocabulary_size,
        )
        shares = agree.gather("samples", Share(lengths, steps, shared.samples_per_step))
        of_ranks = agree.gather("hosts", None if hosts is None else list(hosts))
    samples = numbered(job, settings, batch, shares.values, forward_only=True)
    if hosts is not None:
        each = zip(samples.first, of_ranks.values, strict=False)
        all_hosts = [start + host for start, of_rank in each for host in of_rank or ()]
        samples = dataclasses.replace(samples, hosts=all_hosts)
    return dataclasses.replace(samples, before=shared.moves, fields_were_compared=True)


class NumMicroBatches(Sequence[int]):
    """The number of micro-batches of each step, as a list whose later entries are planned when they
    are read: read them on all ranks."""

    def __init__(self, rollout: Rollout) -> None:
        self._rollout = rollout

    def _all(self) -> list[int]:
        return self._rollout.planned().num_microbatches

    def __len__(self) -> int:
        return self._rollout.num_steps

    @overload
    def __getitem__(self, step: int) -> int: ...
    @overload
    def __getitem__(self, step: slice) -> list[int]: ...
    def __getitem__(self, step: int | slice) -> int | list[int]:
        if isinstance(step, slice):
            return self._all()[step]
        number = range(len(self))[step]
        return self._rollout.planned(number).num_microbatches[number]

    def __eq__(self, other: object) -> bool:
        return self._all() == (other._all() if isinstance(other, NumMicroBatches) else other)

    def __repr__(self) -> str:
        known = self._rollout.schedule.num_microbatches
        left = len(self) - len(known)
        return f"[{', '.join(map(str, known))}, and {left} being planned]" if left else repr(known)

    def __reduce__(self) -> tuple[type[list[int]], tuple[list[int]]]:
        return list, (self._all(),)  # copied and pickled as the list that it stands for
