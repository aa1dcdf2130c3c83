"""slime's rules: that of pull request 1860's time, and the one that came after.

At first, samples were shared out to ranks by Karmarkar-Karp over tokens, first-fit on each rank
gave a number of micro-batches, their maximum over ranks was rounded *down* to the interleaved
schedule's group, and each rank was parted anew into that many by Karmarkar-Karp, whatever the cap.
Now one first-fit over all samples is brought to a multiple of ranks x group by splitting, and
micro-batches are shared out by Karmarkar-Karp over their work, as many to every rank.
"""

from __future__ import annotations

from mcore_batching.planning.packing import first_fit
from mcore_batching.tools.rules.differencing import karmarkar_karp
from mcore_batching.tools.rules.problem import MicroBatches, PeerFailureError, Problem
from mcore_batching.tools.rules.verl import workload


def first_fit_then_parted(problem: Problem) -> list[MicroBatches]:
    """First-fit for the count, rounded down; Karmarkar-Karp over tokens for the contents.

    Raises:
        PeerFailureError: samples do not divide by ranks, or a rank has fewer than micro-batches.
    """
    sizes = problem.sizes
    shards = karmarkar_karp(sizes, problem.ranks, equal_count=True)
    count = max(len(_first_fit([sizes[i] for i in shard], problem.capacity)) for shard in shards)
    if problem.group is not None:
        count = max(1, count // problem.group * problem.group)
    return [
        [
            [shard[i] for i in part]
            for part in karmarkar_karp([sizes[i] for i in shard], count, equal_count=False)
        ]
        for shard in shards
    ]


def packed_then_dealt(problem: Problem) -> list[MicroBatches]:
    """First-fit over all samples, split to a multiple of ranks x group, shared out by work.

    Raises:
        PeerFailureError: fewer samples than ranks x group.
    """
    sizes = problem.sizes
    bins = _first_fit(sizes, problem.capacity)
    multiple = problem.ranks * (problem.group or 1)
    count = max(1, -(-len(bins) // multiple)) * multiple
    while len(bins) < count:
        splittable = [
            (sum(sizes[i] for i in samples), index)
            for index, samples in enumerate(bins)
            if len(samples) > 1
        ]
        if not splittable:
            raise PeerFailureError(
                f"{len(sizes)} samples cannot make {count} micro-batches (ranks x group size = "
                f"{multiple}); pass {count} samples or more"
            )
        _, index = max(splittable)
        bins[index], other = _halves(bins[index], sizes)
        bins.append(other)
    work = [sum(workload(problem.lengths[i]) for i in samples) for samples in bins]
    ranks = karmarkar_karp(work, problem.ranks, equal_count=True)
    return [[bins[index] for index in rank] for rank in ranks]


def _first_fit(sizes: tuple[int, ...] | list[int], capacity: int) -> MicroBatches:
    """First-fit in the order of the samples, in which one over the cap fills a bin by itself."""
    return first_fit([min(size, capacity) for size in sizes], capacity)


def _halves(samples: list[int], sizes: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Longest first to the half with fewer tokens."""
    halves: tuple[list[int], list[int]] = ([], [])
    tokens = [0, 0]
    for sample in sorted(samples, key=lambda i: -sizes[i]):
        half = 0 if tokens[0] <= tokens[1] else 1
        halves[half].append(sample)
        tokens[half] += sizes[sample]
    return halves
