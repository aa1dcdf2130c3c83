"""Rules that pack all samples first, then deal micro-batches to ranks: next-fit and relatives."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict, deque

from mcore_batching.planning import first_fit
from mcore_batching.tools.rules.packing_input import (
    MicroBatches,
    PackingInput,
    RuleFailureError,
    deal,
)


def next_fit(given: PackingInput) -> list[MicroBatches]:
    """Megatron-Core's `dp_balanced`: close a micro-batch once the next sample does not fit.

    The count is made a multiple of ranks × group by moving samples off the end, each into a
    micro-batch of its own.

    Raises:
        RuleFailureError: a sample is over the cap, or there are too few samples to move.
    """
    given.refuse_oversize("Megatron-Core's scheduler packs it regardless, or an empty row first")
    sizes = given.sizes
    bins: MicroBatches = []
    room = -1
    for sample, size in enumerate(sizes):
        if size > room:
            bins.append([])
            room = given.capacity
        bins[-1].append(sample)
        room -= size
    multiple = given.ranks * (given.group or 1)
    target = max(1, -(-len(bins) // multiple)) * multiple
    last = len(bins) - 1
    while len(bins) < target:
        while last >= 0 and len(bins[last]) == 1:
            last -= 1
        if last < 0:
            raise RuleFailureError(
                f"{len(sizes)} samples are not enough to move for {target} micro-batches (ranks × "
                f"group size = {multiple}); pass more samples"
            )
        bins.append([bins[last].pop()])
    return deal(bins, given.ranks)


def first_fit_in_order(given: PackingInput) -> list[MicroBatches]:
    """First-fit over all samples in order; a sample over the cap runs alone."""
    capacity = given.capacity
    bins = first_fit([min(size, capacity) for size in given.sizes], capacity)
    return deal(bins, given.ranks)


def best_fit_decreasing(given: PackingInput) -> list[MicroBatches]:
    """TRL's packing: longest first into the fullest micro-batch with room, the oldest on a tie.

    TRL packs a data set and leaves ranks to the data loader. Here micro-batches are dealt
    round-robin, with empty ones where its sampler would repeat some.

    Raises:
        RuleFailureError: a sample is over the cap.
    """
    given.refuse_oversize("TRL cuts it, losing tokens, or splits it in two samples")
    return deal(best_fit_bins(given.sizes, given.capacity), given.ranks)


def best_fit_bins(sizes: tuple[int, ...], capacity: int) -> MicroBatches:
    """Bins of best-fit-decreasing, in the order in which they were opened."""
    bins: MicroBatches = []
    spaces: list[int] = []
    with_space: defaultdict[int, deque[list[int]]] = defaultdict(deque)
    for item in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        place = bisect_left(spaces, sizes[item])
        if place == len(spaces):
            space, samples = capacity, list[int]()
            bins.append(samples)
        else:
            space = spaces[place]
            samples = with_space[space].popleft()
            if not with_space[space]:
                del spaces[place]
        samples.append(item)
        left = space - sizes[item]
        if left > 0:
            if not with_space[left]:
                insort(spaces, left)
            with_space[left].append(samples)
    return bins
