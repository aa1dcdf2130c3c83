"""Samples that begin alike: hashes of their beginnings, and the forest that a row is made of.

    sample    tokens                 responses in brackets
    0         a b [c d]              path  a      b c d
    1         a b [e]                path  a      b e
    2         a b [c]                path  a      b c d, of which it needs two tokens

Ranks exchange hashes of beginnings, not tokens: hash p of a sample is a sum over its first p
tokens, and over its fields with a value per token. So samples share a token only where these fields
agree as well. Where samples have arrived, all that they share is compared value by value.

Each stays a sample with fields, weights and outputs of its own.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from mcore_batching.batch.columns import Columns
from mcore_batching.batch.errors import SchemaError
from mcore_batching.batch.fields import Kind
from mcore_batching.batch.row_index import Span, integers
from mcore_batching.planning.forest import Forest, find_forest

_ROWS_AT_ONCE = 1 << 14
"""Rows that are hashed at once: recorded experts take kilobytes each."""


def hashes_of_beginnings(
    columns: Columns, block: int = 1, *, by_fields: bool = True, units: Sequence[int] | None = None
) -> list[bytes]:
    """8 bytes for each beginning of `block`, `2 * block`, ... tokens of each sample [samples].

    Equal bytes stand for equal tokens and equal fields per token, but for the fields' value at the
    last token, which predicts nothing within it. Padding samples and samples with multimodal inputs
    have none.

    Args:
        by_fields: False: tokens alone count.
        units: a number for each sample; samples of different ones have nothing in common.
    """
    span = columns.token_span
    within, tokens = span.within, columns.rows("tokens")
    # In parts that stay in the processor's cache.
    starts = range(0, max(span.total, 1), _ROWS_AT_ONCE)
    parts = [slice(start, start + _ROWS_AT_ONCE) for start in starts]
    hashes = torch.cat([_mixed(tokens[part], within[part]) for part in parts])
    for name in fields_compared(columns) if by_fields else ():
        rows = columns.span(name)
        # A sample may lack the values of its last tokens.
        own = torch.full((span.total + 1,), -1, dtype=torch.int64, device="cpu")
        first = span.firsts.index_select(0, rows.samples)
        own[first + rows.within + 1] = _hashes_of_rows(name, columns.rows(name))
        # A beginning is compared up to the token before its last.
        hashes += _mixed(own[:-1], within).masked_fill(within == 0, 0)
    sums = torch.zeros(span.total + 1, dtype=torch.int64, device="cpu")
    torch.cumsum(hashes, 0, out=sums[1:])
    shares = zip(columns.total_lengths, _can_share(columns), strict=True)
    blocks = Span([total // block if can_share else 0 for total, can_share in shares])
    first = span.firsts.index_select(0, blocks.samples)
    found = sums.index_select(0, first + (blocks.within + 1) * block) - sums.index_select(0, first)
    if units is not None:
        of_sample = torch.tensor(units, dtype=torch.int64, device="cpu") + 1
        found ^= (of_sample * _ODD).index_select(0, blocks.samples)
    packed = found.numpy().tobytes()
    ends = accumulate(blocks.counts, initial=0)
    return [packed[8 * start : 8 * end] for start, end in pairwise(ends)]


def find_forest_of(
    columns: Columns, units: Sequence[int], *, spare: int = 0, branches: bool = True
) -> Forest:
    """The forest of samples that are here, within the units [samples] that they were planned in;
    `spare` and `branches` as of `find_forest`."""
    hashes = hashes_of_beginnings(columns, units=units)
    return find_forest(columns.total_lengths, hashes, spare=spare, branches=branches)


def require_shared(forest: Forest, columns: Columns) -> None:
    """Refuse values of which a row could hold one sample's alone.

    Raises:
        SchemaError: samples that share tokens have different ones, or different values of a field
            per token.
    """
    lengths = forest.lengths
    # This sample, the one with the node's tokens, and where the two are to agree.
    pairs = [
        (sample, node.sample, node.start, min(node.end, lengths[sample]))
        for sample in range(len(lengths))
        for node in map(forest.nodes.__getitem__, forest.path(sample))
        if node.sample != sample
    ]
    if not pairs:
        return
    for name in ("tokens", *fields_compared(columns)):
        span, values, held = columns.span(name), columns.rows(name), list[int]()
        counts, firsts = span.counts, span.firsts.tolist()
        for own, other, start, end in pairs:
            # What stands at a sample's last token takes no part in its results.
            last = end if name == "tokens" else min(end, lengths[own] - 1)
            if min(last, counts[own]) != min(last, counts[other]):
                raise _differs(columns, name, own, other)
            held.append(max(0, min(last, counts[own]) - start))
        of_own = [firsts[own] + start for own, _, start, _ in pairs]
        of_other = [firsts[other] + start for _, other, start, _ in pairs]
        one, two = (
            values.index_select(0, Span(held, integers(starts)).places[:-1])
            for starts in (of_own, of_other)
        )
        is_equal = (one == two) | (one != one) & (two != two)  # NaN
        if not is_equal.all():
            place = int((~is_equal.reshape(len(one), -1).all(1)).nonzero()[0])
            at = int(torch.searchsorted(torch.tensor(held).cumsum(0), place, right=True))
            raise _differs(columns, name, *pairs[at][:2])
    for name in columns:
        if columns.schema[name].kind is Kind.MULTIMODAL:
            inputs = columns[name]
            for own, other, *_ in pairs:
                if inputs[own] or inputs[other]:
                    raise _differs(columns, name, own, other)


def _differs(columns: Columns, name: str, sample: int, other: int) -> SchemaError:
    return SchemaError(
        name,
        sample_index=sample,
        expected=f"what sample {other}, with which it shares tokens, begins with",
        found="other values; give them to get_data_iterator, or declare the field as "
        "Kind.METADATA if no row is made of it",
    )


def fields_compared(columns: Columns) -> list[str]:
    """Fields on which samples that share tokens must agree, beside the tokens."""
    kinds = (Kind.PER_TOKEN, Kind.POSITION_IDS, Kind.ROUTED_EXPERTS)
    of_rows = [columns.schema[name] for name in columns if columns.schema[name].kind in kinds]
    # Rows cannot be made of what has more values than tokens.
    return sorted(field.name for field in of_rows if field.length_offset <= 0)


def _can_share(columns: Columns) -> list[bool]:
    """True for samples that are neither padding nor have multimodal inputs, as images fill places
    of the prompt that differ by sample."""
    shares = [not tag for tag in columns.is_padding]
    for name in columns:
        if columns.schema[name].kind is Kind.MULTIMODAL:
            shares = [each and not value for each, value in zip(shares, columns[name], strict=True)]
    return shares


# Odd constants of 64 bits, as Python's signed integers: the golden ratio, and two of SplitMix64's.
_ODD, _FIRST, _SECOND = (
    each - 2**64 for each in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


def _mixed(values: Tensor, places: Tensor) -> Tensor:
    """int64, the same for the same value at the same place, else as good as random."""
    # A multiplication, a shift and another one, as in SplitMix64; integers wrap around.
    mixed = values.to(torch.int64) * _ODD
    mixed.add_(places, alpha=_FIRST).add_(_SECOND)
    shifted = mixed >> 32
    mixed.bitwise_xor_(shifted.bitwise_and_(2**32 - 1)).mul_(_SECOND)
    torch.bitwise_right_shift(mixed, 29, out=shifted)
    return mixed.bitwise_xor_(shifted.bitwise_and_(2**35 - 1))


def _hashes_of_rows(name: str, values: Tensor) -> Tensor:
    """int64 ``[rows]`` hashes of a field's rows, by their bytes."""
    made = [torch.zeros(0, dtype=torch.int64, device="cpu")]
    flat = values.reshape(len(values), math.prod(values.shape[1:]))
    for first in range(0, len(values), _ROWS_AT_ONCE):
        content = flat[first : first + _ROWS_AT_ONCE].contiguous().view(torch.uint8)
        words = pad(content, (0, -content.shape[1] % 8)).view(torch.int64)
        places = torch.arange(words.shape[1], device="cpu") + (zlib.crc32(name.encode()) << 16)
        made.append(_mixed(words, places).sum(1))
    return torch.cat(made)
