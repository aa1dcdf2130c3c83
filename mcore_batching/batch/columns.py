"""`Columns`: the fields of samples end to end, one flat tensor and offsets for each.

    columns = Columns.read({"tokens": [[1, 2, 3], [4, 5]], ...}, schema)
    columns.flat("tokens")      1 2 3 4 5 0     on the host
    columns.span("tokens")      starts 0 3, lengths 3 2, end 5
    columns["tokens"]           [1 2 3], [4 5]  views, made when they are first read
    columns.taken([1])          the same flat tensors, starts 3, lengths 2

The last row of a flat tensor is of zeros: a place that stands for padding, so that a field of a
packed row is one gather. Fields without rows (numbers, multimodal inputs, metadata) are lists.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mcore_batching.batch.errors import SchemaError
from mcore_batching.batch.fields import (
    WITHOUT_ROWS,
    Field,
    Kind,
    checked_values,
    declaration_line,
    is_loss_mask,
    unmet,
)
from mcore_batching.batch.row_index import Span, integers
from mcore_batching.batch.schema import Schema, lengths_of
from mcore_batching.batch.values import UNSIGNED, all_within, joined


class Columns(Mapping[str, list[Any]]):
    """Validated fields of samples; a mapping from their names to one value per sample.

    Attributes:
        schema: the kinds of the fields.
        fields: flat tensors and lists, of all samples that these were `taken` from.
        total_lengths: tokens of each sample.
        response_lengths: tokens of each sample's response.
    """

    def __init__(
        self,
        schema: Schema,
        fields: Mapping[str, Tensor | list[Any]],
        total_lengths: list[int],
        response_lengths: list[int],
    ) -> None:
        self.total_lengths, self.response_lengths = total_lengths, response_lengths
        self.schema, self.fields = schema, fields
        self._spans: dict[tuple[bool, int], Span] = {}
        self._views: dict[str, list[Any]] = {}
        self._sums: dict[str, Tensor] = {}
        # Columns of all samples of the flat tensors, and which of them these are; None: these are
        # all. A reference to themselves would keep the tensors until the garbage collector runs.
        self._source: tuple[Columns, list[int]] | None = None

    @classmethod
    def read(cls, batch: Mapping[str, Any], schema: Schema) -> Columns:
        """Copies of the fields of a batch that are not None, checked against their declarations.

        Raises:
            SchemaError: as `Schema.validate`, or a field's rows are of different shapes, or of
                types that have none in common.
        """
        lengths = lengths_of(batch, schema)
        return cls(schema, {}, *lengths.values()).extended({**batch, **lengths}, schema)

    def extended(self, fields: Mapping[str, Any], schema: Schema) -> Columns:
        """These with further fields of the same samples, or with others in place of some.

        Raises:
            SchemaError: as `read`.
        """
        columns = dict[str, Tensor | list[Any]]()
        more = Columns(schema, columns, self.total_lengths, self.response_lengths)
        for name, values in fields.items():
            if values is not None:
                field = schema.declared(name)
                columns[name] = more._column(field, values)
                if is_loss_mask(field):  # every step needs them, the first while the device idles
                    more.sums(name)
        return self.beside(more)

    def _column(self, field: Field, values: Any) -> Tensor | list[Any]:
        """Copies of a field's values: one flat tensor, or a list if they have no rows."""
        if field.kind in WITHOUT_ROWS:
            checked = checked_values(field, values, self.total_lengths, self.response_lengths)
            copies: list[Any] = map_tensors(checked, torch.clone)
            return copies
        flat = self._joined_at_once(field, values)
        # One by one only to name one that does not fit, or to make the others fit.
        if flat is None:
            checked = checked_values(field, values, self.total_lengths, self.response_lengths)
            if field.kind is Kind.POSITION_IDS:  # [axes, tokens] -> [tokens, axes]
                checked = [value.movedim(-1, 0) for value in checked]
            return _joined(field, checked)
        return flat

    def _joined_at_once(self, field: Field, values: Any) -> Tensor | None:
        """The rows of tensors that differ in their lengths alone, and fit, and one row of zeros;
        None if they may be others. In few operations on each: rollouts have thousands."""
        if not isinstance(values, list | tuple) or {*map(type, values)} != {Tensor}:
            return None
        first, dtypes = values[0], {each.dtype for each in values}
        has_axes = field.kind is Kind.POSITION_IDS and first.ndim > 1
        if len(dtypes) > 1 or not dtypes.isdisjoint(UNSIGNED) or has_axes or not first.ndim:
            return None
        try:
            flat = joined([*values, first.new_zeros((1, *first.shape[1:]))])
        except RuntimeError:  # of several devices, layouts or trailing shapes
            return None
        rows = [each.shape[0] for each in values]
        if rows != self.span(field.name).counts:
            return None
        at = rows.index(max(rows))
        # What holds of the longest holds of all; without elements it might be of any type.
        lengths = self.total_lengths[at], self.response_lengths[at]
        if not values[at].numel() or unmet(field, values[at], *lengths) is not None:
            return None
        return None if is_loss_mask(field) and not all_within(flat, math.inf) else flat

    def beside(self, others: Columns) -> Columns:
        """These fields and others of the same samples, which take the place of their own.

        Raises:
            SchemaError: two fields are positions.
        """
        lengths = self.total_lengths, self.response_lengths
        own, others = self.compact(), others.compact()
        made = Columns(others.schema, {**own.fields, **others.fields}, *lengths)
        known = {name: sums for name, sums in own._sums.items() if name not in others}
        made._sums = known | others._sums
        positions = [name for name in made if made.schema[name].kind is Kind.POSITION_IDS]
        if len(positions) > 1:
            raise SchemaError(
                positions[1],
                expected="one field of kind POSITION_IDS in a batch",
                found=f"{len(positions)}: {', '.join(positions)}",
            )
        return made

    def __getitem__(self, name: str) -> list[Any]:
        """One value per sample: views, or what stands in the list. A list of the caller's own: what
        is put into it changes no column."""
        if self._source is not None:
            source, samples = self._source
            values = source[name]
            return [values[i] for i in samples]
        field = self.fields[name]
        if isinstance(field, list):
            return field[:]
        if name not in self._views:
            # unsafe_: views without a shared version counter. Otherwise autograd would take a
            # change in place of one sample's values for a change of all.
            *views, _ = torch.unsafe_split_with_sizes(field, [*self.span(name).counts, 1])
            if self.schema[name].kind is Kind.POSITION_IDS and field.dim() > 1:
                views = [view.movedim(0, -1) for view in views]
            self._views[name] = views
        return self._views[name][:]

    def __iter__(self) -> Iterator[str]:
        return iter(self.fields)

    def __contains__(self, name: object) -> bool:
        return name in self.fields  # without views, which `Mapping` would make to find out

    def __len__(self) -> int:
        return len(self.fields)

    def flat(self, name: str) -> Tensor:
        """A field with rows of all samples from which these were taken, and a row of zeros:
        ``[rows + 1, ...]``; of position ids of several axes ``[tokens + 1, axes]``."""
        values = self.fields[name]
        assert isinstance(values, Tensor)
        return values

    def span(self, name: str) -> Span:
        """Places of these samples' rows in `flat`."""
        field = self.schema[name]
        return self._span_of(field.kind is Kind.PER_RESPONSE_TOKEN, field.length_offset)

    @property
    def position_ids(self) -> str | None:
        """The field that has the tokens' positions; None: they are counted."""
        kinds = {self.schema[name].kind: name for name in self.fields}
        return kinds.get(Kind.POSITION_IDS)

    @property
    def token_span(self) -> Span:
        """Places of these samples' tokens in a field with one row for each token."""
        return self._span_of(False, 0)

    @property
    def response_span(self) -> Span:
        """Places of their response tokens in a field with one row for each response token."""
        return self._span_of(True, 0)

    def _span_of(self, is_response: bool, offset: int) -> Span:
        key = is_response, offset
        if key not in self._spans:
            own = self.response_lengths if is_response else self.total_lengths
            counts = [max(0, each + offset) for each in own] if offset else own  # as `num_rows`
            if self._source is None:
                self._spans[key] = Span(counts)
            else:
                source, samples = self._source
                span = source._span_of(*key)
                starts = span.starts.index_select(0, integers(samples))
                self._spans[key] = Span(counts, starts, span.end)
        return self._spans[key]

    def sums(self, name: str) -> Tensor:
        """Sum of each sample's rows of a field with one number in each, and how many of them are
        not 0: float64 ``[2, samples]``. Added up once for all samples of the flat tensor."""
        if self._source is not None:
            source, samples = self._source
            return source.sums(name).index_select(1, integers(samples))
        if name not in self._sums:
            self._sums[name] = _sums_of(self.flat(name)[:-1].float(), self.span(name))
        return self._sums[name]

    def taken(self, samples: Sequence[int]) -> Columns:
        """The fields of some samples, in this order; nothing is copied."""
        count = len(self.total_lengths)
        if len(samples) == count and [*samples] == [*range(count)]:
            return self
        lengths = self.total_lengths, self.response_lengths
        made = Columns(self.schema, self.fields, *(_picked(own, samples) for own in lengths))
        source, own = self._source or (self, None)
        made._source = source, [i if own is None else own[i] for i in samples]
        return made

    def compact(self, names: Collection[str] | None = None) -> Columns:
        """Some of the fields, or all, in flat tensors of these samples alone."""
        if self._source is None and names is None:
            return self
        chosen = {name: self.fields[name] for name in (self if names is None else names)}
        if self._source is not None:
            chosen = {
                name: values.index_select(0, self.span(name).places)
                if isinstance(values, Tensor)
                else self[name]
                for name, values in chosen.items()
            }
        made = self.replaced(chosen)
        known = self._sums if self._source is None else self._source[0]._sums
        made._sums = {name: self.sums(name) for name in chosen if name in known}
        return made

    @classmethod
    def joined(cls, parts: Sequence[Columns]) -> Columns:
        """The samples of all parts; those that have any have the same fields."""
        filled = [part.compact() for part in parts if part.total_lengths]
        if len(filled) < 2:
            return max((filled or parts), key=len).compact()
        first, fields = filled[0], dict[str, Tensor | list[Any]]()
        for name in first:
            if isinstance(first.fields[name], Tensor):
                rows = [part.flat(name)[:-1] for part in filled]
                fields[name] = _joined(first.schema[name], rows)
            else:
                fields[name] = [value for part in filled for value in part[name]]
        totals = [length for part in filled for length in part.total_lengths]
        responses = [length for part in filled for length in part.response_lengths]
        made = cls(first.schema, fields, totals, responses)
        made._sums = {n: torch.cat([part.sums(n) for part in filled], 1) for n in first._sums}
        return made

    def replaced(self, fields: Mapping[str, Tensor | list[Any]]) -> Columns:
        """The same samples with these fields alone, flat as `compact` gives them."""
        return Columns(self.schema, fields, self.total_lengths, self.response_lengths)

    def alone(self) -> Columns:
        """These samples without the declarations of fields that they do not have."""
        own = self.compact([*self])
        own.schema = Schema(tuple(self.schema[name] for name in own))
        return own

    def __reduce__(self) -> tuple[Any, ...]:
        """The fields of these samples; views and offsets are made anew on other ranks."""
        own = self.compact()
        given = own.schema, own.fields, own.total_lengths, own.response_lengths
        return Columns, given, {"_sums": own._sums}


def _picked(values: list[int], samples: Sequence[int]) -> list[int]:
    if isinstance(samples, range) and samples.step == 1:  # those of a row, many times a step
        return values[samples.start : samples.stop]
    return [values[i] for i in samples]


def _joined(field: Field, rows: list[Tensor]) -> Tensor:
    """The rows of samples, and one of zeros."""
    # What was an empty list shows neither type nor trailing shape.
    filled = [each for each in rows if each.shape[0]] or rows[:1]
    first = filled[0] if filled else torch.zeros(0, dtype=field.default_type, device="cpu")
    shapes = list(dict.fromkeys(each.shape[1:] for each in filled))
    found = f"rows of shapes {', '.join(str(list(shape)) for shape in shapes)}"
    expected = "rows of one shape in all samples"
    if len(shapes) <= 1:
        try:
            return joined([*filled, first.new_zeros((1, *first.shape[1:]))])
        except RuntimeError:  # types of 8 bits have none in common with others
            kinds = dict.fromkeys(str(each.dtype) for each in filled)
            expected = "values of types that have one in common"
            found = " and ".join(kinds)
    declaration = declaration_line(field.name, Kind.METADATA)
    advice = "make them alike, or declare what no row is made of"
    raise SchemaError(
        field.name, expected=expected, found=found, declaration=declaration, advice=advice
    )


def _sums_of(values: Tensor, span: Span) -> Tensor:
    """Sum of each sample's ``[rows]`` values, and how many are not 0; float64 ``[2, samples]``."""
    least, most = values.aminmax() if len(values) else (values.new_zeros(()),) * 2
    if least == most:  # all ones, as in most masks
        return torch.stack((most, most != 0)).double()[:, None] * span.lengths
    sums = _added_up(values, span)
    # Of numbers up to 1 only ones add up to how many are not 0. Others are added up in double:
    # micro-batches, and so packing, should not show in the sum.
    if least >= 0 and most <= 1 and float(sums.sum()) == int(values.count_nonzero()):
        return torch.stack((sums, sums))
    counts = _added_up((values != 0).float(), span)
    return torch.stack((_added_up(values.double(), span), counts))


def _added_up(values: Tensor, span: Span) -> Tensor:
    return torch.segment_reduce(values, "sum", lengths=span.lengths, unsafe=True).double()


def map_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
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


def pinned(tensor: Tensor, device: torch.device) -> Tensor:
    """A host tensor in memory from which it may go to a device."""
    # From pageable memory the host would wait for the copy, non_blocking or not.
    return tensor.pin_memory() if device.type == "cuda" else tensor


def sent(tensor: Tensor, device: torch.device, *, copy: bool = False) -> Tensor:
    """A host tensor on a device, without the host waiting for it; with `copy` never itself."""
    return pinned(tensor, device).to(device, non_blocking=True, copy=copy)
