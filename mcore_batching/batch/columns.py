"""`Columns`: the fields of samples end to end, one flat tensor and offsets for each.

    columns = Columns.read({"tokens": [[1, 2, 3], [4, 5]], ...}, schema)
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
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mcore_batching.batch.errors import BatchError
from mcore_batching.batch.fields.field_checks import checked_values
from mcore_batching.batch.fields.fields import INTEGRAL, WITHOUT_ROWS, Field, Kind, num_rows
from mcore_batching.batch.fields.schema import Schema
from mcore_batching.batch.fields.values import UNSIGNED
from mcore_batching.batch.row_index import Span
from mcore_batching.batch.rows.pinned_buffer import on_host


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


_LAID_OUT = (Kind.TOKENS, Kind.POSITION_IDS)
"""Kinds of fields that rows are laid out of, which the host does."""
_DIMENSIONS = {Kind.TOKENS: {1}, Kind.ROUTED_EXPERTS: {3}, Kind.POSITION_IDS: {1, 2}}


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
        flat: dict[str, Tensor],
        kept: dict[str, list[Any]],
        spans: dict[tuple[bool, int], Span] | None = None,
    ) -> None:
        self.total_lengths, self.response_lengths = total_lengths, response_lengths
        self._schema, self._flat, self._kept = schema, flat, kept
        self._spans = {} if spans is None else spans
        self._views: dict[str, list[Any]] = {}

    @classmethod
    def of(cls, fields: Mapping[str, list[Any]], schema: Schema) -> Columns:
        """Copies of values as `Schema.validate` returns them."""
        made = cls(schema, fields["total_lengths"], fields["response_lengths"], {}, {})
        for name, values in fields.items():
            made._add(name, values)
        return made

    def _add(self, name: str, values: list[Any]) -> None:
        joined = _joined(self._schema[name], values)
        if joined is None:
            self._kept[name] = values
        else:
            self._flat[name] = joined

    @classmethod
    def read(cls, batch: Mapping[str, Any], schema: Schema) -> Columns:
        """Copies of the fields of a batch that are not None, checked against their declarations.

        Raises:
            SchemaError: as `Schema.validate`.
        """
        totals, responses = schema.lengths_of(batch)
        lengths = {"total_lengths": totals, "response_lengths": responses}
        made = cls(schema, totals, responses, {}, lengths)
        return made.extended({k: v for k, v in batch.items() if k not in lengths}, schema)

    def extended(self, fields: Mapping[str, Any], schema: Schema) -> Columns:
        """These with further fields of the same samples, or with others in place of some.

        Raises:
            SchemaError: as `Schema.validate`.
        """
        flat, kept = dict(self._flat), dict(self._kept)
        for name, values in fields.items():
            if values is None:  # absent for the whole batch
                continue
            joined, checked = self._checked(schema.declared(name), values)
            flat.pop(name, None)
            kept.pop(name, None)
            if joined is None:
                kept[name] = checked
            else:
                flat[name] = joined
        return Columns(schema, self.total_lengths, self.response_lengths, flat, kept, self._spans)

    def _checked(self, field: Field, values: Any) -> tuple[Tensor | None, list[Any]]:
        """The field as one flat tensor, or None and its values as `Schema.validate` gives them."""
        if field.kind not in WITHOUT_ROWS and isinstance(values, list | tuple):
            joined = _joined(field, values)
            # Value by value only where they differ, or do not fit.
            if joined is not None and self._fits(field, values, joined):
                return joined, []
        checked = checked_values(field, values, self.total_lengths, self.response_lengths)
        return _joined(field, checked), checked

    def _fits(self, field: Field, values: Sequence[Tensor], joined: Tensor) -> bool:
        """True if `checked_values` would find that values meet the field's declaration."""
        axis = -1 if field.kind is Kind.POSITION_IDS else 0
        if [value.shape[axis] for value in values] != self._span(field).counts:
            return False
        dtype, dims = joined.dtype, {value.dim() for value in values}
        # Of all values, empty ones too, which are not among what is joined.
        if any(each in UNSIGNED or each.is_complex for each in {value.dtype for value in values}):
            return False
        if any(value.is_meta for value in values):
            return False
        if field.kind in INTEGRAL and (dtype.is_floating_point or dtype is torch.bool):
            return False
        if field.name == "loss_masks" and field.kind is Kind.PER_RESPONSE_TOKEN:
            return dims == {1} and bool(((joined >= 0) & (joined < math.inf)).all())
        return field.name != "loss_masks" and dims <= _DIMENSIONS.get(field.kind, dims)

    def __getitem__(self, name: str) -> list[Any]:
        """One value per sample: views, tensors that are kept as they were given, or numbers. A list
        of the caller's own: what is put into it changes no column."""
        if name in self._kept:
            values = self._kept[name]
            return values[:] if isinstance(values, list) else values
        if name not in self._views:
            flat, field = self._flat[name], self._schema[name]
            counts = self._span(field).counts
            # unsafe_: views without a shared version counter. Otherwise autograd would take a
            # change in place of one sample's values for a change of all.
            *views, _ = torch.unsafe_split_with_sizes(flat, [*counts, 1])
            if field.kind is Kind.POSITION_IDS and flat.dim() > 1:
                views = [view.movedim(0, -1) for view in views]
            self._views[name] = views
        return self._views[name][:]

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

    def __getstate__(self) -> dict[str, Any]:
        """What travels to other ranks: no views, and no offsets, which follow from the lengths."""
        return vars(self) | {"_spans": {}, "_views": {}}

    def taken(self, samples: Sequence[int]) -> Columns:
        """The fields of some samples, copied, in this order."""
        chosen = torch.tensor(samples, dtype=torch.int64, device="cpu")
        places: dict[Span, Tensor] = {}
        flat = {}
        for name, values in self._flat.items():
            span = self._span(self._schema[name])
            if span not in places:
                places[span] = span.places(chosen)
            flat[name] = values.index_select(0, places[span].to(values.device))
        return Columns(
            self._schema,
            [self.total_lengths[i] for i in samples],
            [self.response_lengths[i] for i in samples],
            flat,
            {name: [values[i] for i in samples] for name, values in self._kept.items()},
        )

    def followed_by(self, others: Columns) -> Columns:
        """The samples of both; their fields have the same names."""
        totals = self.total_lengths + others.total_lengths
        responses = self.response_lengths + others.response_lengths
        made = Columns(self._schema, totals, responses, {}, {})
        for name in self:
            own, theirs = self._flat.get(name), others._flat.get(name)
            if own is not None and theirs is not None and _kind_of(own) == _kind_of(theirs):
                made._flat[name] = torch.cat([own[:-1], theirs])
            else:
                made._add(name, [*self[name], *others[name]])
        return made

    def on_host(self) -> Columns:
        """These fields with what rows are laid out of on the host, and all that is flat."""
        kept = {
            name: on_host(values)
            if self._schema[name].kind in _LAID_OUT or name in ("loss_masks", "is_padding")
            else values
            for name, values in self._kept.items()
        }
        return self._of({name: value.cpu() for name, value in self._flat.items()}, kept)

    def first(self, name: str) -> list[Any]:
        """The value of the first sample, in a list that is empty if there are no samples."""
        if name in self._kept or not self.total_lengths:
            return self[name][:1]
        field, count = self._schema[name], self._span(self._schema[name]).counts[0]
        value = self._flat[name][:count]
        return [value.movedim(0, -1) if field.kind is Kind.POSITION_IDS else value]

    def only(self, names: Collection[str]) -> Columns:
        """Some of the fields."""
        return self._of(
            {name: value for name, value in self._flat.items() if name in names},
            {name: value for name, value in self._kept.items() if name in names},
        )

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Columns:
        """These fields with `change` made to each flat tensor, and to all others in them."""
        flat = {name: change(value) for name, value in self._flat.items()}
        return self._of(flat, map_tensors(self._kept, change))

    def with_copies(self) -> Columns:
        """These fields with copies of the tensors that are not flat, which are the caller's own."""
        return self._of(self._flat, map_tensors(self._kept, torch.clone))

    @property
    def always_fits(self) -> bool:
        """True if `pack` refuses no row of any of these samples, unless it refuses all."""
        kinds = {self._schema[name].kind for name in self._kept}
        return "loss_masks" not in self._kept and not kinds & {*_LAID_OUT}

    @property
    def flat_names(self) -> list[str]:
        """The fields that are one flat tensor each."""
        return list(self._flat)

    def _of(self, flat: dict[str, Tensor], kept: dict[str, list[Any]]) -> Columns:
        lengths = self.total_lengths, self.response_lengths
        return Columns(self._schema, *lengths, flat, kept, self._spans)


def _joined(field: Field, values: Sequence[Any]) -> Tensor | None:
    """The field as one flat tensor; None if that would not hold all that the values are."""
    if field.kind in WITHOUT_ROWS or {*map(type, values)} != {Tensor}:
        return None
    try:
        shapes = [value.shape for value in values]
    except RuntimeError:  # nested tensors have none
        return None
    if not all(shapes):  # numbers
        return None
    rows = [_rows_first(field, value) for value in values]
    # What was an empty list shows neither type nor trailing shape.
    filled = [each for each in rows if each.shape[0]] or rows[:1]
    # A graph would be lost where gradients are off.
    if len({_kind_of(each) for each in filled}) > 1 or any(each.requires_grad for each in filled):
        return None
    is_held = filled[0].layout is torch.strided and not filled[0].is_quantized
    return _with_padding(filled) if is_held else None


def _kind_of(value: Tensor) -> tuple[torch.dtype, torch.layout, torch.device, torch.Size]:
    return value.dtype, value.layout, value.device, value.shape[1:]


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


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A value with `change` made to the tensors in its dicts, lists and tuples."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: map_tensors(item, change) for key, item in value.items()}
    if type(value) in (list, tuple):
        if value and isinstance(value[0], int | float):  # lengths, offsets: nothing to look for
            return value
        return type(value)(map_tensors(item, change) for item in value)
    return value
