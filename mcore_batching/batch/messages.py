"""Small messages over the ranks of a group, in ⌈log2 ranks⌉ rounds of one message each.

gloo's own all-reduce and all-gather use a ring: even a tiny message takes ``2 (ranks - 1)`` or
``ranks - 1`` sends in a row. Here ranks exchange over doubling distances (recursive doubling):

    4 ranks, reduced      0-1 2-3, then 0-2 1-3
    6 ranks, reduced      1 to 0, 3 to 2; 0-2 4-5, 0-4 2-5; 0 to 1, 2 to 3
    6 ranks, gathered     from the next rank, from two further on, from four further on

An agreement reduces one `Summary` per rank:

    rank 0  key a1f3  equal 9c20  maxima 3 7  sums 12        key a1f3  equal 9c20
    rank 1  key a1f3  equal 9c20  maxima 4 5  sums 10   ->   maxima 4 7  sums 22

The result None means only that some ranks differ or failed. The ranks then gather their reports.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

_TAG = 7321  # any but 0, the default that the group's owner may use for messages of its own
_DIGEST_BYTES = 16  # of SHA-256; two different values look equal once in 2**128
_MODULUS = 1 << 8 * _DIGEST_BYTES
NUMBERS_IN_SUMMARY = 100
"""Reductions in the first message; further ones cost a second round of messages."""
_NUMBER_BYTES = 11  # of a pickled float or 64-bit integer, at most
_HEAD_BYTES = 156  # the rest of a pickled summary: its class, two digests, a residue
SUMMARY_BYTES = _HEAD_BYTES + NUMBERS_IN_SUMMARY * _NUMBER_BYTES


def carries_host_messages(group: dist.ProcessGroup) -> bool:
    """True if ranks of the group can send tensors on the host to each other (gloo)."""
    return "cpu:gloo" in str(dist.get_backend_config(group))


class RankMessages:
    """Messages between ranks of a group that `carries_host_messages`: all, or the global ranks
    given."""

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int] | None = None) -> None:
        self._group = group
        self._ranks = dist.get_process_group_ranks(group) if ranks is None else list(ranks)
        self._place = self._ranks.index(dist.get_rank())
        # Kept until the next message: gloo reads the buffer while sending but holds no reference.
        self._leaving = bytearray()

    def reduce(self, own: bytes, combine: Callable[[bytes, bytes], bytes]) -> bytes:
        """The messages of all ranks combined, the same on all. A collective over the ranks.

        All messages are of one length, 1 byte or more; `combine` joins those of lower ranks and of
        the next higher ones into one, and is associative up to rounding.
        """
        size = len(self._ranks)
        # Ranks beyond a power of two: the first `pairs` odd ranks hand theirs to a neighbour first.
        pairs = size - (1 << (size.bit_length() - 1))
        place, value = self._place, own
        if place < 2 * pairs and place % 2:
            self._start(place - 1, value).wait()
            return self._receive(place - 1, len(own))
        if place < 2 * pairs:
            value = combine(value, self._receive(place + 1, len(own)))
        number = place // 2 if place < 2 * pairs else place - pairs
        distance = 1
        while distance < size - pairs:
            other = number ^ distance
            partner = 2 * other if other < pairs else other + pairs
            theirs = self._swap(partner, value, partner, len(own))
            # Lower ranks first on both sides: all ranks end with the same bytes, sums included.
            value = combine(value, theirs) if number < other else combine(theirs, value)
            distance *= 2
        if place < 2 * pairs:
            self._start(place + 1, value).wait()
        return value

    def gather(self, own: bytes) -> list[bytes]:
        """The messages of all ranks, of one length, in their order. A collective over the ranks."""
        size, held = len(self._ranks), own
        while (blocks := len(held) // len(own)) < size:
            # Doubles what is held each time; the last round sends only what is missing.
            sent = held[: min(blocks, size - blocks) * len(own)]
            before, behind = (self._place - blocks) % size, (self._place + blocks) % size
            held += self._swap(before, sent, behind, len(sent))
        first = [held[i : i + len(own)] for i in range(0, len(held), len(own))]
        return first[size - self._place :] + first[: size - self._place]

    def _swap(self, target: int, message: bytes, source: int, length: int) -> bytes:
        # Both in flight at once: two ranks that first send and then receive would wait for ever.
        leaving = self._start(target, message)
        arrived = self._receive(source, length)
        leaving.wait()
        return arrived

    def _start(self, target: int, message: bytes) -> dist.Work:
        self._leaving = bytearray(message)
        tensor = torch.frombuffer(self._leaving, dtype=torch.uint8)
        work = dist.isend(tensor, self._ranks[target], group=self._group, tag=_TAG)
        assert work is not None  # None only outside of the group
        return work

    def _receive(self, source: int, length: int) -> bytes:
        box = bytearray(length)  # lengths are agreed on: no header precedes a message
        tensor = torch.frombuffer(box, dtype=torch.uint8)
        dist.recv(tensor, self._ranks[source], group=self._group, tag=_TAG)
        return bytes(box)


class Summary(NamedTuple):
    """One rank's part in an agreement, or the joined parts of several ranks."""

    key: bytes = b""
    """Digest of the stage and the reductions' shapes; summaries of different keys do not join."""
    equal: bytes = b""
    """Digest of what must be equal on all ranks; empty if the rank leaves it out."""
    residue: int = 0
    """Sums over all ranks to 0 mod 2^128 if the ranks of every replica, and of every stage of it,
    have the same values."""
    maxima: Sequence[Any] = ()
    """Numbers joined by maximum, no NaN."""
    sums: Sequence[Any] = ()
    """Numbers joined by sum."""

    def joined(self, other: Summary) -> Summary | None:
        """Summaries of two sets of ranks, joined; None if they differ."""
        # A rank that names no values is not compared.
        digests = {self.equal, other.equal} - {b""}
        if self.key != other.key or len(digests) > 1:
            return None
        return Summary(
            self.key,
            digests.pop() if digests else b"",
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
        # All of one length, which receivers expect; what is too long for it becomes None, too.
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
