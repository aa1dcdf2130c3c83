"""`add_fields`: further fields for samples that are planned already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mcore_batching.batch import Field, SchemaError
from mcore_batching.batch.columns import Columns
from mcore_batching.batch.fields import require_one_per_sample
from mcore_batching.batch.prefix_tree import require_shared
from mcore_batching.megatron.exchange import leaving, receive_columns
from mcore_batching.megatron.iterator import DataIterator, planned, rollout_of
from mcore_batching.megatron.job import job_of
from mcore_batching.megatron.rollout_batch import require_known_tokens, template_of
from mcore_batching.planning.integers import as_integer

_ADDING = "adding fields"
_LENGTHS = {"total_lengths", "response_lengths"}
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
        schedule = rollout_of(data_iterator)
        agree.same("plan (sha256)", schedule.plan_digest)
    planned(schedule)
    present, moves = schedule.rollout_data, schedule.moves
    brought = Columns(present.schema, {}, *moves.lengths)
    with job.agreement(f"{_ADDING}, their kinds") as agree:
        fields = _without_lengths(fields, brought)
        # Those that were there have been compared, and keep their kind where they are replaced.
        new = fields.keys() - present.schema.keys()
        own: dict[str, Field] = {}
        if brought.total_lengths:
            resolved = present.schema.resolve(_with_lengths(fields, brought))
            own = {name: resolved[name] for name in new}
        # A rank without samples takes the kinds of those that have some.
        kinds = agree.every("kinds", own, wanted=bool(new) and not brought.total_lengths)
    inferred = {name: field for each in kinds.by_rank.values() for name, field in each.items()}
    # Another agreement: values can be checked once the kinds are there, and no rank may go on with
    # a field that another one refused.
    with job.agreement(f"{_ADDING}, their values") as agree:
        schema = present.schema
        for name in new & (own or inferred).keys():
            schema = schema.with_field((own or inferred)[name])
        schema = schema.resolve(_with_lengths(fields, brought))
        added = brought.extended(fields, schema)
        if "tokens" in added:
            require_known_tokens(added, schedule.vocabulary_size)
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


def _without_lengths(fields: Fields, brought: Columns) -> Fields:
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
    return {name: values for name, values in present.items() if name not in _LENGTHS}


def _with_lengths(fields: Fields, brought: Columns) -> dict[str, Any]:
    """The fields beside the lengths of their samples."""
    lengths = {name: getattr(brought, name) for name in _LENGTHS}
    return lengths | {name: list(values) for name, values in fields.items()}


def _require_dict(fields: Any) -> None:
    if not isinstance(fields, Mapping):
        raise TypeError(
            f"fields must be a dict of lists, got {type(fields).__name__}; give one value per "
            "sample, or {} where there are none"
        )
