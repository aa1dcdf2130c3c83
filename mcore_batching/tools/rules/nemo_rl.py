"""NeMo-RL's rule: modified first-fit-decreasing (Johnson and Garey, 1985), dealt to ranks.

1. Each item over half a bin opens a bin.
2. Medium items (over a third) go beside them, one per bin.
3. Pairs of small items (over a sixth) go into the bins that got none, from the last bin back.
4. Each bin takes the largest remaining items that still fit.
5. What is left is packed into the emptiest bin with room.

The count is made a multiple of the ranks by moving single samples out of the bins that hold most.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from mcore_batching.tools.rules.packing_input import (
    MicroBatches,
    PackingInput,
    RuleFailureError,
    deal,
)


def modified_first_fit_decreasing(given: PackingInput) -> list[MicroBatches]:
    """Pack all samples, make the count a multiple of the ranks, deal micro-batches round-robin.

    Raises:
        RuleFailureError: a sample is over the cap, or there are fewer samples than ranks.
    """
    given.refuse_oversize("NeMo-RL's packer raises")
    bins = _pack(given.sizes, given.capacity)
    return deal(_with_multiple(bins, given.ranks), given.ranks)


def _pack(sizes: tuple[int, ...], capacity: int) -> MicroBatches:
    descending = sorted(range(len(sizes)), key=lambda i: -sizes[i])
    large = [i for i in descending if 2 * sizes[i] > capacity]
    medium = [i for i in descending if 2 * sizes[i] <= capacity < 3 * sizes[i]]
    # Ascending sorts are stable as well: equal sizes stay in input order in both directions.
    ascending = sorted(range(len(sizes)), key=lambda i: sizes[i])
    small = [i for i in ascending if 3 * sizes[i] <= capacity < 6 * sizes[i]]
    tiny = [i for i in ascending if 6 * sizes[i] <= capacity]
    bins = [[item] for item in large]
    room = [capacity - sizes[item] for item in large]
    for index, samples in enumerate(bins):
        fitting = next((i for i in medium if sizes[i] <= room[index]), None)
        if fitting is not None:
            medium.remove(fitting)
            samples.append(fitting)
            room[index] -= sizes[fitting]
    for index in reversed(range(len(bins))):
        if len(bins[index]) > 1 or len(small) < 2:
            continue
        if sizes[small[0]] + sizes[small[1]] > room[index]:
            continue
        first = small.pop(0)
        second = next(i for i in reversed(small) if sizes[i] <= room[index] - sizes[first])
        small.remove(second)
        bins[index] += [first, second]
        room[index] -= sizes[first] + sizes[second]
    rest = sorted(medium + small + tiny, key=lambda i: -sizes[i])
    keys = [-sizes[i] for i in rest]
    for index, samples in enumerate(bins):
        while rest:
            largest_fitting = bisect_left(keys, -room[index])
            if largest_fitting == len(rest):
                break
            item = rest.pop(largest_fitting)
            del keys[largest_fitting]
            samples.append(item)
            room[index] -= sizes[item]
    return bins + _into_emptiest(rest, sizes, capacity)


def _into_emptiest(items: list[int], sizes: tuple[int, ...], capacity: int) -> MicroBatches:
    """Bins, emptiest first, after each item went into the emptiest if it fits, else a new one."""
    bins: MicroBatches = []
    filled: list[int] = []
    for item in items:
        samples, tokens = [item], sizes[item]
        if filled and tokens <= capacity - filled[0]:
            samples = [*bins.pop(0), item]
            tokens += filled.pop(0)
        place = bisect_right(filled, tokens)
        bins.insert(place, samples)
        filled.insert(place, tokens)
    return bins


def _with_multiple(bins: MicroBatches, multiple: int) -> MicroBatches:
    """Add bins up to a multiple, each with one sample taken from the bin that holds most."""
    target = max(1, -(-len(bins) // multiple)) * multiple
    if sum(map(len, bins)) < target:
        raise RuleFailureError(
            f"{sum(map(len, bins))} samples cannot fill {target} micro-batches (a multiple of the "
            f"{multiple} ranks); pass {target} samples or more"
        )
    further: MicroBatches = []
    by_count = sorted(range(len(bins)), key=lambda i: (-len(bins[i]), -i))
    for index in by_count:
        while len(bins[index]) > 1 and len(bins) + len(further) < target:
            further.append([bins[index].pop()])
    return bins + further
