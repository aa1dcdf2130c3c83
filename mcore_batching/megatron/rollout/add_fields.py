"""`add_fields`: further fields for samples that are planned already."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from mcore_batching.batch import Field
from mcore_batching.batch.agreement.consensus import Statement
from mcore_batching.batch.fields.field_checks import require_one_per_sample
from mcore_batching.batch.fields.infer import infer_fields
from mcore_batching.megatron.job.job import Job, job_of
from mcore_batching.megatron.rollout.data_iterator import DataIterator, rollout_of, schedule_of
from mcore_batching.megatron.rollout.rollout_batch import checked_fields
from mcore_batching.megatron.rows.sample_moves import SampleMoves
from mcore_batching.megatron.rows.schedule import MicroBatchSchedule

_ADDING = "adding fields, their kinds"
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
            or ranks' samples tell different kinds of a field.
    """
    job = job_of()
    # A rank whose iterators are not from here cannot tell, and goes on to the agreement below; the
    # exchange opens with the same one, so that all ranks hear of it.
    if _moves_of(data_iterator) is not None:
        fields = _moved(job, data_iterator, fields)

    def kinds() -> tuple[MicroBatchSchedule, dict[str, Field]]:
        _require_dict(fields)
        schedule = schedule_of(data_iterator)
        for name, values in fields.items():
            require_one_per_sample(name, values, schedule.num_samples)
        data = schedule.rollout_data | dict(fields)
        return schedule, infer_fields(schedule.schema, data, job.memory.told_fields)[0]

    def tells(found: tuple[MicroBatchSchedule, dict[str, Field]]) -> Statement:
        schedule, own = found
        # What one rank's samples leave open (it may have none), another's may tell.
        is_open = not own.keys() >= fields.keys() - schedule.schema.keys()
        return Statement(equal=_digest_of(schedule), tell=own, asks=is_open)

    agreed = job.consensus.agree(_ADDING, kinds, tells)
    schedule, own = agreed.result
    # Its own word first; if another rank's differs, the values' agreement is an error.
    told = {name: field for each in agreed.told.values() for name, field in each.items()} | own
    # Those that were there have been compared, and keep their kind where they are replaced.
    new = fields.keys() - schedule.schema.keys()

    def says(extended: MicroBatchSchedule) -> Statement:
        schema = extended.schema
        return Statement(equal={f"declaration of field {n!r}": schema[n].declaration for n in new})

    # A second agreement: values can be checked once the kinds are known, and no rank may go on with
    # a field that another one refused.
    extended = job.consensus.agree(
        "adding fields, their values",
        lambda: _with_fields(schedule, fields, told),
        says,
    ).result
    # Only now that no rank refused: later batches are read by it.
    job.memory.told_fields.update({name: extended.schema[name] for name in new})
    rollout_of(data_iterator).replace(extended)


def _with_fields(
    schedule: MicroBatchSchedule, fields: Fields, kinds: Mapping[str, Field]
) -> MicroBatchSchedule:
    """The schedule with further fields of these kinds, or with other values of those it has."""
    data = schedule.rollout_data | {name: list(values) for name, values in fields.items()}
    schema = schedule.schema
    for name in fields:
        if name in kinds and name not in schema:
            schema = schema.with_field(kinds[name])
    # All fields anew: values that were given again may be of another length or kind.
    vocabulary_size = schedule.vocabulary_size if "tokens" in fields else None
    # On a rank without samples the template is all there is to copy a placeholder from.
    made = checked_fields(data, schema, kinds, vocabulary_size, schedule.template)
    return dataclasses.replace(schedule, rollout_data=made.pop("data"), **made)


def _require_dict(fields: Any) -> None:
    if not isinstance(fields, Mapping):
        raise TypeError(
            f"fields must be a dict of lists, got {type(fields).__name__}; give one value per "
            "sample, or {} where there are none"
        )


def _moves_of(data_iterator: Any) -> SampleMoves | None:
    """The exchange of samples; None where they were not, or that cannot be told."""
    # Whatever is wrong with the iterators is raised where the other ranks hear of it, and there
    # all steps are waited for.
    with contextlib.suppress(TypeError):
        return rollout_of(data_iterator).of_step(0).moves
    return None


def _moved(job: Job, data_iterator: Sequence[DataIterator], fields: Fields) -> Fields:
    """The fields' values of the samples that this rank runs. A collective over all ranks."""

    def leaving() -> tuple[SampleMoves, list[Any]]:
        _require_dict(fields)
        moves = schedule_of(data_iterator).moves
        assert moves is not None
        return moves, moves.outgoing(fields)

    return job.consensus.exchange(
        _ADDING,
        leaving,
        lambda _: Statement(equal=_digest_of(schedule_of(data_iterator))),
        lambda moves, incoming: moves.arranged(incoming),
    )


def _digest_of(schedule: MicroBatchSchedule) -> dict[str, str]:
    """The digest of a batch's plan, by name: equal on ranks whose iterators are of one call."""
    return {"plan (sha256)": schedule.plan_digest}
