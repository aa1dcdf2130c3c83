"""Splitting micro-batches until there are as many as a step needs.

Guarantees: no sample is lost, doubled or added to another's micro-batch, so the cap holds as it
did before; the costliest micro-batch that can be split goes first, so that what is left
is even; splitting stops early only when every micro-batch holds one sample.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

Weight = Callable[[Sequence[int]], float]
"""Weight of a micro-batch, given its sample indices in ascending order."""


def split_until(bins: Sequence[Sequence[int]], count: int, weight: Weight) -> list[list[int]]:
    """Split the heaviest of `bins` in two until there are `count`, or none holds two samples.

    Args:
        bins: sample indices of each micro-batch, ascending.
        count: how many micro-batches are wanted.
        weight: weight of a micro-batch.

    Returns:
        The micro-batches, untouched ones first in their given order, then the halves, heaviest
        first. Between equal weights the one with the lowest sample index goes first.
    """
    if len(bins) >= count:
        return [list(samples) for samples in bins]
    whole = {samples[0]: list(samples) for samples in bins}
    halves: dict[int, list[int]] = {}
    splittable = [(-weight(samples), samples[0]) for samples in bins if len(samples) > 1]
    heapq.heapify(splittable)
    while splittable and len(whole) + len(halves) < count:
        _, first = heapq.heappop(splittable)
        samples = halves.pop(first) if first in halves else whole.pop(first)
        for half in _halve(samples, weight):
            halves[half[0]] = half
            if len(half) > 1:
                heapq.heappush(splittable, (-weight(half), half[0]))
    by_weight = sorted(halves.values(), key=lambda half: (-weight(half), half[0]))
    return [*whole.values(), *by_weight]


def _halve(samples: Sequence[int], weight: Weight) -> tuple[list[int], list[int]]:
    """Deal samples, heaviest first, to the lighter half; on a tie to the one with fewer samples."""
    empty = weight(())
    alone = {sample: weight((sample,)) - empty for sample in samples}
    left: list[int] = []
    right: list[int] = []
    left_weight = right_weight = 0.0
    for sample in sorted(samples, key=lambda sample: (-alone[sample], sample)):
        if (left_weight, len(left)) <= (right_weight, len(right)):
            left.append(sample)
            left_weight += alone[sample]
        else:
            right.append(sample)
            right_weight += alone[sample]
    return sorted(left), sorted(right)
