"""Inference of an undeclared field's kind, where the data fits exactly one.

    total_lengths [5, 7], response_lengths [2, 7]
    values of 5 and 7 rows                    per token
    values of 2 and 7 rows                    per response token
    numbers, or tensors without dimensions    per sample
    strings, None, dicts of strings           metadata

Nothing is guessed. Where several kinds fit, a `SchemaError` lists them with the line that declares
each.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from mcore_batching.batch.errors import SchemaError
from mcore_batching.batch.fields import (
    Field,
    Kind,
    checked_values,
    read_lengths,
    require_one_per_sample,
    unmet,
)
from mcore_batching.batch.values import describe, shape_of, tensor_of

_INFERRED = {Kind.PER_TOKEN, Kind.PER_RESPONSE_TOKEN, Kind.PER_SAMPLE, Kind.METADATA}


def infer_field(name: str, batch: Mapping[str, Any]) -> Field:
    """The declaration of an undeclared field, from its values in a batch with its lengths; a
    `SchemaError` if they fit no kind, several, or one that must be declared."""
    lengths = read_lengths(batch)
    values = _values_of(name, batch)
    samples = list(zip(values, *lengths, strict=True))
    fits = {
        field: sum(_is_one(field, *sample) for sample in samples)
        for field in _candidates(name, values)
    }
    # All kinds that fit, not the first: a declaration decides.
    fitting = [field for field, count in fits.items() if count == len(values)]
    if len(fitting) == 1 and fitting[0].kind in _INFERRED:
        return fitting[0]
    most = max(fits, key=fits.__getitem__, default=None)
    # "Sample 7 has 5 rows" helps more than "no kind fits" where the others are plain. More than
    # half, since two equal halves would blame either.
    if not fitting and most is not None and 2 * fits[most] > len(values):
        checked_values(most, values, *lengths)
    offered = fitting or [Field(name, Kind.METADATA)]
    raise SchemaError(
        name,
        expected="a declared field, or values of one kind",
        found=_found(values, fitting),
        declaration=" or ".join(dict.fromkeys(field.declaration for field in offered)),
    )


def _values_of(name: str, batch: Mapping[str, Any]) -> list[Any]:
    """One per sample, lists and arrays of numbers as tensors."""
    require_one_per_sample(name, batch[name], len(batch["total_lengths"]))
    values = list(batch[name])
    # Lists that cannot become tensors stay lists, which fit no kind.
    with contextlib.suppress(SchemaError):
        values = [tensor_of(name, index, value) for index, value in enumerate(values)]
    return values


def _found(values: Any, fitting: Sequence[Field]) -> str:
    if not len(values):
        return "an undeclared field of no samples, which may be any kind"
    example = f"{len(values)} values such as {describe(values[0])}"
    if not fitting:
        return f"an undeclared field: {example} fit no kind (metadata takes any value)"
    names = " or ".join(field.kind.value for field in fitting)
    return f"an undeclared field: {example} may be {names}"


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


def _is_one(field: Field, value: Any, total_length: int, response_length: int) -> bool:
    """True if a value may be of a field; tensors per sample must be declared."""
    is_number = shape_of(value) == ()
    if field.kind is Kind.PER_SAMPLE or is_number:
        return is_number and field.kind is Kind.PER_SAMPLE
    return unmet(field, value, total_length, response_length) is None


def _is_text(value: Any) -> bool:
    if isinstance(value, Mapping):
        # An empty dict may be multimodal inputs, too.
        return bool(value) and all(isinstance(text, str) for pair in value.items() for text in pair)
    return value is None or isinstance(value, str)
