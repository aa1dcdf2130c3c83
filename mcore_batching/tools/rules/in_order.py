"""Rules that pack without looking at ranks: next-fit, first-fit and best-fit."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict, deque

from mcore_batching.planning.packing import first_fit
from mcore_batching.tools.rules.problem import MicroBatches, PeerFailureError, Problem, deal


def next_fit(problem: Problem) -> list[MicroBatches]:
    """Megatron-Core's `dp_balanced`: close a micro-batch once the next sample does not fit.

    The count becomes a multiple of ranks x group by moving samples off the end, one by one into
    micro-batches of their own.

    Raises:
        PeerFailureError: a sample is over the cap, or there are too few samples to move.
    """
    problem.refuse_oversize("Megatron-Core's scheduler packs it regardless, or an empty row first")
    sizes = problem.sizes
    bins: MicroBatches = []
    room = -1
    for sample, size in enumerate(sizes):
        if size > room:
            bins.append([])
            room = problem.capacity
        bins[-1].append(sample)
        room -= size
    multiple = problem.ranks * (problem.group or 1)
    target = max(1, -(-len(bins) // multiple)) * multiple
    last = len(bins) - 1
    while len(bins) < target:
        while last > 0 and len(bins[last]) == 1:
            last -= 1
        if last <= 0:
            raise PeerFailureError(
                f"{len(sizes)} samples are not enough to move for {target} micro-batches (ranks x "
                f"group size = {multiple}); pass more samples"
            )
        bins.append([bins[last].pop()])
    return deal(bins, problem.ranks)


def first_fit_in_order(problem: Problem) -> list[MicroBatches]:
    """First-fit over all samples, micro-batches dealt out in turn, empty ones at the end.

    A sample over the cap runs alone.
    """
    capacity = problem.capacity
    bins = first_fit([min(size, capacity) for size in problem.sizes], capacity)
    return deal(bins, problem.ranks)


def best_fit_decreasing(problem: Problem) -> list[MicroBatches]:
    """TRL's packing: longest first into the fullest micro-batch with room, the oldest on a tie.

    TRL packs a data set and leaves ranks to the loader: micro-batches are dealt out in turn here,
    and empty ones stand in where its sampler would repeat some.

    Raises:
        PeerFailureError: a sample is over the cap.
    """
    problem.refuse_oversize("TRL cuts it, losing tokens, or splits it in two samples")
    return deal(best_fit_bins(problem.sizes, problem.capacity), problem.ranks)


def best_fit_bins(sizes: tuple[int, ...], capacity: int) -> MicroBatches:
    """Bins of best-fit-decreasing in the order in which they were opened."""
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
