"""`get_data_iterator`: rollout data on every rank, as iterators over micro-batches.

    get_data_iterator    step 0 is planned and exchanged; a worker plans steps 1, 2, ...
    train_step 0         meanwhile
    train_step 1         the plan of step 1 is awaited, its samples move; it runs

Samples that stay on their rank (``--no-dynamic-batch-exchange``) are scheduled at once.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

from mcore_batching.batch import DEFAULT_SCHEMA, Schema, SchemaError
from mcore_batching.batch.columns import Columns
from mcore_batching.batch.fields import require_one_per_sample
from mcore_batching.batch.prefix_tree import require_shared
from mcore_batching.flags import FLAGS
from mcore_batching.megatron.errors import DynamicBatchArgumentError
from mcore_batching.megatron.exchange import leaving, receive_columns
from mcore_batching.megatron.job import job_of
from mcore_batching.megatron.plan import plan_rollout, planned
from mcore_batching.megatron.samples import (
    read_rollout,
    read_samples,
    require_known_tokens,
    template_of,
)
from mcore_batching.megatron.schedule import MicroBatchSchedule
from mcore_batching.planning import CostModel
from mcore_batching.planning.integers import as_integer

_ADDING = "adding fields"
_LENGTHS = {"total_lengths", "response_lengths"}
Fields = Mapping[str, Sequence[Any]]


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
            ``dynamic_batch_*`` options.
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
    read = functools.partial(read_rollout, job, model, schema, rollout_data, steps)
    samples, _ = read_samples(job, model, read, cost_model=cost_model)
    schedule = plan_rollout(samples)
    # The interleaved schedule draws every micro-batch once per model chunk, each at its own pace.
    # All share the schedule, so that `add_fields` on one list reaches every stage's iterator.
    iterators = [DataIterator(schedule) for _ in range(schedule.dims.virtual_pipeline)]
    counts = schedule.num_microbatches if schedule.is_planned else NumMicroBatches(schedule)
    return iterators, counts


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
        values = schedule.values(micro_batches[self.offset], present)
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


class NumMicroBatches(Sequence[int]):
    """The number of micro-batches of each step, as a list. Later entries are planned when they are
    read: read them on all ranks."""

    def __init__(self, schedule: MicroBatchSchedule) -> None:
        self._schedule = schedule

    def _all(self) -> list[int]:
        return planned(self._schedule).num_microbatches

    def __len__(self) -> int:
        return self._schedule.num_steps

    def __getitem__(self, step: Any) -> Any:
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


def add_fields(data_iterator: Sequence[DataIterator], fields: Mapping[str, Sequence[Any]]) -> None:
    """Give the samples further fields: what `forward_only` returned, advantages made of it.

    A collective over all ranks, so that a field that does not fit is an error on each. Ranks may
    add different fields, or none (``{}``), as those that make no log-probs. A field that is there
    already is replaced.

    Args:
        data_iterator: from `get_data_iterator`; the plan stays as it is.
        fields: field name to one value per sample of this rank, in the order of the rollout data.
            Where samples were exchanged, so are these, among ranks of one pipeline stage: the same
            fields on all of them that have samples.

    Raises:
        PlanningFailedError: on every rank, if a field does not fit on any (a `SchemaError`).
        PlanMismatchError: on every rank, if the iterators are not of one `get_data_iterator` call,
            or a field's kinds differ between ranks.
    """
    job = job_of()
    with job.agreement(_ADDING) as agree:
        if not isinstance(fields, Mapping):
            raise TypeError(
                f"fields must be a dict of lists, got {type(fields).__name__}; give one value per "
                "sample, or {} where there are none"
            )
        schedule = rollout_of(data_iterator)
        agree.same("plan (sha256)", schedule.plan_digest)
    planned(schedule)
    present, moves = schedule.rollout_data, schedule.moves
    given = schedule.samples.data
    brought = Columns(present.schema, {}, given.total_lengths, given.response_lengths)
    with job.agreement(f"{_ADDING}, their kinds") as agree:
        fields = _without_lengths(fields, brought)
        # Those that were there have been compared, and keep their kind where they are replaced.
        schema, new = present.schema, fields.keys() - present.schema.keys()
        has_samples = bool(brought.total_lengths)
        if has_samples:
            schema = schema.resolve({name: getattr(brought, name) for name in _LENGTHS} | fields)
        # A rank without samples takes the kinds of those that have some.
        own = {name: schema[name] for name in new if has_samples}
        kinds = agree.every("kinds", own, wanted=bool(new) and not has_samples)
    # Another agreement: values can be checked once the kinds are there, and no rank may go on with
    # a field that another one refused.
    with job.agreement(f"{_ADDING}, their values") as agree:
        inferred = {name: field for each in kinds.by_rank.values() for name, field in each.items()}
        for name in new & inferred.keys() - schema.keys():
            schema = schema.with_field(inferred[name])
        added = brought.extended(fields, schema)
        if "tokens" in added:
            require_known_tokens(added, schedule.samples.vocabulary_size)
        for name in new:
            agree.same(f"declaration of field {name!r}", schema[name].declaration)
        staying, parts = leaving(moves, added)
    added = receive_columns(job, moves, staying, parts, _ADDING)
    with job.agreement(f"{_ADDING} to the others"):
        data = present.beside(added)
        if schedule.forest is not None:
            require_shared(schedule.forest, data)
        # On a rank without samples the template is all there is to copy a placeholder from.
        template = template_of(data, schedule.template)
    schedule.replace_fields(data, template)


def _without_lengths(fields: Fields, brought: Columns) -> dict[str, list[Any]]:
    """The fields that are not None, each with one value per sample; lengths stay as they are."""
    present = {name: values for name, values in fields.items() if values is not None}
    for name, values in present.items():
        require_one_per_sample(name, values, len(brought.total_lengths))
    for name in present.keys() & _LENGTHS:
        if [*map(as_integer, present[name])] != getattr(brought, name):
            raise SchemaError(
                name,
                expected="the lengths that were planned",
                found="others; give them to get_data_iterator",
            )
    return {name: [*values] for name, values in present.items() if name not in _LENGTHS}
