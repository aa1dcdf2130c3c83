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

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mcore_batching.batch.errors import SchemaError
from mcore_batching.batch.fields import (
    TRAITS,
    Field,
    Kind,
    checked_values,
    declaration_line,
    row_counts,
)
from mcore_batching.batch.row_index import Span, integers
from mcore_batching.batch.schema import Schema, lengths_of
from mcore_batching.batch.values import joined

_TOKENS, _RESPONSES = (
    Field(kind.value, kind) for kind in (Kind.PER_TOKEN, Kind.PER_RESPONSE_TOKEN)
)


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
        self.schema, self.fields = schema, fields
        self.total_lengths, self.response_lengths = total_lengths, response_lengths
        self._spans: dict[tuple[bool, int], Span] = {}
        self._views: dict[str, list[Any]] = {}
        self._sums: dict[tuple[int, bool], Tensor] = {}
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
        lengths = self.total_lengths, self.response_lengths
        for name, values in fields.items():
            if values is not None:
                field = schema.declared(name)
                checked = checked_values(field, values, *lengths)
                if not TRAITS[field.kind].rows:
                    columns[name] = map_tensors(checked, torch.clone)
                    continue
                if field.kind is Kind.POSITION_IDS:  # [axes, tokens] -> [tokens, axes]
                    checked = [value.movedim(-1, 0) for value in checked]
                columns[name] = _joined(field, checked, row_counts(field, *lengths))
        return self.beside(Columns(schema, columns, *lengths))

    def beside(self, others: Columns) -> Columns:
        """These fields and others of the same samples, which take the place of their own.

        Raises:
            SchemaError: two fields are positions.
        """
        fields = {**self.compact().fields, **others.compact().fields}
        made = Columns(others.schema, fields, self.total_lengths, self.response_lengths)
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

    def rows(self, name: str) -> Tensor:
        """The rows of these samples alone."""
        return self.compact([name]).flat(name)[:-1]

    def span(self, name: str) -> Span:
        """Places of these samples' rows in `flat`."""
        return self._span_of(self.schema[name])

    @property
    def token_span(self) -> Span:
        """Places of these samples' tokens in a field with one row for each token."""
        return self._span_of(_TOKENS)

    @property
    def response_span(self) -> Span:
        """Places of their response tokens in a field with one row for each response token."""
        return self._span_of(_RESPONSES)

    def _span_of(self, field: Field) -> Span:
        key = field.kind is Kind.PER_RESPONSE_TOKEN, field.length_offset
        if key not in self._spans:
            counts = row_counts(field, self.total_lengths, self.response_lengths)
            if self._source is None:
                self._spans[key] = Span(counts)
            else:
                source, samples = self._source
                span = source._span_of(field)
                starts = span.starts.index_select(0, integers(samples))
                self._spans[key] = Span(counts, starts, span.end)
        return self._spans[key]

    @property
    def is_padding(self) -> list[bool]:
        """True for each sample that is a padding sample [samples]."""
        return self["is_padding"] if "is_padding" in self else [False] * len(self.total_lengths)

    def loss_weights(self, depth: int = 0, *, has_labels: bool = False) -> Tensor:
        """Loss weights of the response tokens, float32 ``[R]``: all ones if ``loss_masks`` is
        absent; 0 in padding samples, and in what nothing predicts at a depth of multi-token
        prediction, such as the first token of a sample without a prompt. With labels of the
        samples' own those of all tokens, by ``loss_mask``."""
        span = self.token_span if has_labels else self.response_span
        name = "loss_mask" if has_labels else "loss_masks"
        weights = self.rows(name).float() if name in self else torch.ones(span.total, device="cpu")
        # Response token j of a sample with p prompt tokens is predicted at place p - 1 + j - depth.
        skipped = depth + 1 - self.token_span.lengths + span.lengths
        if has_labels:
            skipped = torch.full_like(span.lengths, depth)
        elif any(self.is_padding):
            is_padding = torch.tensor(self.is_padding, dtype=torch.bool, device="cpu")
            skipped = torch.where(is_padding, span.lengths, skipped)
        if span.total and skipped.max() > 0:
            weights = weights.masked_fill(span.within < skipped.index_select(0, span.samples), 0.0)
        return weights

    def weight_sums(self, depth: int = 0, *, has_labels: bool = False) -> Tensor:
        """Sum of each sample's `loss_weights`, and how many of them are not 0: float64
        ``[2, samples]``. Added up once for all samples of the flat tensors."""
        if self._source is not None:
            source, samples = self._source
            return source.weight_sums(depth, has_labels=has_labels)[:, integers(samples)]
        key = depth, has_labels
        if key not in self._sums:
            weights = self.loss_weights(depth, has_labels=has_labels)
            lengths = (self.token_span if has_labels else self.response_span).lengths
            is_set = weights.sign().abs_()
            counts = _added_up(is_set, lengths)
            # Of most masks, which are 0 or 1, the sums are as many.
            is_same = torch.equal(weights, is_set)
            sums = counts if is_same else _added_up(weights, lengths)
            self._sums[key] = torch.stack((sums, counts))
        return self._sums[key]

    def taken(self, samples: Sequence[int]) -> Columns:
        """The fields of some samples, in this order; nothing is copied."""
        # The count first: without it a list of all samples is made for each row.
        if len(samples) == len(self.total_lengths) and [*samples] == [*range(len(samples))]:
            return self
        lengths = self.total_lengths, self.response_lengths
        made = Columns(self.schema, self.fields, *([own[i] for i in samples] for own in lengths))
        source, own = self._source or (self, range(len(self.total_lengths)))
        made._source = source, [own[i] for i in samples]
        return made

    def compact(self, names: Collection[str] | None = None) -> Columns:
        """Some of the fields, or all, in flat tensors of these samples alone."""
        if self._source is None and names is None:
            return self
        fields = {name: self.fields[name] for name in (self if names is None else names)}
        for name, values in fields.items() if self._source is not None else ():
            if isinstance(values, Tensor):
                fields[name] = values.index_select(0, self.span(name).places)
            else:
                fields[name] = self[name]
        return self.replaced(fields)

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
                fields[name] = _joined(first.schema[name], rows, [*map(len, rows)])
            else:
                fields[name] = [value for part in filled for value in part[name]]
        totals = [length for part in filled for length in part.total_lengths]
        responses = [length for part in filled for length in part.response_lengths]
        made = cls(first.schema, fields, totals, responses)
        # Sums that all parts have: later steps would add up the samples of all earlier ones anew.
        for key in set(first._sums).intersection(*(part._sums for part in filled)):
            made._sums[key] = torch.cat([part._sums[key] for part in filled], 1)
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
        return Columns, (own.schema, own.fields, own.total_lengths, own.response_lengths)


def _joined(field: Field, rows: list[Tensor], counts: list[int]) -> Tensor:
    """The rows of samples, and one of zeros."""
    # What was an empty list shows neither type nor trailing shape.
    filled = [each for each, count in zip(rows, counts, strict=True) if count] or rows[:1]
    first = filled[0] if filled else torch.zeros(0, dtype=field.default_type, device="cpu")
    try:
        return joined([*filled, first.new_zeros((1, *first.shape[1:]))])
    except RuntimeError:  # of several trailing shapes, or types without a common one
        pass
    shapes = dict.fromkeys(str([*each.shape[1:]]) for each in filled)
    expected, found = "rows of one shape in all samples", f"rows of shapes {', '.join(shapes)}"
    if len(shapes) == 1:  # types of 8 bits have none in common with others
        expected = "values of types that have one in common"
        found = " and ".join(dict.fromkeys(str(each.dtype) for each in filled))
    raise SchemaError(
        field.name,
        expected=expected,
        found=found,
        declaration=declaration_line(field.name, Kind.METADATA),
        advice="make them alike, or declare what no row is made of",
    )


def _added_up(values: Tensor, lengths: Tensor) -> Tensor:
    if len(values) and values.min() == values.max():  # as in most masks
        return lengths * values[0].double()
    # In double: micro-batches, and so packing, should not show in the sum.
    return torch.segment_reduce(values.double(), "sum", lengths=lengths, unsafe=True)


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
