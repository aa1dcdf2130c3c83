"""Identifiers of padding samples, different from those of real samples and of other batches.

    {"uids": ["a"], "sample_indices": [0], …}
    {"uids": ["padding-a4d1b59e7158-0"], "sample_indices": [-741512389738495]}

They are derived from a hash of the batch: ranks that pad the same batch get the same ones without
communication, and batches that are padded separately can be joined later.
"""

from __future__ import annotations

import hashlib
import operator
from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

_NUMBER_BITS = 12
"""Low bits of an integer identifier, below the hash: numbers for 4,096 padding samples. With the
48 bits of the hash an identifier still fits into int64, sign included."""


def new_identifiers(
    batch: Mapping[str, Sequence[Any]], names: Collection[str], count: int
) -> dict[str, list[int | str]]:
    """New values of the named fields, for ``count`` padding samples.

    Args:
        batch: field name to one value per sample.
        names: fields of the batch.
        count: number of padding samples.

    Returns:
        field name to strings, or to negative 60-bit integers where the batch has integers.
    """
    # From a hash of the batch, not at random: ranks that pad the same batch agree without a word.
    mark = _mark_of(batch, sorted(names)) if count else 0
    made: dict[str, list[int | str]] = {}
    for name in names:
        given = [_plain(value) for value in batch[name] if value is not None]
        # Negative, where frameworks number from 0; of the batch's type, so that lists still stack.
        if given and all(isinstance(value, int) for value in given):
            made[name] = [-1 - (mark << _NUMBER_BITS) - number for number in range(count)]
        else:
            made[name] = [f"padding-{mark:012x}-{number}" for number in range(count)]
    return made


def _mark_of(batch: Mapping[str, Sequence[Any]], names: Iterable[str]) -> int:
    """48-bit hash of a batch's lengths, tokens and identifiers."""
    digest = hashlib.sha256()
    for name in ("total_lengths", "response_lengths", *names):
        digest.update(repr((name, [_plain(value) for value in batch[name]])).encode())
    # As 64-bit integers: batches of lists and of int32 tensors have the same mark.
    for tokens in batch["tokens"]:
        digest.update(array("q", tokens.tolist()).tobytes())
    return int.from_bytes(digest.digest()[:6])


def _plain(value: Any) -> int | str | None:
    """An integer of any library as a Python int, a string as it is; None for anything else."""
    try:
        return operator.index(value)
    except TypeError:
        # Others may print as their address, which ranks do not share.
        return str(value) if isinstance(value, str) else None
