"""Declarations of a rollout batch's fields.

A batch is a dict of fields; a field is a list with one value per sample, or None for the whole
batch if it is absent.

    schema = DEFAULT_SCHEMA.declare("entropies", Kind.PER_RESPONSE_TOKEN)
    schema = schema.resolve(batch)   # infers the kinds of undeclared fields from their values
    batch = schema.validate(batch)   # tensors, or a SchemaError that names key, sample and shapes

A kind is inferred where the data fits exactly one. Nothing is guessed: where several kinds fit, a
`SchemaError` lists them with the line that declares each.

    total_lengths [5, 7], response_lengths [2, 7]
    values of 5 and 7 rows                    per token
    values of 2 and 7 rows                    per response token
    numbers, or tensors without dimensions    per sample
    strings, None, dicts of strings           metadata
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mcore_batching.batch.errors import SchemaError
from mcore_batching.batch.fields import (
    TRAITS,
    Field,
    Fill,
    Kind,
    checked_values,
    read_lengths,
    require_one_per_sample,
    row_counts,
    undeclared,
    unmet,
)
from mcore_batching.batch.values import describe, shape_of, tensor_of


@dataclasses.dataclass(frozen=True, eq=False)
class Schema(Mapping[str, Field]):
    """Declarations by field name, each name once. Frozen: `declare` and `resolve` return new
    schemas."""

    fields: tuple[Field, ...] = ()

    def __post_init__(self) -> None:
        by_name: dict[str, Field] = {}
        for field in self.fields:
            if field.name in by_name:
                kinds = f"Kind.{by_name[field.name].kind.name} and Kind.{field.kind.name}"
                raise SchemaError(field.name, expected="one declaration", found=kinds)
            by_name[field.name] = field
        object.__setattr__(self, "_by_name", by_name)

    _by_name: dict[str, Field] = dataclasses.field(init=False)

    def __getitem__(self, name: str) -> Field:
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    def __repr__(self) -> str:
        # Short, since help() prints it in every signature that has it as a default.
        return f"<Schema of {len(self)} fields>"

    def declare(
        self,
        name: str,
        kind: Kind,
        *,
        length_offset: int = 0,
        required: bool = False,
        fill: Fill | None = None,
    ) -> Schema:
        """This schema with a field added, or declared anew; arguments and errors are those of
        `Field`. Without a ``fill``, a field that is declared already keeps its own where the new
        kind allows it; a new one is filled with zeros."""
        if fill is None:
            # Zeros would mask a padding sample's attention, and put it into group 0.
            declared = self[name].fill if name in self else Fill.ZEROS
            fill = declared if declared in TRAITS[kind].fills else Fill.ZEROS
        field = Field(name, kind, length_offset=length_offset, required=required, fill=fill)
        return self.with_field(field)

    def with_field(self, field: Field) -> Schema:
        """`declare`, from a `Field`."""
        return Schema((*(f for f in self.fields if f.name != field.name), field))

    def resolve(self, batch: Mapping[str, Any]) -> Schema:
        """This schema with every undeclared field of a batch added, its kind inferred.

        Raises:
            SchemaError: the values fit no kind, or several; lists them with the line that declares
                each.
        """
        # A field that is None for the whole batch is absent: nothing to infer from.
        inferred = [
            infer_field(name, batch)
            for name, values in batch.items()
            if values is not None and name not in self
        ]
        return Schema((*self.fields, *inferred)) if inferred else self

    def validate(self, batch: Mapping[str, Any]) -> dict[str, list[Any]]:
        """Check every field of a batch against its declaration.

        Returns:
            new lists of the fields that are not None; lists and arrays of numbers become tensors,
            lengths Python ints.

        Raises:
            SchemaError: a required field is absent, a length is no integer of 0 or more, a field is
                not declared, or a value does not match its kind.
        """
        # First, since all other fields are checked against them.
        lengths = lengths_of(batch, self)
        checked = {
            name: checked_values(self.declared(name), values, *lengths.values())
            for name, values in batch.items()
            if values is not None and name not in lengths  # None: absent for the whole batch
        }
        return {**lengths, **checked}

    def declared(self, name: str) -> Field:
        """The declaration of a field; a `SchemaError` if there is none."""
        if name not in self:
            raise undeclared(name, "use schema = schema.resolve(batch), or declare")
        return self[name]


def lengths_of(batch: Mapping[str, Any], schema: Schema) -> dict[str, list[int]]:
    """The samples' lengths as Python ints, total ones first; refuses a batch without a required
    field."""
    for field in schema.values():
        if field.required and batch.get(field.name) is None:
            found = "None" if field.name in batch else "no such field"
            raise SchemaError(field.name, expected="one value per sample", found=found)
    totals, responses = read_lengths(batch)
    return {"total_lengths": totals, "response_lengths": responses}


def infer_field(name: str, batch: Mapping[str, Any]) -> Field:
    """A declaration of the kind that the values of a field fit; refuses them if they fit no kind,
    several, or one that must be declared."""
    lengths = read_lengths(batch)
    require_one_per_sample(name, batch[name], len(lengths[0]))
    values = list(batch[name])
    # Lists that cannot become tensors stay lists, which fit no kind.
    with contextlib.suppress(SchemaError):
        values = [tensor_of(name, index, value) for index, value in enumerate(values)]
    fits: dict[Field, int] = {}
    for field in _candidates(name, values):
        rows = zip(values, row_counts(field, *lengths), strict=True)
        fits[field] = sum(_fits(field, *each) for each in rows)
    # All kinds that fit, not the first: a declaration decides.
    fitting = [field for field, count in fits.items() if count == len(values)]
    if len(fitting) == 1 and fitting[0].kind in _INFERRED:
        return fitting[0]
    most = max(fits, key=fits.__getitem__, default=None)
    # "Sample 7 has 5 rows" helps more than "no kind fits" where the others are plain. More than
    # half, since two equal halves would blame either.
    if not fitting and most is not None and 2 * fits[most] > len(values):
        checked_values(most, values, *lengths)
    if not values:
        found = " of no samples, which may be any kind"
    elif fitting:
        kinds = " or ".join(field.kind.value for field in fitting)
        found = f": {len(values)} values such as {describe(values[0])} may be {kinds}"
    else:
        found = f": {len(values)} values such as {describe(values[0])} fit no kind (metadata takes "
        found += "any value)"
    offered = fitting or [Field(name, Kind.METADATA)]
    raise SchemaError(
        name,
        expected="a declared field, or values of one kind",
        found=f"an undeclared field{found}",
        declaration=" or ".join(dict.fromkeys(field.declaration for field in offered)),
    )


_INFERRED = {Kind.PER_TOKEN, Kind.PER_RESPONSE_TOKEN, Kind.PER_SAMPLE, Kind.METADATA}


def _candidates(name: str, values: Sequence[Any]) -> list[Field]:
    """Declarations that may be meant, by what the values are."""
    kinds = [Kind.PER_TOKEN, Kind.PER_RESPONSE_TOKEN, Kind.PER_SAMPLE]
    # Objects, and numbers beside rows, fit none of these: they are never guessed to be metadata.
    dimensions = {len(shape_of(value) or ()) for value in values}
    if not values:  # of no samples: any kind that another field than `tokens` may have
        kinds = [kind for kind in Kind if kind is not Kind.TOKENS]
    elif all(_is_text(value) for value in values):
        kinds = [Kind.METADATA]
    elif all(value is None or isinstance(value, Mapping) for value in values):
        kinds = [Kind.MULTIMODAL, Kind.METADATA]  # both take dicts
    # Integers with a shape of their own; the number of rows decides all else.
    elif dimensions == {2}:
        kinds.append(Kind.POSITION_IDS)
    fields = [Field(name, kind) for kind in kinds]
    if dimensions == {3}:
        # Rollout engines route no token after the last one, so they give one row less.
        fields += [Field(name, Kind.ROUTED_EXPERTS, length_offset=n) for n in (-1, 0)]
    return fields


def _fits(field: Field, value: Any, rows: int) -> bool:
    """True if a value may be of a field; tensors per sample must be declared."""
    if field.kind is Kind.PER_SAMPLE and shape_of(value) != ():
        return False
    return unmet(field, value, rows) is None


def _is_text(value: Any) -> bool:
    if isinstance(value, Mapping):
        # An empty dict may be multimodal inputs, too.
        return bool(value) and all(isinstance(text, str) for pair in value.items() for text in pair)
    return value is None or isinstance(value, str)


_NAMES: dict[tuple[Kind, Fill], tuple[str, ...]] = {
    (Kind.PER_RESPONSE_TOKEN, Fill.ZEROS): (
        *("loss_masks", "log_probs", "ref_log_probs", "rollout_log_probs", "teacher_log_probs"),
        *("values", "advantages", "returns", "kl", "entropy", "opd_reverse_kl"),
        # of verl
        *("response_mask", "loss_mask", "old_log_probs", "ref_log_prob", "entropys", "rm_scores"),
        *("token_level_scores", "token_level_rewards", "rollout_is_weights"),
        # of SkyRL
        *("action_log_probs", "base_action_log_probs", "rollout_logprobs"),
    ),
    (Kind.PER_RESPONSE_TOKEN, Fill.TOKEN_IDS): ("responses", "response_ids"),
    (Kind.PER_TOKEN, Fill.TOKEN_IDS): ("input_ids", "sequences"),
    # SkyRL's router_padding_mask is True where no route is to be replayed.
    (Kind.PER_TOKEN, Fill.ONES): ("attention_mask", "router_padding_mask"),
    (Kind.PER_SAMPLE, Fill.ZEROS): (
        *("rewards", "raw_reward", "truncated", "round_number", "rollout_mask_sums"),
        *("max_seq_lens", "is_padding", "num_turns"),
    ),
    # SkyRL counts trajectories by their last turns, and a padding sample is one of its own.
    (Kind.PER_SAMPLE, Fill.ONES): ("is_last_step",),
    (Kind.METADATA, Fill.ZEROS): ("source_names", "prompt", "metadata", "rollout_top_p_token_ids"),
    # Identifiers are metadata: a zero in a placeholder would pass for somebody else's.
    (Kind.METADATA, Fill.IDENTIFIER): (
        *("uids", "trajectory_ids", "sample_indices", "rollout_ids", "uid", "prompt_uid"),
        *("session_id", "trajectory_id", "request_id", "index"),
    ),
    (Kind.METADATA, Fill.TOKEN_IDS): ("prompts", "prompt_ids", "prompt_token_ids"),
    (Kind.POSITION_IDS, Fill.ZEROS): ("position_ids",),
    (Kind.MULTIMODAL, Fill.ZEROS): ("multimodal_train_inputs", "multi_modal_inputs"),
}

DEFAULT_SCHEMA = Schema(
    (
        Field("tokens", Kind.TOKENS, required=True),
        Field("total_lengths", Kind.PER_SAMPLE, required=True),
        Field("response_lengths", Kind.PER_SAMPLE, required=True),
        # Rollout engines route no token after the last one.
        Field("rollout_routed_experts", Kind.ROUTED_EXPERTS, length_offset=-1),
        # Offsets into rollout_top_p_token_ids begin with a 0.
        Field("rollout_top_p_token_offsets", Kind.PER_RESPONSE_TOKEN, length_offset=1),
        *(Field(name, kind, fill=fill) for (kind, fill), names in _NAMES.items() for name in names),
    )
)
"""Fields that slime's Megatron backend reads (``rollout_data``), and those of verl and SkyRL."""
