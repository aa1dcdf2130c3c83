"""`Columns`: the fields of samples end to end, one flat tensor and offsets for each.

    columns = Columns.of(schema.validate({"tokens": [[1, 2, 3], [4, 5]], ...}), schema)
    columns.rows("tokens").values     1 2 3 4 5 0     starts 0 3, lengths 3 2
    columns["tokens"]                 [1 2 3], [4 5]  views, made when they are first read

The last row of a flat tensor is of zeros: a place that stands for padding, so that a field of a
packed row is one gather. Fields without rows (numbers, multimodal inputs, metadata) stay lists, and
so do those that one flat tensor cannot hold as they are: of several types, devices or trailing
shapes, with a gradient, sparse, of a subclass.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mcore_batching.batch.errors import BatchError
from mcore_batching.batch.fields.fields import WITHOUT_ROWS, Field, Kind, num_rows
from mcore_batching.batch.fields.schema import Schema
from mcore_batching.batch.row_index import Span


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """One field of all samples.

    Attributes:
        values: ``[rows + 1, ...]``, sample after sample, and a row of zeros; of position ids of
            several axes ``[tokens + 1, axes]``.
        span: rows of each sample.
    """

    values: Tensor
    span: Span


class Columns(Mapping[str, list[Any]]):
    """Validated fields of samples; a mapping from their names to one value per sample.

    Attributes:
        total_lengths: tokens of each sample.
        response_lengths: tokens of each sample's response.
    """

    def __init__(
        self,
        schema: Schema,
        total_lengths: list[int],
        response_lengths: list[int],
        flat: Mapping[str, Tensor],
        kept: Mapping[str, list[Any]],
        spans: dict[tuple[bool, int], Span] | None = None,
    ) -> None:
        self.total_lengths, self.response_lengths = total_lengths, response_lengths
        self._schema, self._flat, self._kept = schema, flat, kept
        self._spans = {} if spans is None else spans
        self._views: dict[str, list[Any]] = {}

    @classmethod
    def of(cls, fields: Mapping[str, list[Any]], schema: Schema) -> Columns:
        """Copies of values as `Schema.validate` returns them."""
        flat: dict[str, Tensor] = {}
        kept: dict[str, list[Any]] = {}
        for name, values in fields.items():
            joined = _joined(schema[name], values)
            if joined is None:
                kept[name] = list(values)
            else:
                flat[name] = joined
        return cls(schema, fields["total_lengths"], fields["response_lengths"], flat, kept)

    def __getitem__(self, name: str) -> list[Any]:
        """One value per sample: views, tensors that are kept as they were given, or numbers."""
        if name in self._kept:
            return self._kept[name]
        if name not in self._views:
            values, field = self._flat[name], self._schema[name]
            counts = self._span(field).counts
            # unsafe_: views without a shared version counter. Otherwise autograd would take a
            # change in place of one sample's values for a change of all.
            *views, _ = torch.unsafe_split_with_sizes(values, [*counts, 1])
            if field.kind is Kind.POSITION_IDS and values.dim() > 1:
                views = [view.movedim(0, -1) for view in views]
            self._views[name] = views
        return self._views[name]

    def __iter__(self) -> Iterator[str]:
        yield from self._flat
        yield from self._kept

    def __len__(self) -> int:
        return len(self._flat) + len(self._kept)

    def rows(self, name: str) -> Rows:
        """A field with rows, flat, of the type that torch promotes those of all samples to.

        Raises:
            BatchError: trailing shapes differ between samples, or types that have none in common.
        """
        field = self._schema[name]
        flat = self._flat.get(name)
        if flat is None:
            values = [_rows_first(field, value) for value in self._kept[name]]
            if len({value.shape[1:] for value in values if value.shape[0]}) > 1:
                raise self.unfit(name)
            device = values[0].device
            same = _of_one_type(name, [value.to(device) for value in values])
            flat = _with_padding(same)
        return Rows(flat, self._span(field))

    @property
    def token_span(self) -> Span:
        """Tokens of each sample."""
        return self._span_of(is_response=False)

    @property
    def response_span(self) -> Span:
        """Response tokens of each sample."""
        return self._span_of(is_response=True)

    def unfit(self, name: str) -> BatchError:
        """The error for a field that no row can be made of."""
        return BatchError(
            f"field {name!r} cannot be packed: expected rows of one shape, at most one per token "
            f"of {self.total_lengths}, found {[list(each.shape) for each in self[name]]}; read "
            f"micro_batch[{name!r}]"
        )

    def _span(self, field: Field) -> Span:
        is_response = field.kind is Kind.PER_RESPONSE_TOKEN
        return self._span_of(is_response=is_response, offset=field.length_offset)

    def _span_of(self, *, is_response: bool, offset: int = 0) -> Span:
        key = (is_response, offset)
        if key not in self._spans:
            own = self.response_lengths if is_response else self.total_lengths
            self._spans[key] = Span([num_rows(length, offset) for length in own])
        return self._spans[key]

    def replaced(self, name: str, values: list[Any]) -> Columns:
        """These fields with a list in place of one of them."""
        flat = {key: value for key, value in self._flat.items() if key != name}
        return self._of(flat, {**self._kept, name: values})

    def only(self, names: Collection[str]) -> Columns:
        """Some of the fields."""
        return self._of(
            {name: value for name, value in self._flat.items() if name in names},
            {name: value for name, value in self._kept.items() if name in names},
        )

    def mapped(self, change: Callable[[Any], Any]) -> Columns:
        """These fields with `change` made to each flat tensor, and to each list of others."""
        return self._of(
            {name: change(value) for name, value in self._flat.items()},
            {name: change(value) for name, value in self._kept.items()},
        )

    def _of(self, flat: Mapping[str, Tensor], kept: Mapping[str, list[Any]]) -> Columns:
        lengths = self.total_lengths, self.response_lengths
        return Columns(self._schema, *lengths, flat, kept, self._spans)


def _joined(field: Field, values: Sequence[Any]) -> Tensor | None:
    """The field as one flat tensor; None if that would not hold all that the values are."""
    if field.kind in WITHOUT_ROWS or not all(_is_plain(value) for value in values):
        return None
    values = [_rows_first(field, value) for value in values]
    # What was an empty list shows neither type nor trailing shape.
    telling = [value for value in values if value.shape[0]] or values[:1]
    if len({(value.dtype, value.device, value.shape[1:]) for value in telling}) != 1:
        return None
    return _with_padding(telling)


def _is_plain(value: Any) -> bool:
    return (
        type(value) is Tensor
        and value.layout is torch.strided
        and not (value.requires_grad or value.is_nested or value.is_quantized)
    )


def _rows_first(field: Field, value: Tensor) -> Tensor:
    # [axes, tokens] -> [tokens, axes]
    return value.movedim(-1, 0) if field.kind is Kind.POSITION_IDS else value


def _with_padding(rows: Sequence[Tensor]) -> Tensor:
    # An empty tensor of another trailing shape takes no part.
    filled = [each for each in rows if each.shape[0]] or rows[:1]
    return torch.cat([*filled, filled[0].new_zeros((1, *filled[0].shape[1:]))])


def _of_one_type(name: str, rows: Sequence[Tensor]) -> list[Tensor]:
    # A list of integers is int64 beside the next sample's fractions, which it would cut off. What
    # was an empty list says nothing of its type.
    kinds = list(dict.fromkeys(row.dtype for row in rows if row.numel())) or [rows[0].dtype]
    try:
        common = functools.reduce(torch.promote_types, kinds)
    except RuntimeError as error:  # types of 8 bits have none with others
        raise BatchError(
            f"field {name!r} has samples of {' and '.join(map(str, kinds))}, which have no common "
            "type; give all the same"
        ) from error
    return [row.to(common) for row in rows]
