"""Identifiers of padding samples, which no real sample has, nor the padding of another batch.

    {"uids": ["a"], "sample_indices": [0], …}
    {"uids": ["padding-a4d1b59e7158-0"], "sample_indices": [-741512389738495]}

They follow from the batch: ranks that pad the same one need not talk to make the same, and batches
that are padded apart may be joined later.
"""

from __future__ import annotations

import hashlib
import operator
from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

_NUMBER_BITS = 12


def new_identifiers(
    batch: Mapping[str, Sequence[Any]], names: Collection[str], count: int
) -> dict[str, list[int | str]]:
    """New values of the named fields, for so many samples.

    Args:
        batch: field name to one value per sample.
        names: fields of the batch.
        count: of the new samples.

    Returns:
        field name to texts; to negative integers of 60 bits where the batch has integers.
    """
    mark = _mark_of(batch, sorted(names)) if count else 0
    made: dict[str, list[int | str]] = {}
    for name in names:
        given = [_plain(value) for value in batch[name] if value is not None]
        if given and all(isinstance(value, int) for value in given):
            made[name] = [-1 - (mark << _NUMBER_BITS) - number for number in range(count)]
        else:
            made[name] = [f"padding-{mark:012x}-{number}" for number in range(count)]
    return made


def _mark_of(batch: Mapping[str, Sequence[Any]], names: Iterable[str]) -> int:
    """48 bits that follow from a batch's lengths, tokens and identifiers."""
    digest = hashlib.sha256()
    for name in ("total_lengths", "response_lengths", *names):
        digest.update(repr((name, [_plain(value) for value in batch[name]])).encode())
    for tokens in batch["tokens"]:
        digest.update(array("q", tokens.tolist()).tobytes())
    return int.from_bytes(digest.digest()[:6])


def _plain(value: Any) -> int | str | None:
    """A number of any library as a Python int, a text as it is; None for all else."""
    try:
        return operator.index(value)
    except TypeError:
        # Others may print as their address, which ranks do not share.
        return str(value) if isinstance(value, str) else None
