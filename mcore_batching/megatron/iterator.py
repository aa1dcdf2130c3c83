"""`get_data_iterator`: rollout data on every rank, as iterators over micro-batches.

    get_data_iterator    step 0 is planned and exchanged; a worker plans steps 1, 2, ...
    train_step 0         meanwhile
    train_step 1         the plan of step 1 is awaited, its samples move; it runs

Samples that stay on their rank (``--no-dynamic-batch-exchange``) are scheduled at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Self, overload

from mcore_batching.batch import DEFAULT_SCHEMA, Schema
from mcore_batching.flags import FLAGS
from mcore_batching.megatron.checks.settings import prepare_model
from mcore_batching.megatron.errors import DynamicBatchArgumentError
from mcore_batching.megatron.job import Job, job_of
from mcore_batching.megatron.plan import begin_plan, plan_locally, planned_step
from mcore_batching.megatron.plan_inputs import PlanInputs
from mcore_batching.megatron.rollout_batch import RolloutBatch
from mcore_batching.megatron.samples import Samples, Share, numbered, read_samples, with_beginnings
from mcore_batching.megatron.schedule import MicroBatchSchedule
from mcore_batching.megatron.topology import model_chunks
from mcore_batching.planning import CostModel
from mcore_batching.planning.integers import as_integer
from mcore_batching.planning.worker import PlanTicket


def get_data_iterator(
    args: Any,
    model: list[Any],
    rollout_data: dict[str, list[Any]] | None,
    *,
    schema: Schema = DEFAULT_SCHEMA,
    steps: Iterable[Iterable[int]] | None = None,
    cost_model: CostModel | None = None,
) -> tuple[list[DataIterator], Sequence[int]]:
    """Plan this rank's micro-batches together with all other ranks.

    A collective over all ranks. The samples of all ranks are planned together, by the job's first
    rank, and each moves to the ranks that run it. Outputs of `forward_only` come back to where
    their samples came from, and `add_fields` takes fields in that order; the iterators
    (``rollout_data``, `get_next`) hold the samples that run here.

    Of several steps the first is planned and exchanged when this returns. A worker process plans
    the others meanwhile, of the samples as they are now; each is awaited when it is first used. If
    planning a later step fails, all ranks raise then.

    Under ``--no-dynamic-batch-exchange`` each data-parallel rank packs its own samples, and those
    with fewer micro-batches split theirs, then add placeholders.

    Under ``--dynamic-batch-share-prefixes`` tokens with which several samples of a step begin are
    computed once, in one row; all else stays per sample.

    Args:
        args: Megatron's arguments: ``max_tokens_per_gpu``, ``global_batch_size`` and the
            ``dynamic_batch_*`` options. Where ``use_dynamic_batch_size`` is there and False,
            micro-batches hold ``micro_batch_size`` samples each, however long.
        model: this rank's model chunks.
        rollout_data: field name to one value per sample of this data-parallel rank, which may have
            none (empty lists); ``tokens``, ``total_lengths`` and ``response_lengths`` are required.
            It is sent to ranks of a replica (pipeline, tensor, context) that pass None.
        schema: the kind of every field. Undeclared ones are inferred from this rank's samples;
            where these fit several kinds, a `SchemaError` prints the line that declares the field.
        steps: local sample indices of every optimizer step, in lists, arrays, tensors or whatever
            gives them once. None: steps of ``global_batch_size`` samples over all ranks, the last
            one short, to which each rank gives consecutive samples in proportion to its number.
            ``rollout_data["dynamic_global_batch_size"]`` overrides the argument; beside `steps` it
            is what `train_step` counts each of them as: prompts times trajectories per prompt.
        cost_model: what samples and micro-batches cost; None: as ``--dynamic-batch-cost-model``
            says, by default the model's shape.

    Returns:
        one iterator per virtual pipeline stage, and the number of micro-batches of each step, the
        same on every rank; reading that of a step that is not planned yet plans it, which is a
        collective over all ranks.

    Raises:
        DynamicBatchArgumentError: settings under which training would hang or be wrong.
        PlanningFailedError: on every rank, if any could not plan.
        PlanMismatchError: on every rank, if they disagree on settings, fields or plan.
    """
    job = job_of(args)
    samples = read_samples(
        job, model, schema, lambda: rollout_data, steps=steps, cost_model=cost_model
    )
    schedule = plan_rollout(samples)
    # The interleaved schedule draws every micro-batch once per model chunk, each at its own pace.
    # All share the schedule, so that `add_fields` on one list reaches every stage's iterator.
    iterators = [DataIterator(schedule) for _ in range(schedule.dims.virtual_pipeline)]
    is_planned = schedule.later is None
    return iterators, schedule.num_microbatches if is_planned else NumMicroBatches(schedule)


class DataIterator:
    """Walks through the micro-batches of a rollout, for one virtual pipeline stage.

    The names that frameworks read are kept: ``rollout_data``, ``micro_batch_indices``, ``offset``,
    ``get_next`` and ``reset``. Reading one of the first two plans all steps that are not yet, which
    is a collective over all ranks.
    """

    def __init__(self, schedule: MicroBatchSchedule) -> None:
        self._schedule = schedule
        self.offset = 0

    @property
    def rollout_data(self) -> dict[str, list[Any]]:
        """Field name to one value per sample of this rank, to be read: `add_fields` replaces
        values."""
        return dict(planned(self._schedule).rollout_data)

    @property
    def micro_batch_indices(self) -> list[list[int]]:
        """Local sample indices of every micro-batch of every step; ``[]`` for a placeholder."""
        return [list(indices) for indices in planned(self._schedule).micro_batches]

    def get_next(self, keys: Sequence[str]) -> dict[str, list[Any] | None]:
        """The next micro-batch: for each key one value per sample, one fabricated value for a
        placeholder, None for a key that the rollout data lacks.

        Raises:
            IndexError: all micro-batches have been drawn; `reset` starts again.
            DynamicBatchArgumentError: samples share tokens, or the step is not planned yet.
        """
        keys = list(keys)
        schedule = self._schedule
        # Whoever lays them out by their lengths would give each a segment of its own, over the cap.
        if schedule.forest is not None:
            raise DynamicBatchArgumentError(
                "samples that share tokens cannot be drawn; give the iterators to forward_only "
                f"and train_step, or unset {FLAGS['share_prefixes']}"
            )
        micro_batches = schedule.micro_batches
        # Not planned here: inside a pipeline the other ranks may wait for this one.
        step = len(schedule.steps)
        if self.offset >= len(micro_batches) and step < schedule.num_steps:
            raise DynamicBatchArgumentError(
                f"step {step} is not planned yet: read num_microbatches[{step}] on all ranks first"
            )
        if self.offset >= len(micro_batches):
            raise IndexError(
                f"all {len(micro_batches)} micro-batches have been drawn; call reset() first"
            )
        # slime requests all fields of its own, and takes None for those that a rollout lacks.
        present = [key for key in keys if key in schedule.template]
        values = schedule.samples(micro_batches[self.offset], present)
        self.offset += 1
        return {key: values.get(key) for key in keys}

    def reset(self) -> Self:
        """Start again from the first micro-batch."""
        self.offset = 0
        return self


def rollout_of(data_iterator: Sequence[DataIterator]) -> MicroBatchSchedule:
    """The batch that the iterators of one call walk through, as far as it is planned.

    Raises:
        TypeError: they are not what `get_data_iterator` returned.
    """
    first = data_iterator[0] if isinstance(data_iterator, Sequence) and data_iterator else None
    if not isinstance(first, DataIterator):
        raise TypeError(
            "data_iterator must be what get_data_iterator returned, got "
            f"{type(data_iterator).__name__}; pass on its list of iterators"
        )
    # The first stands for all: those of one call share the schedule.
    return first._schedule


def schedule_of(data_iterator: Sequence[DataIterator]) -> MicroBatchSchedule:
    """The micro-batches that the iterators of one call walk through. A collective over all ranks
    while some step is not planned.

    Raises:
        TypeError: they are not what `get_data_iterator` returned.
    """
    return planned(rollout_of(data_iterator))


def planned(schedule: MicroBatchSchedule, step: Any = None) -> MicroBatchSchedule:
    """The schedule, with its steps planned up to this one at least, by default all.

    A collective over all ranks if some of them is not planned yet.

    Raises:
        PlanningFailedError: on every rank, if a step cannot be planned.
    """
    last = schedule.num_steps - 1 if step is None else as_integer(step)
    if last is not None and last in range(schedule.num_steps):  # else `check_step` refuses it
        while schedule.later is not None and len(schedule.steps) <= last:
            number = len(schedule.steps)
            ticket = schedule.tickets[number - 1]
            schedule.append(planned_step(schedule.later, number, ticket))
            if len(schedule.steps) == len(schedule.later.steps):
                schedule.later, schedule.tickets = None, ()
    return schedule


def plan_rollout(samples: Samples, ticket: PlanTicket | None = None) -> MicroBatchSchedule:
    """The schedule of samples that were read, of its first step at least. A collective.

    `ticket` is of the first step's plan, on the planning rank where it was begun.

    Raises:
        PlanningFailedError: on every rank, if planning or the exchange failed on any.
        PlanMismatchError: on every rank, if they disagree on samples or plan.
    """
    job = samples.job
    if not job.options.exchanges_samples:
        return plan_locally(samples)
    # First: the worker plans while the first step is planned in line.
    later_steps = range(1, len(samples.steps))
    tickets = [begin_plan(job, samples.request(step)) for step in later_steps]
    # Ranks compare the number of steps here, before collectives that follow from it.
    schedule = planned_step(samples, 0, ticket)
    if later_steps:
        schedule.later, schedule.tickets = samples, tickets
    return schedule


def plan_forward_passes(schedule: MicroBatchSchedule, job: Job, model: Any) -> MicroBatchSchedule:
    """The schedule, or that of the same batch under the cap of forward passes. A collective over
    all ranks where it has to be made, at the first call under such a cap."""
    # `forward_only` has compared this among the ranks.
    if not job.options.has_own_forward_cap:
        return schedule
    if schedule.for_forward_passes is None:
        again = _read_again(planned(schedule), job, model)
        schedule.for_forward_passes = planned(plan_rollout(again))
    return schedule.for_forward_passes


def _read_again(shared: MicroBatchSchedule, job: Job, model: Any) -> Samples:
    """The samples of a schedule, from the ranks that run them in training."""
    with job.agreement("reading settings of forward passes") as agree:
        chunks = model_chunks(model)
        settings = PlanInputs.of(
            job, chunks, shared.settings.cost_model, training=shared.config, forward_only=True
        )
        # A framework's layout pads samples less than the settings' dims ask for.
        settings = dataclasses.replace(settings, dims=shared.dims)
        # Perhaps another model than was trained, such as a reference model.
        prepare_model(chunks, settings.dims, settings.config)
        for name, value in settings.comparable().items():
            agree.same(name, value)
        lengths = shared.own_lengths
        steps = [sorted(i for row in step for i in row) for step in shared.steps]
        batch = RolloutBatch(
            shared.rollout_data,
            shared.template,
            lengths,
            shared.samples_per_step,
            steps,
            shared.vocabulary_size,
        )
        shares = agree.gather("samples", Share(lengths, steps, shared.samples_per_step))
    samples = numbered(job, settings, batch, shares.values, forward_only=True)
    if shared.forest is not None:
        samples = with_beginnings(samples, chunks)
    return dataclasses.replace(samples, before=shared.moves, fields_were_compared=True)


class NumMicroBatches(Sequence[int]):
    """The number of micro-batches of each step, as a list. Later entries are planned when they are
    read: read them on all ranks."""

    def __init__(self, schedule: MicroBatchSchedule) -> None:
        self._schedule = schedule

    def _all(self) -> list[int]:
        return planned(self._schedule).num_microbatches

    def __len__(self) -> int:
        return self._schedule.num_steps

    @overload
    def __getitem__(self, step: int) -> int: ...
    @overload
    def __getitem__(self, step: slice) -> list[int]: ...
    def __getitem__(self, step: int | slice) -> int | list[int]:
        if isinstance(step, slice):
            return self._all()[step]
        number = range(len(self))[step]
        return planned(self._schedule, number).num_microbatches[number]

    def __eq__(self, other: object) -> bool:
        return self._all() == (other._all() if isinstance(other, NumMicroBatches) else other)

    def __repr__(self) -> str:
        known = self._schedule.num_microbatches
        left = len(self) - len(known)
        return f"[{', '.join(map(str, known))}, and {left} being planned]" if left else repr(known)

    def __reduce__(self) -> tuple[type[list[int]], tuple[list[int]]]:
        return list, (self._all(),)  # copied and pickled as the list that it stands for
