"""Declarations of a rollout batch's fields.

A batch is a dict of fields; a field is a list with one value per sample. The kind of a field says
how long each value is, how it is packed, and what its value in a fabricated sample is. A field that
is None for the whole batch is absent.

    schema = DEFAULT_SCHEMA.declare("entropies", Kind.PER_RESPONSE_TOKEN)
    schema = schema.resolve(batch)   # infers the kinds of undeclared fields from their values
    schema.validate(batch)           # or a SchemaError that names key, sample and shapes
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from mcore_batching.batch.errors import SchemaError
from mcore_batching.batch.field_checks import check_batch
from mcore_batching.batch.fields import Field, Kind
from mcore_batching.batch.infer import infer_field


@dataclasses.dataclass(frozen=True, eq=False)
class Schema(Mapping[str, Field]):
    """Field names to their declarations; `declare` and `resolve` return new schemas.

    Attributes:
        fields: the declarations, one per name.

    Raises:
        SchemaError: a name is declared twice.
    """

    fields: tuple[Field, ...] = ()

    def __post_init__(self) -> None:
        """Index the fields by name."""
        by_name: dict[str, Field] = {}
        for field in self.fields:
            if field.name in by_name:
                raise SchemaError(
                    field.name,
                    expected="one declaration",
                    found=f"Kind.{by_name[field.name].kind.name} and Kind.{field.kind.name}",
                )
            by_name[field.name] = field
        object.__setattr__(self, "_by_name", by_name)

    _by_name: dict[str, Field] = dataclasses.field(init=False, repr=False)

    def __getitem__(self, name: str) -> Field:
        """The declaration of a field."""
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        """The field names."""
        return iter(self._by_name)

    def __len__(self) -> int:
        """Number of declared fields."""
        return len(self._by_name)

    def declare(
        self, name: str, kind: Kind, *, length_offset: int = 0, required: bool = False
    ) -> Schema:
        """This schema with one more field, or with another declaration of one it has.

        Args:
            name: the field's key in a batch.
            kind: of a sample's value.
            length_offset: rows beyond the kind's own length.
            required: every batch has the field.

        Raises:
            SchemaError: no batch could meet the declaration.
        """
        field = Field(name, kind, length_offset=length_offset, required=required)
        return Schema((*(f for f in self.fields if f.name != name), field))

    def resolve(self, batch: Mapping[str, Any]) -> Schema:
        """This schema with a kind for every field of a batch.

        Args:
            batch: field name to one value per sample.

        Returns:
            the schema with the inferred fields added; itself if all were declared.

        Raises:
            SchemaError: the values of an undeclared field fit no kind or several; the message
                lists them with the line that declares each.
        """
        inferred = [
            infer_field(name, batch)
            for name, values in batch.items()
            if values is not None and name not in self
        ]
        return Schema((*self.fields, *inferred)) if inferred else self

    def validate(self, batch: Mapping[str, Any]) -> None:
        """Check that every field of a batch holds what its declaration says.

        Args:
            batch: field name to one value per sample.

        Raises:
            SchemaError: a required field is absent, a field is not declared, or a value is not
                what its kind says.
        """
        check_batch(self, batch)


_PER_RESPONSE_TOKEN = (
    "loss_masks",
    "log_probs",
    "ref_log_probs",
    "rollout_log_probs",
    "teacher_log_probs",
    "values",
    "advantages",
    "returns",
    "kl",
    "entropy",
    "opd_reverse_kl",
)
_PER_SAMPLE = (
    "rewards",
    "raw_reward",
    "truncated",
    "round_number",
    "rollout_mask_sums",
    "max_seq_lens",
    "is_padding",
)
# Identifiers are metadata: a zero in a placeholder would pass for somebody else's.
_METADATA = (
    "uids",
    "trajectory_ids",
    "sample_indices",
    "rollout_ids",
    "source_names",
    "prompt",
    "metadata",
    "rollout_top_p_token_ids",
)

DEFAULT_SCHEMA = Schema(
    (
        Field("tokens", Kind.TOKENS, required=True),
        Field("total_lengths", Kind.PER_SAMPLE, required=True),
        Field("response_lengths", Kind.PER_SAMPLE, required=True),
        *(Field(name, Kind.PER_RESPONSE_TOKEN) for name in _PER_RESPONSE_TOKEN),
        *(Field(name, Kind.PER_SAMPLE) for name in _PER_SAMPLE),
        *(Field(name, Kind.METADATA) for name in _METADATA),
        Field("position_ids", Kind.POSITION_IDS),
        Field("multimodal_train_inputs", Kind.MULTIMODAL),
        # Rollout engines route no token after the last one.
        Field("rollout_routed_experts", Kind.ROUTED_EXPERTS, length_offset=-1),
        # Offsets into rollout_top_p_token_ids begin with a 0.
        Field("rollout_top_p_token_offsets", Kind.PER_RESPONSE_TOKEN, length_offset=1),
    )
)
"""Fields that slime's Megatron backend reads (``rollout_data``), and common ones of others."""
