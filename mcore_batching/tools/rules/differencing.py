"""The largest differencing method (Karmarkar and Karp, 1982), in the form that RL frameworks share.

Every partial solution is a row of sets. The two with the widest spread are merged, heaviest set of
one with lightest of the other, until one is left. Ties are broken as verl breaks them, so that
partitions agree set by set. Empty sets are not stored: with many parts most of them are empty.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from mcore_batching.tools.rules.packing_input import RuleFailureError

_Set = tuple[int, int, list[int]]
"""Sum, number of items, items in the order in which they came together."""


def karmarkar_karp(values: Sequence[int], parts: int, *, equal_count: bool) -> list[list[int]]:
    """Partition items into parts of nearly equal sums.

    Values 8 7 6 5 4 in two parts give 8+6 and 7+5+4: sums of 14 and 16.

    Args:
        values: weight of each item [items], 0 or more.
        parts: number of parts.
        equal_count: give every part equally many items.

    Returns:
        indices of each part's items, ascending; heaviest part first.

    Raises:
        RuleFailureError: fewer items than parts, or, with `equal_count`, items that do not divide
            by `parts`.
    """
    if len(values) < parts:
        raise RuleFailureError(
            f"{len(values)} items cannot fill {parts} parts; pass {parts} items or more"
        )
    if equal_count and len(values) % parts:
        raise RuleFailureError(
            f"{len(values)} items do not divide by {parts}; pass a multiple of {parts}"
        )
    ascending = sorted(range(len(values)), key=lambda item: (values[item], item))
    width = parts if equal_count else 1
    heap = [
        _entry([(values[item], 1, [item]) for item in ascending[first : first + width]], parts)
        for first in range(0, len(ascending), width)
    ]
    heapq.heapify(heap)
    while len(heap) > 1:
        heavy, light = heapq.heappop(heap)[-1], heapq.heappop(heap)[-1]
        heapq.heappush(heap, _entry(_merged(heavy, light, parts), parts))
    return [sorted(items) for _, _, items in heap[0][-1]]


def _entry(sets: list[_Set], parts: int) -> tuple[int, int, int, int, list[_Set]]:
    """An entry of the heap, ordered by widest spread, then by largest first set."""
    sets.sort(reverse=True)
    total, count, items = sets[0]
    least = sets[-1][0] if len(sets) == parts else 0
    return least - total, -total, -count, -items[0], sets


def _merged(left: list[_Set], right: list[_Set], parts: int) -> list[_Set]:
    """Set i of one joined with set `parts - 1 - i` of the other, wherever either is not empty."""
    merged = []
    first_right = parts - len(right)
    for position in sorted({*range(len(left)), *range(first_right, parts)}):
        total, count, items = left[position] if position < len(left) else (0, 0, [])
        if position >= first_right:
            other = right[parts - 1 - position]
            total, count, items = total + other[0], count + other[1], items + other[2]
        merged.append((total, count, items))
    return merged
