"""Declaration of one field, the check of values against it, once, where a batch enters, and the
field's value in fabricated samples.

Lists and arrays become tensors at the check, so code behind it handles tensors only (but for
numbers per sample, multimodal inputs and metadata).

    make_placeholder(schema, ["tokens", "loss_masks", "rewards"], batch)
    {"tokens": [tensor([0])], "loss_masks": [tensor([], dtype=torch.int32)], "rewards": [0.0]}

A placeholder's response is empty, so it adds nothing to a sum over response tokens.
"""

from __future__ import annotations

import dataclasses
import enum
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mcore_batching.batch.errors import SchemaError
from mcore_batching.batch.values import (
    UNSIGNED,
    count_of,
    describe,
    is_integral,
    is_tagged,
    require_loss_masks,
    require_token_id,
    shape_of,
    tensor_of,
)
from mcore_batching.planning.integers import as_integer


class Kind(enum.Enum):
    """Kind of a sample's value: how it is sliced, padded and packed.

    In the shapes below T is the sample's total length and R its response length, in tokens.
    """

    TOKENS = "tokens"
    """``[T]`` integers. The field ``tokens`` and no other."""
    PER_TOKEN = "per token"
    """``[T + length_offset, ...]``."""
    PER_RESPONSE_TOKEN = "per response token"
    """``[R + length_offset, ...]``."""
    PER_SAMPLE = "per sample"
    """A number, or a tensor of any one shape."""
    POSITION_IDS = "position ids"
    """``[T]`` integers, or ``[axes, T]`` for multimodal rotary embeddings."""
    ROUTED_EXPERTS = "routed experts"
    """``[T + length_offset, layers, top_k]`` integers: the experts that each token is routed to."""
    MULTIMODAL = "multimodal inputs"
    """A dict of model inputs, or None. Present but empty in a fabricated sample."""
    METADATA = "metadata"
    """Anything, carried along as it is. None in a fabricated sample; in a padding sample a fresh
    value where its fill is `Fill.IDENTIFIER`, and ``[pad]`` in lists of token ids."""


class Fill(enum.Enum):
    """Value of a field in fabricated samples: placeholders and padding samples.

    A placeholder has one token and no response, a padding sample one prompt and one response token.
    Values per token are filled in both; `ONES` per sample and `IDENTIFIER` in padding samples only.
    """

    ZEROS = "zeros"
    """Zeros; ``{}`` for multimodal inputs, None for metadata. Positions count from 0, and recorded
    experts are the first ``top_k``, since zeros would send a token to one expert ``top_k``
    times."""
    ONES = "ones"
    """For attention masks, and for flags such as "last turn of the trajectory"."""
    TOKEN_IDS = "token ids"
    """The pad token; the last of a padding sample's is the response token."""
    IDENTIFIER = "identifier"
    """A value that no other sample has, so that the sample is in a group of its own."""


class Traits(NamedTuple):
    """How values of a kind are measured, checked and filled."""

    rows: str = ""  # what a value has one of per token, in words; empty: it has no rows
    dimensions: Sequence[int] = ()  # numbers of them that a value may have; empty: any
    shape: str = ""
    is_integral: bool = False
    takes_offset: bool = False
    fills: Sequence[Fill] = (Fill.ZEROS,)


_OF_ROWS = (Fill.ZEROS, Fill.ONES, Fill.TOKEN_IDS)
TRAITS = {
    Kind.TOKENS: Traits("tokens", (1,), ", as [tokens]", is_integral=True),
    Kind.PER_TOKEN: Traits("rows, one per token", takes_offset=True, fills=_OF_ROWS),
    Kind.PER_RESPONSE_TOKEN: Traits(
        "rows, one per response token", takes_offset=True, fills=_OF_ROWS
    ),
    Kind.PER_SAMPLE: Traits(fills=(Fill.ZEROS, Fill.ONES, Fill.IDENTIFIER)),
    Kind.POSITION_IDS: Traits(
        "positions, one per token", (1, 2), ", as [tokens] or [axes, tokens]", is_integral=True
    ),
    Kind.ROUTED_EXPERTS: Traits(
        "rows, one per token",
        (3,),
        ", as [rows, layers, top_k]",
        is_integral=True,
        takes_offset=True,
    ),
    Kind.MULTIMODAL: Traits(),
    # Prompts have neither a row per token nor one per response token.
    Kind.METADATA: Traits(fills=(Fill.ZEROS, Fill.TOKEN_IDS, Fill.IDENTIFIER)),
}
_STRUCTURAL = {
    "tokens": Kind.TOKENS,
    "total_lengths": Kind.PER_SAMPLE,
    "response_lengths": Kind.PER_SAMPLE,
    "loss_masks": Kind.PER_RESPONSE_TOKEN,
}
"""Fields that packing reads by name, so that their kinds are not the user's to choose."""


@dataclasses.dataclass(frozen=True)
class Field:
    """Declaration of one field.

    Attributes:
        name: the field's key in a batch.
        kind: of a sample's value.
        length_offset: rows beyond the kind's own length, negative for fewer; of kinds with rows.
        required: True if every batch must have the field.
        fill: its value in fabricated samples.

    Raises:
        SchemaError: no batch could meet it: an offset on a kind without rows, kind TOKENS on
            another field than ``tokens``, or a fill that the kind does not allow.
    """

    name: str
    kind: Kind
    _: dataclasses.KW_ONLY
    length_offset: int = 0
    required: bool = False
    fill: Fill = Fill.ZEROS

    def __post_init__(self) -> None:
        expected, found, declaration = "", f"Kind.{getattr(self.kind, 'name', self.kind)}", ""
        fixed = _STRUCTURAL.get(self.name)
        if not isinstance(self.kind, Kind):
            kinds = ", ".join(f"Kind.{kind.name}" for kind in Kind)
            expected, found = f"a kind, one of {kinds}", repr(self.kind)
        # Packing would not look at it: an offset that is ignored hides a mistake.
        elif self.length_offset and not TRAITS[self.kind].takes_offset:
            expected = "length_offset=0 of a kind without rows"
            found = f"length_offset={self.length_offset} with {found}"
            declaration = declaration_line(self.name, Kind.PER_TOKEN, self.length_offset)
        elif self.fill not in TRAITS[self.kind].fills:
            offered = ", ".join(f"Fill.{fill.name}" for fill in TRAITS[self.kind].fills)
            expected, found = f"a fill of {found}, one of {offered}", str(self.fill)
        elif (self.kind is Kind.TOKENS or fixed is not None) and self.kind is not fixed:
            expected = f"Kind.{fixed.name}" if fixed else "Kind.TOKENS on 'tokens' alone"
        elif fixed is not None and self.length_offset:
            expected, found = "length_offset=0", f"length_offset={self.length_offset}"
        if expected:
            raise SchemaError(self.name, expected=expected, found=found, declaration=declaration)

    def num_rows(self, total_length: int, response_length: int) -> int:
        """Rows of a value, for a sample of these lengths; 0 of a kind without rows."""
        if not TRAITS[self.kind].rows:
            return 0
        return row_counts(self, [total_length], [response_length])[0]

    @property
    def default_type(self) -> torch.dtype:
        """Type of tensors made of empty lists, which show none."""
        # torch.tensor([]) is float32, which embeddings and gathers refuse as indices.
        return torch.int64 if TRAITS[self.kind].is_integral else torch.float32

    @property
    def declaration(self) -> str:
        """The line of code that declares this field."""
        return declaration_line(self.name, self.kind, self.length_offset, self.fill)


def declaration_line(name: str, kind: Kind, length_offset: int = 0, fill: Fill = Fill.ZEROS) -> str:
    """The line of code that declares a field."""
    offset = f", length_offset={length_offset}" if length_offset else ""
    filled = f", fill=Fill.{fill.name}" if fill is not Fill.ZEROS else ""
    return f'schema = schema.declare("{name}", Kind.{kind.name}{offset}{filled})'


def row_counts(field: Field, totals: list[int], responses: list[int]) -> list[int]:
    """Rows of each value of a field with rows, for samples of these lengths."""
    # Position ids of several axes have their rows, one per token, last.
    own = responses if field.kind is Kind.PER_RESPONSE_TOKEN else totals
    # A sample of 0 tokens has no routed experts rather than -1 rows of them.
    return [max(0, n + field.length_offset) for n in own] if field.length_offset else own


def undeclared(name: str, advice: str) -> SchemaError:
    """The refusal of a field without a declaration."""
    return SchemaError(
        name,
        expected="a declared field",
        found="no declaration",
        # An example, with the commonest kind of fields that frameworks add.
        declaration=declaration_line(name, Kind.PER_RESPONSE_TOKEN),
        advice=f"{advice} its kind, for example",
    )


def num_samples(batch: Mapping[str, Any]) -> int:
    """Number of samples of a batch, padding samples included: values of ``total_lengths``, else of
    the first field that is not None, else 0."""
    # Any field would do, but this one is there in every whole batch, and a list of its own.
    fields = ("total_lengths", *batch)
    name = next((name for name in fields if batch.get(name) is not None), None)
    if name is None:
        return 0
    count = count_of(batch[name])
    if count is None:
        raise SchemaError(name, expected="one value per sample", found=describe(batch[name]))
    return count


def require_one_per_sample(name: str, values: Any, num_samples: int) -> None:
    """Refuse a field that is None, or has not as many values as the batch has samples."""
    count = count_of(values)
    if count == num_samples:
        return
    found = describe(values) if count is None else f"{count} values"
    raise SchemaError(
        name,
        expected=f"{num_samples} values, one per sample",
        found="no such field" if values is None else found,
    )


def read_lengths(batch: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    """Total and response length of every sample, in tokens; refuses lengths that are no integers,
    or of a response longer than its sample."""
    totals, responses = (_lengths(name, batch) for name in ("total_lengths", "response_lengths"))
    require_one_per_sample("response_lengths", responses, len(totals))
    for index, (total, response) in enumerate(zip(totals, responses, strict=True)):
        if response > total:
            raise SchemaError(
                "response_lengths",
                sample_index=index,
                expected=f"at most its total length, {total}",
                found=str(response),
            )
    return totals, responses


def _lengths(name: str, batch: Mapping[str, Any]) -> list[int]:
    values: Any = batch.get(name)
    if count_of(values) is None:
        raise SchemaError(name, expected="a list of one length per sample", found=describe(values))
    if {*map(type, values)} == {int} and min(values) >= 0:  # one by one only to name one
        return list(values)
    lengths = []
    for index, value in enumerate(values):
        length = as_integer(value)
        if length is None or length < 0:
            raise SchemaError(
                name,
                sample_index=index,
                expected="an integer of 0 or more, in tokens",
                found=describe(value),
            )
        lengths.append(length)
    return lengths


def checked_values(
    field: Field, values: Any, total_lengths: list[int], response_lengths: list[int]
) -> list[Any]:
    """The values of a field, one per sample, each of its kind or a `SchemaError`: lists and arrays
    as tensors, ``is_padding`` as booleans, metadata and multimodal inputs as given."""
    require_one_per_sample(field.name, values, len(total_lengths))
    found, types = list(values), {*map(type, values)}
    if field.kind is Kind.METADATA:
        return found
    if field.name == "is_padding":
        return [is_tagged(field.name, index, tag) for index, tag in enumerate(found)]
    if field.kind is Kind.PER_SAMPLE and types <= {bool, int, float}:
        return found  # of numbers there is nothing else to check
    if field.kind is not Kind.MULTIMODAL and not (
        types == {Tensor} and {each.dtype for each in found}.isdisjoint(UNSIGNED)
    ):
        found = [_value(field, index, value) for index, value in enumerate(found)]
    # After all became tensors: from here on a value has a shape and a type, or none at all.
    counts = row_counts(field, total_lengths, response_lengths)
    # One by one only to name one that does not fit.
    one_by_one = () if _longest_fits(field, found, counts) else zip(found, counts, strict=True)
    for index, each in enumerate(one_by_one):
        expected = unmet(field, *each)
        if expected is not None:
            raise SchemaError(
                field.name,
                sample_index=index,
                expected=expected,
                found=describe(each[0]),
                declaration=field.declaration,
                advice="correct the values, or this declaration",
            )
    if field.kind is Kind.PER_SAMPLE:
        _require_one_shape(field.name, found, response_lengths)
    if field.name == "loss_masks":
        require_loss_masks(found)
    return found


def _value(field: Field, index: int, value: Any) -> Any:
    # A response of no tokens, say.
    if isinstance(value, list | tuple) and not value and field.kind is not Kind.PER_SAMPLE:
        # torch.as_tensor([]) is float32, which token ids must not be.
        return torch.zeros(0, dtype=field.default_type)
    return tensor_of(field.name, index, value)


_form = operator.attrgetter("dtype", "ndim", "layout", "is_nested", "is_meta")
"""All of a tensor that its field's kind may require, but for its rows."""


def _longest_fits(field: Field, values: list[Any], counts: list[int]) -> bool:
    """True if values are tensors that differ in their rows alone, and the longest one fits, and so
    do all: rollouts have thousands."""
    is_alike = {*map(type, values)} == {Tensor} and len({*map(_form, values)}) == 1
    if not is_alike or not TRAITS[field.kind].rows or values[0].is_nested or not values[0].ndim:
        return False
    axis, longest = -(field.kind is Kind.POSITION_IDS), values[counts.index(max(counts))]
    if [each.shape[axis] for each in values] != counts:
        return False
    # Without elements it might be of any type.
    return longest.numel() > 0 and unmet(field, longest, max(counts)) is None


def _require_one_shape(name: str, values: Any, response_lengths: Sequence[int]) -> None:
    """Refuse per-sample values of different shapes, and rewards that are per token."""
    shapes = [shape_of(value) for value in values]
    # They are stacked into one tensor per row, where a shape of its own has no place.
    odd = next((index for index, shape in enumerate(shapes) if shape != shapes[0]), None)
    expected = "one number, or tensors of one shape, in all samples"
    # Per-token rewards of responses that happen to share a length also have one shape. With one
    # token each the two readings are the same.
    as_responses = {(length,) for length in response_lengths} - {(1,)}
    if odd is None and name == "rewards" and shapes and set(shapes) == as_responses:
        odd, expected = 0, "one number per sample (give vectors another name)"
    if odd is not None:
        raise SchemaError(
            name,
            sample_index=odd,
            expected=expected,
            found=describe(values[odd]) + (f" beside {describe(values[0])}" if odd else ""),
            declaration=declaration_line(name, Kind.PER_RESPONSE_TOKEN),
            advice="if it has a value per response token, declare it so",
        )


def unmet(field: Field, value: Any, rows: int) -> str | None:
    """The requirement on values with so many rows that this one does not meet; None if it does."""
    kind, traits = field.kind, TRAITS[field.kind]
    if kind is Kind.METADATA:
        return None
    if isinstance(value, Tensor):
        if value.is_meta:  # it has a shape, but nothing to train on
            return "values, not a tensor on the meta device"
        if value.is_complex():  # a loss would drop the imaginary part
            return "real numbers"
        is_dense = value.layout is torch.strided and not (value.is_nested or value.is_quantized)
        if traits.rows and not is_dense:
            return "a dense tensor"  # samples are joined to one
    if kind is Kind.MULTIMODAL:
        fits = value is None or isinstance(value, Mapping)
        return None if fits else "a dict of model inputs, or None"
    shape = shape_of(value)
    if kind is Kind.PER_SAMPLE:
        return None if shape is not None else "a number or a tensor"
    expected = f"{rows} {traits.rows}"
    if not shape:
        return expected
    if field.name == "loss_masks" and len(shape) > 1:  # [R, 1] would broadcast with [R] to [R, R]
        return f"{expected}, one number in each"
    found = shape[-1 if kind is Kind.POSITION_IDS else 0]
    has_dimensions = not traits.dimensions or len(shape) in traits.dimensions
    # What was an empty list has lost its trailing dimensions.
    if found != rows or not (has_dimensions or shape == (0,)):
        return expected + traits.shape
    if traits.is_integral and not is_integral(value):
        return f"{expected}, of an integer type"
    return None


def make_placeholder(
    schema: Mapping[str, Field],
    batch_keys: Iterable[str],
    example_batch: Mapping[str, Any] | None,
    *,
    pad_token_id: int = 0,
) -> dict[str, list[Any]]:
    """A sample of one token and an empty response, with a list of one value for each key.

    Args:
        schema: the kind of every requested field.
        batch_keys: the fields to give a value: ``[1]`` for tokens; 1 row per token and 0 rows per
            response token, plus the field's offset; 0 per sample, but for lengths; position 0 on
            every axis; ``{}`` for multimodal inputs; None for metadata.
        example_batch: field name to values that give type, device and trailing shape; fields
            may be empty, None or absent, and so may the batch.
        pad_token_id: the one token.

    Raises:
        SchemaError: a requested field is not declared, or got no value of the right length.
        BatchError: ``pad_token_id`` is no integer.
    """
    pad_token_id = require_token_id("pad_token_id", pad_token_id)
    filled: dict[str, list[Any]] = {}
    for key in batch_keys:
        if key not in schema:
            raise undeclared(key, "declare")
        values = (example_batch or {}).get(key)
        present = (value for value in (() if values is None else values) if value is not None)
        made = fabricated(schema[key], next(present, None), 1, 0, pad_token_id)
        filled[key] = checked_values(schema[key], [made], [1], [0])
    return filled


def fabricated(
    field: Field, example: Any, total_length: int, response_length: int, pad_token_id: int
) -> Any:
    """A field's value in a sample of these lengths; `example` is a real value, or None."""
    if field.kind is Kind.METADATA:
        return None
    if field.kind is Kind.MULTIMODAL:
        return {}
    # An empty list shows neither type nor trailing shape.
    is_empty = isinstance(example, list | tuple) and not example
    example = None if is_empty else tensor_of(field.name, 0, example)
    if field.kind is Kind.PER_SAMPLE:
        lengths = {"response_lengths": response_length, "total_lengths": total_length}
        number = (lengths | {"max_seq_lens": total_length}).get(field.name, 0)
        return filled_with(number, 0 if example is None else example)
    rows = field.num_rows(total_length, response_length)
    is_routed = field.kind is Kind.ROUTED_EXPERTS
    has_ids = field.kind is Kind.TOKENS or field.fill is Fill.TOKEN_IDS
    if example is None or (is_routed and example.dim() != 3):
        # A rank without any sample so far lacks the number of layers.
        is_integral = has_ids or field.fill is Fill.ONES
        dtype = torch.int64 if is_integral else field.default_type
        example = torch.zeros((0, 0, 0) if is_routed else (0,), dtype=dtype)
    if field.kind is Kind.POSITION_IDS:
        positions = torch.arange(rows, dtype=example.dtype, device=example.device)
        return positions.expand(*example.shape[:-1], rows).clone()
    if is_routed:
        # Zeros would send every slot of the token to expert 0.
        slots = torch.arange(example.shape[2], dtype=example.dtype, device=example.device)
        return slots.expand(rows, *example.shape[1:]).clone()
    number = pad_token_id if has_ids else int(field.fill is Fill.ONES)
    return example.new_full((rows, *example.shape[1:]), number)


def filled_with(number: int, like: Any) -> Any:
    """The number, of the type and shape of a value per sample."""
    return torch.full_like(like, number) if isinstance(like, Tensor) else type(like)(number)
