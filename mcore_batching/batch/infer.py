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
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from mcore_batching.batch.errors import SchemaError
from mcore_batching.batch.fields import (
    Field,
    Kind,
    checked_values,
    declaration_line,
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
    fitting = _fitting_kinds(values, *lengths)
    if len(fitting) == 1 and _INFERRED.issuperset(fitting):
        return Field(name, *fitting)
    if not fitting:
        _require_no_outlier(name, values, *lengths)
    raise SchemaError(
        name,
        expected="a declared field, or values of one kind",
        found=_found(values, fitting),
        declaration=" or ".join(
            declaration_line(name, *each) for each in (fitting or {Kind.METADATA: 0}).items()
        ),
    )


def _values_of(name: str, batch: Mapping[str, Any]) -> list[Any]:
    """One per sample, lists and arrays of numbers as tensors."""
    require_one_per_sample(name, batch[name], len(batch["total_lengths"]))
    values = list(batch[name])
    # Lists that cannot become tensors stay lists, which fit no kind.
    with contextlib.suppress(SchemaError):
        values = [tensor_of(name, index, value) for index, value in enumerate(values)]
    return values


def _require_no_outlier(
    name: str,
    values: Sequence[Any],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
) -> None:
    """Refuse the first value that does not fit the kind that more than half of them do."""
    # "Sample 7 has 5 rows" helps more than "no kind fits" where the others are plain. More than
    # half, since two equal halves would blame either.
    shapes = [shape_of(value) for value in values]
    rows = [shape[0] if shape else None for shape in shapes]  # None of a number
    lengths = {Kind.PER_TOKEN: total_lengths, Kind.PER_RESPONSE_TOKEN: response_lengths}
    fits = {
        kind: sum(own == length for own, length in zip(rows, of_kind, strict=True))
        for kind, of_kind in lengths.items()
    }
    fits[Kind.PER_SAMPLE] = shapes.count(())
    kind = max(fits, key=fits.__getitem__)
    if 2 * fits[kind] > len(shapes):
        checked_values(Field(name, kind), values, total_lengths, response_lengths)


def _found(values: Any, fitting: Collection[Kind]) -> str:
    if not len(values):
        return "an undeclared field of no samples, which may be any kind"
    example = f"{len(values)} values such as {describe(values[0])}"
    if not fitting:
        return f"an undeclared field whose {example} fit no kind (metadata takes any value)"
    names = " or ".join(kind.value for kind in fitting)
    return f"an undeclared field whose {example} may be {names}"


def _fitting_kinds(
    values: Sequence[Any], total_lengths: Sequence[int], response_lengths: Sequence[int]
) -> dict[Kind, int]:
    """The kinds that these values match, each with its ``length_offset``."""
    if not values:  # of no samples: any kind that another field than `tokens` may have
        return dict.fromkeys((kind for kind in Kind if kind is not Kind.TOKENS), 0)
    if all(_is_text(value) for value in values):
        return {Kind.METADATA: 0}
    if all(value is None or isinstance(value, Mapping) for value in values):
        return {Kind.MULTIMODAL: 0, Kind.METADATA: 0}  # both take dicts
    shapes = [shape_of(value) for value in values]
    if all(shape == () for shape in shapes):
        return {Kind.PER_SAMPLE: 0}
    # Objects, and numbers beside rows, fit none of these: they are never guessed to be metadata.
    candidates = [Field("", Kind.PER_TOKEN), Field("", Kind.PER_RESPONSE_TOKEN)]
    # Integers with a shape of their own; the number of rows decides all else.
    dimensions = {len(shape or ()) for shape in shapes}
    if dimensions == {2}:
        candidates.append(Field("", Kind.POSITION_IDS))
    if dimensions == {3}:
        # Rollout engines route no token after the last one, so they give one row less.
        candidates += [Field("", Kind.ROUTED_EXPERTS, length_offset=n) for n in (-1, 0)]
    samples = list(zip(values, total_lengths, response_lengths, strict=True))
    # All kinds that fit, not the first: a declaration decides.
    return {
        field.kind: field.length_offset
        for field in candidates
        if all(unmet(field, *sample) is None for sample in samples)
    }


def _is_text(value: Any) -> bool:
    if isinstance(value, Mapping):
        # An empty dict may be multimodal inputs, too.
        return bool(value) and all(isinstance(text, str) for pair in value.items() for text in pair)
    return value is None or isinstance(value, str)
