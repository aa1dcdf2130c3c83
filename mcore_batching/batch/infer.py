"""The kind of an undeclared field, where the data of all samples leaves exactly one reading.

    total_lengths [5, 7], response_lengths [2, 7]
    values of 5 and 7 rows                    per token
    values of 2 and 7 rows                    per response token
    numbers, or tensors without dimensions    per sample
    strings, None, dicts of strings           metadata

Guarantees: a guess is never made. If every response is its whole sample, if there are no samples,
if integers might be position ids or routed experts, a `SchemaError` lists the readings left and
the line that declares each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mcore_batching.batch.checks import read_lengths
from mcore_batching.batch.errors import SchemaError
from mcore_batching.batch.fields import Field, Kind, declaration_line
from mcore_batching.batch.values import count_of, describe, is_integral, shape_of

_INFERRED = (Kind.PER_TOKEN, Kind.PER_RESPONSE_TOKEN, Kind.PER_SAMPLE, Kind.METADATA)


def infer_field(name: str, batch: Mapping[str, Any]) -> Field:
    """The declaration that the data of a batch leaves for an undeclared field.

    Args:
        name: key of the field.
        batch: field name to one value a sample, with ``total_lengths`` and ``response_lengths``.

    Raises:
        SchemaError: it leaves none or several, or one that must be declared.
    """
    total_lengths, response_lengths = read_lengths(batch)
    values = batch[name]
    count = count_of(values)
    if count != len(total_lengths):
        raise SchemaError(
            name,
            expected=f"a list of {len(total_lengths)} values, one a sample",
            found=describe(values) if count is None else f"{count} values",
        )
    readings = _readings(list(values), total_lengths, response_lengths)
    if len(readings) == 1 and readings[0] in _INFERRED:
        return Field(name, readings[0])
    left = readings or [Kind.METADATA]
    raise SchemaError(
        name,
        expected="a declared field, or values that leave exactly one reading",
        found=_found(count, values, readings),
        declaration=" or ".join(_line(name, kind, values, total_lengths) for kind in left),
    )


def _found(count: int, values: Any, readings: Sequence[Kind]) -> str:
    if not count:
        return "an undeclared field of no samples, which may be anything"
    example = f"{count} values such as {describe(values[0])}"
    if not readings:
        return (
            f"an undeclared field whose {example} fit no kind by their lengths (as metadata they "
            "would be carried along as they are)"
        )
    names = " or ".join(kind.value for kind in readings)
    return f"an undeclared field whose {example} may be {names}"


def _readings(
    values: Sequence[Any], total_lengths: Sequence[int], response_lengths: Sequence[int]
) -> list[Kind]:
    """The kinds that the values may be of."""
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
    readings = []
    if rows == list(total_lengths):
        readings.append(Kind.PER_TOKEN)
    if rows == list(response_lengths):
        readings.append(Kind.PER_RESPONSE_TOKEN)
    if integral and all(
        len(shape) == 2 and shape[1] == total
        for shape, total in zip(known, total_lengths, strict=True)
    ):
        readings.append(Kind.POSITION_IDS)
    if (
        integral
        and all(len(shape) == 3 for shape in known)
        and _routed_offset(rows, total_lengths) is not None
    ):
        readings.append(Kind.ROUTED_EXPERTS)
    return readings


def _is_text(value: Any) -> bool:
    if isinstance(value, Mapping):
        # An empty dict may be multimodal inputs, too.
        return bool(value) and all(isinstance(text, str) for pair in value.items() for text in pair)
    return value is None or isinstance(value, str)


def _routed_offset(rows: Sequence[int], total_lengths: Sequence[int]) -> int | None:
    """0 or -1, whichever explains the rows: rollout engines leave out the last token's."""
    for offset in (0, -1):
        if list(rows) == [max(0, total + offset) for total in total_lengths]:
            return offset
    return None


def _line(name: str, kind: Kind, values: Any, total_lengths: Sequence[int]) -> str:
    if kind is not Kind.ROUTED_EXPERTS or not total_lengths:
        return declaration_line(name, kind)
    rows = [(shape_of(value) or (0,))[0] for value in values]
    return declaration_line(name, kind, _routed_offset(rows, total_lengths) or 0)
