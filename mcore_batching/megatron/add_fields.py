"""`add_fields`: further fields for samples that are planned already."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from mcore_batching.batch import Field
from mcore_batching.batch.columns import Columns
from mcore_batching.batch.fields import require_one_per_sample
from mcore_batching.batch.prefix_tree import require_hosts
from mcore_batching.megatron.exchange import exchange_fields
from mcore_batching.megatron.iterator import DataIterator, rollout_of
from mcore_batching.megatron.job import job_of
from mcore_batching.megatron.rollout_batch import template_of
from mcore_batching.megatron.schedule import MicroBatchSchedule

_ADDING = "adding fields"
Fields = Mapping[str, Sequence[Any]]


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
        _require_dict(fields)
        rollout = rollout_of(data_iterator)
        agree.same("plan (sha256)", rollout.schedule.plan_digest)
    schedule = rollout.planned()
    if schedule.moves is not None:
        fields = exchange_fields(job, schedule.moves, fields, _ADDING)
    with job.agreement(f"{_ADDING}, their kinds") as agree:
        for name, values in fields.items():
            require_one_per_sample(name, values, schedule.num_samples)
        # Those that were there have been compared, and keep their kind where they are replaced.
        new = fields.keys() - schedule.rollout_data.schema.keys()
        own: dict[str, Field] = {}
        if schedule.num_samples:
            resolved = schedule.rollout_data.schema.resolve(_with_lengths(schedule, fields))
            own = {name: resolved[name] for name in new if name in resolved}
        # A rank that runs no samples takes the kinds of those that do.
        kinds = agree.every("kinds", own, wanted=bool(new) and not schedule.num_samples)
    inferred = {name: field for each in kinds.by_rank.values() for name, field in each.items()}
    # Another agreement: values can be checked once the kinds are there, and no rank may go on with
    # a field that another one refused.
    with job.agreement(f"{_ADDING}, their values") as agree:
        extended = _with_fields(schedule, fields, own or inferred)
        for name in new:
            agree.same(
                f"declaration of field {name!r}", extended.rollout_data.schema[name].declaration
            )
    rollout.replace(extended)


def _with_fields(
    schedule: MicroBatchSchedule, fields: Fields, kinds: Mapping[str, Field]
) -> MicroBatchSchedule:
    """The schedule with further fields of these kinds, or with other values of those it has."""
    schema = schedule.rollout_data.schema
    for name in fields.keys() - schema.keys():
        if name in kinds:
            schema = schema.with_field(kinds[name])
    schema = schema.resolve(_with_lengths(schedule, fields))
    if fields.keys() & {"total_lengths", "response_lengths"}:
        # All fields anew: they may be of other lengths than these.
        data = Columns.read({**schedule.rollout_data, **fields}, schema)
    else:
        data = schedule.rollout_data.extended(fields, schema)
    if schedule.hosts is not None:
        require_hosts(schedule.hosts, data)
    vocabulary_size = schedule.vocabulary_size if "tokens" in fields else None
    # On a rank without samples the template is all there is to copy a placeholder from.
    template = template_of(data, vocabulary_size, schedule.template)
    return dataclasses.replace(schedule, rollout_data=data, template=template)


def _with_lengths(schedule: MicroBatchSchedule, fields: Fields) -> dict[str, Any]:
    """The fields beside the lengths of their samples."""
    data = schedule.rollout_data
    lengths = {"total_lengths": data.total_lengths, "response_lengths": data.response_lengths}
    return lengths | {name: list(values) for name, values in fields.items()}


def _require_dict(fields: Any) -> None:
    if not isinstance(fields, Mapping):
        raise TypeError(
            f"fields must be a dict of lists, got {type(fields).__name__}; give one value per "
            "sample, or {} where there are none"
        )
