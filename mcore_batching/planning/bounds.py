"""Lower bounds on how few bins any packing can need.

Guarantees: no packing of the sizes uses fewer bins than `bin_lower_bound`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

from mcore_batching.planning.errors import ItemTooLargeError


def bin_lower_bound(sizes: Sequence[int], capacity: int) -> int:
    """The bound L2 of Martello and Toth (*Knapsack Problems*, 1990, section 8.3), in O(n log n).

    For a threshold t, items over `capacity - t` share a bin with nothing of size t or more, and no
    two items over half a bin share one; what is left of the items of size t or more must fit into
    the room beside the latter or into further bins. L2 is the largest of these counts over all t.

    Args:
        sizes: size of each item [items], 0 or more.
        capacity: size of a bin.

    Raises:
        ItemTooLargeError: an item is larger than `capacity`.
    """
    if not sizes:
        return 0
    if max(sizes) > capacity:
        index = next(i for i, size in enumerate(sizes) if size > capacity)
        raise ItemTooLargeError(index=index, size=sizes[index], capacity=capacity)
    ascending = sorted(sizes)
    prefix = [0, *accumulate(ascending)]
    num_items = len(ascending)
    first_over_half = bisect_right(ascending, capacity // 2)
    best = 1
    for threshold in {0, *ascending[:first_over_half]}:
        first_alone = bisect_right(ascending, capacity - threshold)
        first_small = bisect_left(ascending, threshold)
        first_large = min(first_over_half, first_alone)
        num_large = first_alone - first_large
        room_beside_large = num_large * capacity - (prefix[first_alone] - prefix[first_large])
        small_tokens = prefix[first_large] - prefix[first_small]
        further = max(0, -(-(small_tokens - room_beside_large) // capacity)) if capacity else 0
        best = max(best, num_items - first_large + further)
    return best
