"""Small messages over the ranks of a group, in ⌈log2 ranks⌉ rounds of one message each.

gloo's own all-reduce and all-gather use a ring: even a tiny message takes ``2 (ranks - 1)`` or
``ranks - 1`` sends in a row. Here ranks exchange over doubling distances (recursive doubling):

    4 ranks, reduced      0-1 2-3, then 0-2 1-3
    6 ranks, reduced      1 to 0, 3 to 2; 0-2 4-5, 0-4 2-5; 0 to 1, 2 to 3
    6 ranks, gathered     from the next rank, from two further on, from four further on
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

_TAG = 7321  # any but 0, the default that the group's owner may use for messages of its own


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
        box = bytearray(length)  # lengths are agreed on: nobody asks before what comes
        tensor = torch.frombuffer(box, dtype=torch.uint8)
        dist.recv(tensor, self._ranks[source], group=self._group, tag=_TAG)
        return bytes(box)
