"""Summaries of the ranks' statements: messages of a fixed size that are joined pairwise.

    rank 0  key a1f3  equal 9c20  maxima 3 7  sums 12        key a1f3  equal 9c20
    rank 1  key a1f3  equal 9c20  maxima 4 5  sums 10   ->   maxima 4 7  sums 22

None in their place says only that some differ or failed: which ones, and in what, the statements
tell.
"""

from __future__ import annotations

import hashlib
import pickle
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mcore_batching.batch.agreement.rank_messages import RankMessages
from mcore_batching.batch.errors import CollectiveError, readable

_DIGEST_BYTES = 16  # of SHA-256; two different values look equal once in 2**128
_MODULUS = 1 << 8 * _DIGEST_BYTES
NUMBERS_IN_SUMMARY = 100
"""Figures in the first message; further ones cost a second round of messages."""
_NUMBER_BYTES = 11  # of a pickled float or 64-bit integer, at most
_HEAD_BYTES = 166  # the rest of a pickled summary: its class, two digests, a residue
SUMMARY_BYTES = _HEAD_BYTES + NUMBERS_IN_SUMMARY * _NUMBER_BYTES


class Summary(NamedTuple):
    """A rank's part in an agreement, or that of several ranks."""

    key: bytes = b""
    """Digest of the stage and the figures' shapes; summaries of different keys do not join."""
    equal: bytes = b""
    """Digest of what must be equal on all ranks; empty if the rank leaves it out."""
    residue: int = 0
    """Sums over all ranks to 0 mod 2^128 if the ranks of every replica, and of every stage of it,
    say the same."""
    maxima: Sequence[Any] = ()
    """Numbers joined by maximum, no NaN."""
    sums: Sequence[Any] = ()
    """Numbers joined by sum."""

    def joined(self, other: Summary) -> Summary | None:
        """Summaries of two sets of ranks, joined; None if they differ."""
        # A rank that names no values is not compared.
        said = {self.equal, other.equal} - {b""}
        if self.key != other.key or len(said) > 1:
            return None
        return Summary(
            self.key,
            said.pop() if said else b"",
            (self.residue + other.residue) % _MODULUS,
            [max(pair) for pair in zip(self.maxima, other.maxima, strict=True)],
            [sum(pair) for pair in zip(self.sums, other.sums, strict=True)],
        )


def reduced(messages: RankMessages, own: Summary | None, num_numbers: int) -> Summary | None:
    """The summaries of all ranks, joined; None if they differ or any is None. A collective;
    `num_numbers`, the most numbers of a summary, is the same on every rank."""
    size = _HEAD_BYTES + _NUMBER_BYTES * num_numbers

    def sent(summary: Summary | None) -> bytes:
        # The maximum of a NaN and a number depends on their order, so ranks could differ.
        is_ordered = summary is not None and all(each == each for each in summary.maxima)
        message = pickle.dumps(summary if is_ordered else None)
        # All of one length, as receivers do not ask; what is too long for it says None, too.
        return (message if len(message) <= size else pickle.dumps(None)).ljust(size, b"\0")

    def combine(low: bytes, high: bytes) -> bytes:
        one, other = pickle.loads(low), pickle.loads(high)
        return sent(None if one is None or other is None else one.joined(other))

    found: Summary | None = pickle.loads(messages.reduce(sent(own), combine))
    return found


def digest_of(*texts: Any) -> bytes:
    """Digest of texts, numbers and dicts of them, independent of a dict's order."""
    # repr, not pickle, whose bytes may differ between Python versions.
    parts = [sorted(each.items()) if isinstance(each, Mapping) else each for each in texts]
    return hashlib.sha256(repr(parts).encode(errors="surrogatepass")).digest()[:_DIGEST_BYTES]


def residue_of(what: str, values: Mapping[str, str], number: int, place: int, size: int) -> int:
    """This rank's addend to a sum that is 0 if the ranks of each replica have the same values.

    In a replica of `size` ranks with digest d: (1 - size)·d from the first, d from each other.
    `what` names the partition of the ranks, `place` is this rank's in replica `number`.
    """
    # With the replica's number, so that errors of two replicas cannot cancel.
    digest = int.from_bytes(digest_of(what, number, values), "little")
    return (digest if place else digest * (1 - size)) % _MODULUS


def require_equal(said: Mapping[int, Mapping[str, str]], mismatch: type[CollectiveError]) -> None:
    """Raise `mismatch` if any values by rank and name differ."""
    failures = differences(said)
    if failures:
        raise mismatch(failures)


def differences(said: Mapping[int, Mapping[str, str]]) -> dict[int, str]:
    """For each rank with another value than most: the names, its values and the usual ones."""
    failures: dict[int, list[str]] = {}
    for name in sorted({name for values in said.values() for name in values}):
        by_rank = {rank: values[name] for rank, values in said.items() if name in values}
        usual = Counter(by_rank.values()).most_common(1)[0][0]  # ties: the first rank's
        # A rank to look at: "on rank 0 it is 8" can be checked in its log.
        witness = next(rank for rank, value in by_rank.items() if value == usual)
        for rank, value in by_rank.items():
            if value != usual:
                failures.setdefault(rank, []).append(
                    f"{name} is {value}, on rank {witness} it is {usual}"
                )
    return {rank: readable("; ".join(texts)) for rank, texts in failures.items()}
