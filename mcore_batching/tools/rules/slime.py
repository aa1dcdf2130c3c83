"""slime's rules: the one of the time of its pull request 1860, and the one that replaced it.

The first assigned samples to ranks by Karmarkar-Karp over tokens and counted micro-batches by
first-fit on each rank. It rounded their maximum over ranks *down* to the interleaved schedule's
group, and partitioned each rank again into that many by Karmarkar-Karp, whatever the cap.

The second runs one first-fit over all samples, splits micro-batches until their count is a multiple
of ranks × group, and assigns equally many to every rank by Karmarkar-Karp over their work.
"""

from __future__ import annotations

from mcore_batching.planning import first_fit
from mcore_batching.tools.rules.differencing import karmarkar_karp
from mcore_batching.tools.rules.packing_input import MicroBatches, PackingInput, RuleFailureError
from mcore_batching.tools.rules.verl import workload


def first_fit_then_parted(given: PackingInput) -> list[MicroBatches]:
    """First-fit for the count, rounded down; Karmarkar-Karp over tokens for the contents.

    Raises:
        RuleFailureError: the samples do not divide by the ranks, or a rank has fewer samples than
            micro-batches.
    """
    sizes = given.sizes
    shards = karmarkar_karp(sizes, given.ranks, equal_count=True)
    count = max(len(_first_fit([sizes[i] for i in shard], given.capacity)) for shard in shards)
    if given.group is not None:
        count = max(1, count // given.group * given.group)
    return [
        [
            [shard[i] for i in part]
            for part in karmarkar_karp([sizes[i] for i in shard], count, equal_count=False)
        ]
        for shard in shards
    ]


def packed_then_dealt(given: PackingInput) -> list[MicroBatches]:
    """First-fit over all samples, split to a multiple of ranks × group, assigned by work.

    Raises:
        RuleFailureError: fewer samples than ranks × group.
    """
    sizes = given.sizes
    bins = _first_fit(sizes, given.capacity)
    multiple = given.ranks * (given.group or 1)
    count = max(1, -(-len(bins) // multiple)) * multiple
    while len(bins) < count:
        splittable = [
            (sum(sizes[i] for i in samples), index)
            for index, samples in enumerate(bins)
            if len(samples) > 1
        ]
        if not splittable:
            raise RuleFailureError(
                f"{len(sizes)} samples cannot make {count} micro-batches (ranks × group size = "
                f"{multiple}); pass {count} samples or more"
            )
        _, index = max(splittable)
        bins[index], other = _halves(bins[index], sizes)
        bins.append(other)
    work = [sum(workload(given.lengths[i]) for i in samples) for samples in bins]
    ranks = karmarkar_karp(work, given.ranks, equal_count=True)
    return [[bins[index] for index in rank] for rank in ranks]


def _first_fit(sizes: tuple[int, ...] | list[int], capacity: int) -> MicroBatches:
    """First-fit in the order of the samples; one over the cap fills a bin by itself."""
    return first_fit([min(size, capacity) for size in sizes], capacity)


def _halves(samples: list[int], sizes: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """A micro-batch in two, longest sample first to the half with fewer tokens."""
    halves: tuple[list[int], list[int]] = ([], [])
    tokens = [0, 0]
    for sample in sorted(samples, key=lambda i: -sizes[i]):
        half = 0 if tokens[0] <= tokens[1] else 1
        halves[half].append(sample)
        tokens[half] += sizes[sample]
    return halves
