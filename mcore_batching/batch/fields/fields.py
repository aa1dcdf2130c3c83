"""Declaration of one field: its values' kind and length, and its value in fabricated samples."""

from __future__ import annotations

import dataclasses
import enum

import torch

from mcore_batching.batch.errors import SchemaError


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
    """Anything, carried along as it is. None in a fabricated sample, so it suits identifiers."""


class Fill(enum.Enum):
    """Value of a field in fabricated samples: placeholders and padding samples.

    A placeholder has one token and no response, a padding sample one prompt and one response token.
    Values per token are filled in both; `ONES` per sample and `IDENTIFIER` in padding samples only.
    """

    ZEROS = "zeros"
    """Zeros; ``{}`` for multimodal inputs, None for metadata."""
    ONES = "ones"
    """For attention masks, and for flags such as "last turn of the trajectory"."""
    TOKEN_IDS = "token ids"
    """The pad token; the last of a padding sample's is the response token."""
    IDENTIFIER = "identifier"
    """A value that no other sample has, so that the sample is in a group of its own."""


INTEGRAL = (Kind.TOKENS, Kind.POSITION_IDS, Kind.ROUTED_EXPERTS)
WITHOUT_ROWS = (Kind.METADATA, Kind.MULTIMODAL, Kind.PER_SAMPLE)
_WITH_OFFSET = (Kind.PER_TOKEN, Kind.PER_RESPONSE_TOKEN, Kind.ROUTED_EXPERTS)
FILLED_KINDS = {
    Fill.ZEROS: tuple(Kind),
    Fill.ONES: (Kind.PER_TOKEN, Kind.PER_RESPONSE_TOKEN, Kind.PER_SAMPLE),
    # Prompts have neither a row per token nor one per response token.
    Fill.TOKEN_IDS: (Kind.PER_TOKEN, Kind.PER_RESPONSE_TOKEN, Kind.METADATA),
    Fill.IDENTIFIER: (Kind.PER_SAMPLE, Kind.METADATA),
}
"""The kinds for which each fill is allowed."""


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
        # Packing reads these three by name, so their kinds are not the user's to choose.
        fixed = _STRUCTURAL.get(self.name)
        if not isinstance(self.kind, Kind):
            kinds = ", ".join(f"Kind.{kind.name}" for kind in Kind)
            expected, found = f"a kind, one of {kinds}", repr(self.kind)
        # Packing would not look at it: an offset that is ignored hides a mistake.
        elif self.length_offset and self.kind not in _WITH_OFFSET:
            expected = "length_offset=0 of a kind without rows"
            found = f"length_offset={self.length_offset} with {found}"
            declaration = declaration_line(self.name, Kind.PER_TOKEN, self.length_offset)
        elif not isinstance(self.fill, Fill) or self.kind not in FILLED_KINDS[self.fill]:
            offered = [f"Fill.{fill.name}" for fill in Fill if self.kind in FILLED_KINDS[fill]]
            expected = f"a fill of {found}, one of {', '.join(offered)}"
            found = str(self.fill)
        elif (self.kind is Kind.TOKENS or fixed is not None) and self.kind is not fixed:
            expected = f"Kind.{fixed.name}" if fixed else "Kind.TOKENS on 'tokens' alone"
        if expected:
            raise SchemaError(self.name, expected=expected, found=found, declaration=declaration)

    def num_rows(self, total_length: int, response_length: int) -> int:
        """Rows of a value, for a sample of these lengths; 0 of a kind without rows."""
        if self.kind in WITHOUT_ROWS:
            return 0
        # Position ids of several axes have their rows, one per token, last.
        own = response_length if self.kind is Kind.PER_RESPONSE_TOKEN else total_length
        return num_rows(own, self.length_offset)

    @property
    def default_type(self) -> torch.dtype:
        """Type of tensors made of empty lists, which show none."""
        # torch.tensor([]) is float32, which embeddings and gathers refuse as indices.
        return torch.int64 if self.kind in INTEGRAL else torch.float32

    @property
    def declaration(self) -> str:
        """The line of code that declares this field."""
        return declaration_line(self.name, self.kind, self.length_offset, self.fill)


def num_rows(length: int, length_offset: int) -> int:
    """Rows of a value whose kind has this length."""
    # A sample of 0 tokens has no routed experts rather than -1 rows of them.
    return max(0, length + length_offset)


_STRUCTURAL = {
    "tokens": Kind.TOKENS,
    "total_lengths": Kind.PER_SAMPLE,
    "response_lengths": Kind.PER_SAMPLE,
}


def declaration_line(name: str, kind: Kind, length_offset: int = 0, fill: Fill = Fill.ZEROS) -> str:
    """The line of code that declares a field."""
    offset = f", length_offset={length_offset}" if length_offset else ""
    filled = f", fill=Fill.{fill.name}" if fill is not Fill.ZEROS else ""
    return f'schema = schema.declare("{name}", Kind.{kind.name}{offset}{filled})'


def undeclared(name: str, advice: str) -> SchemaError:
    """The refusal of a field without a declaration."""
    # The line is an example, with the commonest kind of fields that frameworks add.
    line = declaration_line(name, Kind.PER_RESPONSE_TOKEN)
    return SchemaError(
        name,
        expected="a declared field",
        found="no declaration",
        declaration=line,
        advice=f"{advice} its kind, for example",
    )
