"""What each field of a rollout batch holds, so that nobody has to guess how to slice or fill it.

A batch is a dict of fields; a field is a list with one value a sample. The kind of a field says how
long each value is, how it is packed, and what its value in a fabricated sample is.

    schema = DEFAULT_SCHEMA.declare("entropies", Kind.PER_RESPONSE_TOKEN)
    schema = schema.resolve(batch)   # infers what is left, where the data has one reading
    schema.validate(batch)           # or a SchemaError that names key, sample and shapes

Guarantees
- A schema never changes; `declare` and `resolve` return new ones.
- An undeclared field gets a kind only if the data of all samples leaves exactly one.
- After `validate`, every field has one value a sample, each as long as its kind says.
- A field whose value is None for the whole batch is absent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from mcore_batching.batch.checks import check_batch
from mcore_batching.batch.errors import SchemaError
from mcore_batching.batch.fields import Field, Kind
from mcore_batching.batch.infer import infer_field


@dataclasses.dataclass(frozen=True, eq=False)
class Schema(Mapping[str, Field]):
    """Field names to their declarations.

    Attributes:
        fields: the declarations, one a name.

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
        """How many fields are declared."""
        return len(self._by_name)

    def declare(
        self, name: str, kind: Kind, *, length_offset: int = 0, required: bool = False
    ) -> Schema:
        """This schema with one more field, or with another declaration of one it has.

        Args:
            name: the field's key in a batch.
            kind: what one sample's value is.
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
            batch: field name to one value a sample.

        Returns:
            the schema with the inferred fields added; itself if all were declared.

        Raises:
            SchemaError: an undeclared field has no reading or more than one; the message lists
                those left and the line that declares each.
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
            batch: field name to one value a sample.

        Raises:
            SchemaError: a required field is absent, a field is not declared, or a value is not
                what its kind says.
        """
        check_batch(self, batch)
