"""What a peer's rule is given, and how it says that it cannot plan.

Guarantees: sizes are those that the cap counts, so that a rule which keeps its own cap keeps ours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mcore_batching.planning.errors import PlanningError

MicroBatches = list[list[int]]
"""Sample positions of each micro-batch of one rank, in slot order."""


class PeerFailureError(PlanningError):
    """A peer's rule crashes, asserts or hangs on this input, where ours gives a plan."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One step, as rules of packing see it."""

    sizes: tuple[int, ...]
    """Padded tokens of each sample [samples]."""
    lengths: tuple[int, ...]
    """Tokens of each sample [samples]."""
    capacity: int
    """Most padded tokens of a micro-batch."""
    ranks: int
    """Data-parallel ranks."""
    stages: int
    """Pipeline stages."""
    group: int | None
    """Micro-batches that an interleaved schedule runs as a group; None without one."""

    def shards(self) -> list[list[int]]:
        """Samples dealt out to ranks like cards: rank r has r, r + ranks, …"""
        return [list(range(rank, len(self.sizes), self.ranks)) for rank in range(self.ranks)]

    def refuse_oversize(self, how: str) -> None:
        """For rules that do not run a sample over the cap.

        Args:
            how: what the peer does then.

        Raises:
            PeerFailureError: there is one.
        """
        largest = max(self.sizes, default=0)
        if largest > self.capacity:
            raise PeerFailureError(
                f"a sample of {largest} tokens is over the cap of {self.capacity}: {how}; set "
                f"max_tokens_per_gpu so that every sample fits"
            )


Rule = Callable[[Problem], list[MicroBatches]]
"""From a problem to `[data_parallel]` lists of micro-batches, equally long."""


def deal(bins: MicroBatches, ranks: int) -> list[MicroBatches]:
    """Micro-batches to ranks in turn, empty ones at the end where they do not come out even."""
    count = max(1, -(-len(bins) // ranks))
    dealt = [bins[rank::ranks] for rank in range(ranks)]
    return [held + [[] for _ in range(count - len(held))] for held in dealt]


def round_up(value: int, multiple: int | None) -> int:
    """The least multiple that is at least `value`; `value` itself without one."""
    return value if multiple is None else -(-value // multiple) * multiple
