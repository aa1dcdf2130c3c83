"""Chains of passes of a pipeline that is being changed, and what they say of a change.

A pipeline ends no sooner than any of its chains takes, each a sum of weights times costs of
micro-batches (`Clock`). Where they let one cost no more, no change that makes it cost more
needs to be simulated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

MOST_CHAINS = 32
"""Chains that are remembered of each pipeline."""

Room = tuple[float, float]
"""What a micro-batch may cost more: that by which the step ends soonest, and the most by which it
ends in time."""


class Chains:
    """The chains of a pipeline that were found last."""

    def __init__(self) -> None:
        self._chains: list[list[float]] = []

    def __iter__(self) -> Iterator[list[float]]:
        """Weights of micro-batches on each chain, and last how long it is."""
        return iter(self._chains)

    def remember(self, weights: Sequence[float], costs: Sequence[float]) -> None:
        """Add a chain with these weights of micro-batches, which cost so much."""
        length = 0.0
        for weight, cost in zip(weights, costs, strict=True):
            length += weight * cost
        self.add(weights, length)

    def add(self, weights: Sequence[float], length: float) -> None:
        """Add a chain with these weights of micro-batches, and so long."""
        self._chains.insert(0, [*weights, length])
        del self._chains[MOST_CHAINS:]

    def change(self, at: int, more: float, other: int, other_more: float) -> None:
        """Let a micro-batch cost so much more, and another (or the same)."""
        for chain in self._chains:
            chain[-1] += more * chain[at] + other_more * chain[other]

    def soonest(self, at: int, more: float, other: int, other_more: float, limit: float) -> float:
        """A time before which the pipeline does not end after such a change; the first found beyond
        `limit`."""
        latest = 0.0
        for number, chain in enumerate(self._chains):
            end = chain[-1] + more * chain[at] + other_more * chain[other]
            if end > latest:
                if end > limit:
                    self._use_first(number)
                    return end
                latest = end
        return latest

    def room(self, place: int, slope: float, least: float, end: float) -> Room | None:
        """How much a micro-batch may cost more if another pipeline ends `slope` times that sooner.

        Args:
            place: of the micro-batch.
            slope: of the other pipeline's end, which is `end` at most.
            least: None is returned if it may not cost so much more.
            end: by which both are to end.
        """
        even = most = end
        for number, chain in enumerate(self._chains):
            weight, left = chain[place], end - chain[-1]
            if weight <= 0.0:
                continue
            if left < weight * most:
                most = left / weight
                if most < least:
                    self._use_first(number)
                    return None
            weight += slope
            if left < weight * even:
                even = left / weight
        return even, most

    def room_within(
        self, at: int, place: int, slope: float, least: float, end: float
    ) -> Room | None:
        """How much a micro-batch may cost more, if another of the pipeline costs as much less.

        Args:
            at: place of the one that costs less.
            place: of the one that costs more.
            slope: so many times that cost the longest chain loses.
            least: None is returned if it may not cost so much more.
            end: by which the pipeline is to end.
        """
        even = most = end
        for number, chain in enumerate(self._chains):
            weight = chain[place] - chain[at]
            if weight > 0.0:
                left = end - chain[-1]
                if left < weight * most:
                    most = left / weight
                    if most < least:
                        self._use_first(number)
                        return None
                weight += slope
                if weight > 0.0 and left < weight * even:
                    even = left / weight
        return even, most

    def _use_first(self, number: int) -> None:
        """Look at a chain first: what refused a change is likely to refuse the next as well."""
        if number:
            self._chains.insert(0, self._chains.pop(number))
