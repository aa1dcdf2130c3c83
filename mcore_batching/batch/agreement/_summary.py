"""Summaries of the ranks' statements: messages of a fixed size that are joined pairwise.

    rank 0  key a1f3  equal 9c20  maxima 3 7  sums 12        key a1f3  equal 9c20
    rank 1  key a1f3  equal 9c20  maxima 4 5  sums 10   ->   maxima 4 7  sums 22

A joined summary says that all ranks agree, with their maxima and sums, or only that some differ.
Which ones, and in what, the statements themselves tell.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from mcore_batching.batch.agreement.rank_messages import RankMessages

_DIGEST_BYTES = 16  # of SHA-256; two different values look equal once in 2**128
_MODULUS = 1 << 8 * _DIGEST_BYTES
_NOTHING = bytes(_DIGEST_BYTES)
_HEAD = struct.Struct(f"<?{_DIGEST_BYTES}s{_DIGEST_BYTES}s{_DIGEST_BYTES}s")
NUMBERS_IN_SUMMARY = 100
"""Figures in the first message (1 KB); further ones cost a second round of messages."""
_NUMBER_BYTES = 9  # a letter for the type, 8 for the value
SUMMARY_BYTES = _HEAD.size + 1 + NUMBERS_IN_SUMMARY * _NUMBER_BYTES


@dataclass(frozen=True)
class Numbers:
    """Numbers to be joined over ranks, by maximum and by sum.

    Attributes:
        maxima: int or float, no NaN.
        sums: int or float.
        fit: False if a number cannot be sent in 8 bytes, or is a NaN among the maxima; all others
            are meaningless then.
    """

    maxima: Sequence[Any] = ()
    sums: Sequence[Any] = ()
    fit: bool = True

    def joined(self, other: Numbers) -> Numbers:
        """Numbers of two sets of ranks, joined."""
        if not (self.fit and other.fit):
            return Numbers(fit=False)
        return Numbers(
            [max(pair) for pair in zip(self.maxima, other.maxima, strict=True)],
            [sum(pair) for pair in zip(self.sums, other.sums, strict=True)],
        )

    def message(self) -> bytes:
        """``fit``, then a letter and 8 bytes for each number."""
        numbers = [*self.maxima, *self.sums]
        unfit = bytes(1 + _NUMBER_BYTES * len(numbers))
        if not self.fit or not all(isinstance(number, int | float) for number in numbers):
            return unfit
        if any(number != number for number in self.maxima):
            return unfit
        # Integers stay integers: as floats they would lose digits beyond 2^53.
        kinds = "".join("d" if isinstance(number, float) else "q" for number in numbers)
        try:
            return b"\1" + kinds.encode() + struct.pack(f"<{kinds}", *numbers)
        except struct.error:  # an integer of more than 64 bits
            return unfit

    def like(self, message: bytes) -> Numbers:
        """Another rank's numbers, read from its message; the same count as these."""
        if not message[0]:
            return Numbers(fit=False)
        count, most = len(self.maxima) + len(self.sums), len(self.maxima)
        kinds = message[1 : 1 + count].decode()
        numbers = struct.unpack_from(f"<{kinds}", message, 1 + count)
        return Numbers(numbers[:most], numbers[most:])

    def followed_by(self, others: Numbers) -> Numbers:
        """The inverse of `split`."""
        return Numbers([*self.maxima, *others.maxima], [*self.sums, *others.sums])

    def split(self, count: int) -> tuple[Numbers, Numbers]:
        """The first numbers, and those behind them."""
        most = min(count, len(self.maxima))
        head = Numbers(self.maxima[:most], self.sums[: count - most])
        return head, Numbers(self.maxima[most:], self.sums[count - most :])


@dataclass(frozen=True)
class Summary:
    """A rank's part in an agreement, or that of several ranks.

    Attributes:
        key: digest of the stage and the figures' shapes; summaries of different keys do not join.
        equal: digest of what must be equal on all ranks; zeros if the rank leaves it out.
        residue: sums over all ranks to 0 mod 2^128 if the ranks of every replica, and of every
            stage of it, say the same.
        numbers: at most `NUMBERS_IN_SUMMARY`.
        settles: False if the statements must be gathered; all else is meaningless then.
    """

    key: bytes = _NOTHING
    equal: bytes = _NOTHING
    residue: int = 0
    numbers: Numbers = Numbers()
    settles: bool = True

    def joined(self, other: Summary) -> Summary:
        """Summaries of two sets of ranks, joined."""
        # A rank that names no values is not compared.
        said = {self.equal, other.equal} - {_NOTHING}
        if not (self.settles and other.settles) or self.key != other.key or len(said) > 1:
            return Summary(settles=False)
        return Summary(
            self.key,
            said.pop() if said else _NOTHING,
            (self.residue + other.residue) % _MODULUS,
            self.numbers.joined(other.numbers),
        )

    def message(self) -> bytes:
        """`SUMMARY_BYTES` bytes."""
        residue = (self.residue % _MODULUS).to_bytes(_DIGEST_BYTES, "little")
        head = _HEAD.pack(self.settles, self.key, self.equal, residue)
        return (head + self.numbers.message()).ljust(SUMMARY_BYTES, b"\0")

    def like(self, message: bytes) -> Summary:
        """Another rank's summary, read from its message."""
        settles, key, equal, residue = _HEAD.unpack_from(message)
        # Of another stage, or with other figures: its numbers cannot be read by these shapes.
        if not settles or key != self.key:
            return Summary(key, settles=settles)
        numbers = self.numbers.like(message[_HEAD.size :])
        return Summary(key, equal, int.from_bytes(residue, "little"), numbers)


Kind = TypeVar("Kind", Numbers, Summary)


def reduced(messages: RankMessages, own: Kind) -> Kind:
    """The numbers or summaries of all ranks, joined. A collective over the group.

    Args:
        messages: between the ranks.
        own: this rank's.
    """
    size = len(own.message())  # the same on every rank, as `RankMessages.reduce` requires

    def joined(low: bytes, high: bytes) -> bytes:
        return own.like(low).joined(own.like(high)).message().ljust(size, b"\0")

    return own.like(messages.reduce(own.message(), joined))


def digest_of(*texts: Any) -> bytes:
    """Digest of texts, numbers and dicts of them, independent of a dict's order."""
    # repr, not pickle, whose bytes may differ between Python versions.
    parts = [sorted(each.items()) if isinstance(each, Mapping) else each for each in texts]
    return hashlib.sha256(repr(parts).encode(errors="surrogatepass")).digest()[:_DIGEST_BYTES]


def digest_if_any(values: Mapping[str, str]) -> bytes:
    """Digest of some values; of none zeros, which are not compared."""
    return digest_of(values) if values else _NOTHING


def residue_of(what: str, values: Mapping[str, str], number: int, place: int, size: int) -> int:
    """This rank's addend to a sum that is 0 if the ranks of each replica have the same values.

    In a replica of n ranks with digest d: (1 - n)·d from the first, d from each of the others.

    Args:
        what: "replica", or another partition of the ranks.
        values: what must be the same.
        number: of the replica.
        place: this rank's in the replica.
        size: ranks of the replica.
    """
    # With the replica's number, so that errors of two replicas cannot cancel.
    digest = int.from_bytes(digest_of(what, number, values), "little")
    return (digest if place else digest * (1 - size)) % _MODULUS
