"""One step as a packing rule gets it, and the error of a rule that cannot pack it.

Sizes are padded tokens, the ones that this package's cap counts: a rule that keeps its own cap
keeps this one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mcore_batching.planning import Argument, PlanningError

MicroBatches = list[list[int]]
"""Sample positions of each micro-batch of one rank, in slot order."""


class RuleFailureError(PlanningError):
    """Another framework's rule crashes, asserts or hangs on this input."""


@dataclass(frozen=True, kw_only=True)
class PackingInput:
    """One step's samples and the ranks to pack them for."""

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
    """Micro-batch group size of the interleaved schedule; None without one."""

    def shards(self) -> list[list[int]]:
        """Samples dealt round-robin: rank r has samples r, r + ranks, r + 2·ranks, …"""
        return [list(range(rank, len(self.sizes), self.ranks)) for rank in range(self.ranks)]

    def refuse_oversize(self, how: str) -> None:
        """For rules that do not run a sample over the cap.

        Args:
            how: what the framework does then.

        Raises:
            RuleFailureError: there is one.
        """
        largest = max(self.sizes, default=0)
        if largest > self.capacity:
            raise RuleFailureError(
                f"a sample of {largest} tokens is over the cap of {self.capacity}: {how}; set ",
                Argument("max_tokens_per_gpu"),
                " so that every sample fits",
            )


PackingFunction = Callable[[PackingInput], list[MicroBatches]]
"""Returns the micro-batches of each rank [data_parallel], equally many on all."""


def deal(bins: MicroBatches, ranks: int) -> list[MicroBatches]:
    """Micro-batches dealt round-robin to ranks, with empty ones at the end to even out counts."""
    count = max(1, -(-len(bins) // ranks))
    dealt = [bins[rank::ranks] for rank in range(ranks)]
    return [held + [[] for _ in range(count - len(held))] for held in dealt]


def round_up(value: int, multiple: int | None) -> int:
    """The least multiple that is at least `value`; `value` itself where `multiple` is None."""
    return value if multiple is None else -(-value // multiple) * multiple
