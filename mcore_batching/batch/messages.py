"""Small messages over the ranks of a group, in ⌈log2 ranks⌉ rounds of one message each.

A reduction over a number of ranks that is no power of two takes one more round before and after.

gloo's own all-reduce and all-gather use a ring: even a tiny message takes ``2 (ranks - 1)`` or
``ranks - 1`` sends in a row. Here ranks exchange over doubling distances (recursive doubling):

    4 ranks, reduced      0-1 2-3, then 0-2 1-3
    6 ranks, reduced      1 to 0, 3 to 2; 0-2 4-5, 0-4 2-5; 0 to 1, 2 to 3
    6 ranks, gathered     from the next rank, from two further on, from four further on

An agreement reduces numbers, maxima and sums of one rank each:

    rank 0  maxima 3 7  sums 12
    rank 1  maxima 4 5  sums 10   ->   maxima 4 7  sums 22
"""

from __future__ import annotations

import hashlib
import operator
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

_TAG = 7321  # any but 0, the default that the group's owner may use for messages of its own
_DIGEST_BYTES = 16  # of SHA-256; two different values look equal once in 2**128
MODULUS = 1 << 8 * _DIGEST_BYTES
NUMBERS_IN_MESSAGE = 100
"""Reductions that a message has room for; with further ones the ranks gather their reports."""
_NUMBER_BYTES = 11  # of a pickled float or 64-bit integer, at most
_HEAD_BYTES = 156  # the rest of a pickled message: four digests, a residue, the lists
MESSAGE_BYTES = _HEAD_BYTES + NUMBERS_IN_MESSAGE * _NUMBER_BYTES
Numbers = tuple[list[Any], list[Any]]
"""Maxima, and sums."""


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


def reduced(messages: RankMessages, own: Numbers | None) -> Numbers | None:
    """The numbers of all ranks, joined; None if any rank's are None, too many, or with a NaN among
    the maxima. Of lists of different lengths the ends are left out. A collective."""
    found: Numbers | None = pickle.loads(messages.reduce(_message(own), _joined))
    return found


def _message(numbers: Numbers | None) -> bytes:
    # The maximum of a NaN and a number depends on their order, so ranks could differ.
    is_ordered = numbers is not None and all(each == each for each in numbers[0])
    message = pickle.dumps(numbers if is_ordered else None)
    # All of one length, which receivers expect; what is too long for it becomes None, too.
    if len(message) > MESSAGE_BYTES:
        message = pickle.dumps(None)
    return message.ljust(MESSAGE_BYTES, b"\0")


def _joined(low: bytes, high: bytes) -> bytes:
    one, other = pickle.loads(low), pickle.loads(high)
    if one is None or other is None:
        return _message(None)
    return _message(([*map(max, one[0], other[0])], [*map(operator.add, one[1], other[1])]))


def digest_of(*texts: Any) -> int:
    """Digest of texts, numbers and dicts of them, independent of a dict's order."""
    # repr, not pickle: its bytes may differ between Python versions.
    parts = [sorted(each.items()) if isinstance(each, Mapping) else each for each in texts]
    digest = hashlib.sha256(repr(parts).encode(errors="surrogatepass")).digest()
    return int.from_bytes(digest[:_DIGEST_BYTES], "little")


def residue_of(what: str, values: Mapping[str, str], number: int, place: int, size: int) -> int:
    """This rank's addend to a sum that is 0 if the ranks of each replica have the same values.

    In a replica of `size` ranks with digest d: (1 - size)·d from the first, d from each other.
    `what` names the partition of the ranks, `place` is this rank's in replica `number`.
    """
    # With the replica's number, so that errors of two replicas cannot cancel.
    digest = digest_of(what, number, values)
    return (digest if place else digest * (1 - size)) % MODULUS
