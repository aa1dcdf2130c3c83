"""NeMo-RL's rule: modified first-fit-decreasing (Johnson and Garey, 1985), dealt out to ranks.

Items over half a bin open one each; middle ones (over a third) go beside them; two small ones
(over a sixth) go into those that got none, from the last bin back; then each bin takes the largest
that still fit; what is left is packed into the emptiest bin that has room. The count becomes a
multiple of the ranks by moving single samples out of the bins with most of them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from mcore_batching.tools.rules.problem import MicroBatches, PeerFailureError, Problem, deal


def modified_first_fit_decreasing(problem: Problem) -> list[MicroBatches]:
    """Pack all samples, make the count a multiple of the ranks, deal micro-batches out in turn.

    Raises:
        PeerFailureError: a sample is over the cap, or there are fewer samples than ranks.
    """
    problem.refuse_oversize("NeMo-RL's packer raises")
    bins = _pack(problem.sizes, problem.capacity)
    return deal(_with_multiple(bins, problem.ranks), problem.ranks)


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
    """Each item into the emptiest bin if it fits there, else into a new one; emptiest bin first."""
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
    """As many bins as makes a multiple, each further one with a sample of the fullest by count."""
    target = max(1, -(-len(bins) // multiple)) * multiple
    if sum(map(len, bins)) < target:
        raise PeerFailureError(
            f"{sum(map(len, bins))} samples cannot fill {target} micro-batches (a multiple of the "
            f"{multiple} ranks); pass {target} samples or more"
        )
    further: MicroBatches = []
    by_count = sorted(range(len(bins)), key=lambda i: (-len(bins[i]), -i))
    for index in by_count:
        while len(bins[index]) > 1 and len(bins) + len(further) < target:
            further.append([bins[index].pop()])
    return bins + further
