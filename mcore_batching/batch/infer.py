"""Inference of an undeclared field's kind, where the data fits exactly one.

    total_lengths [5, 7], response_lengths [2, 7]
    values of 5 and 7 rows                    per token
    values of 2 and 7 rows                    per response token
    numbers, or tensors without dimensions    per sample
    strings, None, dicts of strings           metadata

No guess is ever made. If every response is its whole sample, if there are no samples, if integers
might be position ids or routed experts, a `SchemaError` lists the kinds that fit and the line that
declares each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mcore_batching.batch.errors import SchemaError
from mcore_batching.batch.field_checks import read_lengths, require_one_per_sample
from mcore_batching.batch.fields import Field, Kind, declaration_line
from mcore_batching.batch.value_shapes import describe, is_integral, shape_of

_INFERRED = (Kind.PER_TOKEN, Kind.PER_RESPONSE_TOKEN, Kind.PER_SAMPLE, Kind.METADATA)


def infer_field(name: str, batch: Mapping[str, Any]) -> Field:
    """The declaration of an undeclared field, from its values in a batch.

    Args:
        name: key of the field.
        batch: field name to one value per sample, with ``total_lengths`` and ``response_lengths``.

    Raises:
        SchemaError: the values fit no kind, several, or one that must be declared.
    """
    total_lengths, response_lengths = read_lengths(batch)
    values = batch[name]
    require_one_per_sample(name, values, len(total_lengths))
    fitting = _fitting_kinds(list(values), total_lengths, response_lengths)
    if len(fitting) == 1 and fitting[0] in _INFERRED:
        return Field(name, fitting[0])
    raise SchemaError(
        name,
        expected="a declared field, or values that fit exactly one kind",
        found=_found(values, fitting),
        declaration=" or ".join(
            _declaration(name, kind, values, total_lengths) for kind in fitting or [Kind.METADATA]
        ),
    )


def _found(values: Any, fitting: Sequence[Kind]) -> str:
    if not len(values):
        return "an undeclared field of no samples, which may be anything"
    example = f"{len(values)} values such as {describe(values[0])}"
    if not fitting:
        return (
            f"an undeclared field whose {example} fit no kind by their lengths (as metadata they "
            "would be carried along as they are)"
        )
    names = " or ".join(kind.value for kind in fitting)
    return f"an undeclared field whose {example} may be {names}"


def _fitting_kinds(
    values: Sequence[Any], total_lengths: Sequence[int], response_lengths: Sequence[int]
) -> list[Kind]:
    """Kinds that the values may be of."""
    if not values:
        return [kind for kind in Kind if kind is not Kind.TOKENS]
    if all(_is_text(value) for value in values):
        return [Kind.METADATA]
    if all(value is None or isinstance(value, Mapping) for value in values):
        return [Kind.MULTIMODAL, Kind.METADATA]
    shapes = [shape_of(value) for value in values]
    if any(shape is None for shape in shapes):
        return []
    known = [shape for shape in shapes if shape is not None]
    if all(shape == () for shape in known):
        return [Kind.PER_SAMPLE]
    if any(shape == () for shape in known):
        return []
    rows = [shape[0] for shape in known]
    integral = all(is_integral(value) for value in values)
    fitting = []
    if rows == list(total_lengths):
        fitting.append(Kind.PER_TOKEN)
    if rows == list(response_lengths):
        fitting.append(Kind.PER_RESPONSE_TOKEN)
    if integral and all(
        len(shape) == 2 and shape[1] == total
        for shape, total in zip(known, total_lengths, strict=True)
    ):
        fitting.append(Kind.POSITION_IDS)
    if (
        integral
        and all(len(shape) == 3 for shape in known)
        and _routed_offset(rows, total_lengths) is not None
    ):
        fitting.append(Kind.ROUTED_EXPERTS)
    return fitting


def _is_text(value: Any) -> bool:
    if isinstance(value, Mapping):
        # An empty dict may be multimodal inputs, too.
        return bool(value) and all(isinstance(text, str) for pair in value.items() for text in pair)
    return value is None or isinstance(value, str)


def _routed_offset(rows: Sequence[int], total_lengths: Sequence[int]) -> int | None:
    """0, or -1 where the last token's row is left out, as rollout engines do; None if neither."""
    for offset in (0, -1):
        if list(rows) == [max(0, total + offset) for total in total_lengths]:
            return offset
    return None


def _declaration(name: str, kind: Kind, values: Any, total_lengths: Sequence[int]) -> str:
    if kind is not Kind.ROUTED_EXPERTS or not total_lengths:
        return declaration_line(name, kind)
    rows = [(shape_of(value) or (0,))[0] for value in values]
    return declaration_line(name, kind, _routed_offset(rows, total_lengths) or 0)
