"""AReaL's rule: samples are assigned to ranks, then packed on each by first-fit-decreasing.

A sample opens a new micro-batch until there are as many as a minimum, twice the pipeline's stages
if there is more than one stage. After that it goes, of those with room, to the micro-batch with the
fewest samples, on a tie to the emptiest. The minimum is raised to a multiple of the stages, and to
the maximum over ranks, until all ranks have the same count.
"""

from __future__ import annotations

from bisect import bisect_right, insort

from mcore_batching.tools.rules.packing_input import (
    MicroBatches,
    PackingInput,
    RuleFailureError,
    round_up,
)


def dealt(given: PackingInput) -> list[MicroBatches]:
    """Samples dealt round-robin to ranks.

    Raises:
        RuleFailureError: a sample is over the cap, or a rank has fewer samples than micro-batches.
    """
    return _pack_shards(given, given.shards())


def balanced(given: PackingInput) -> list[MicroBatches]:
    """Longest sample first to the rank with the fewest tokens, equally many samples to each.

    Raises:
        RuleFailureError: as `dealt`, or the samples do not divide by the ranks.
    """
    if len(given.sizes) % given.ranks or not given.sizes:
        raise RuleFailureError(
            f"{len(given.sizes)} samples do not divide by {given.ranks} ranks; pass a multiple "
            f"of {given.ranks}"
        )
    each = len(given.sizes) // given.ranks
    shards: MicroBatches = [[] for _ in range(given.ranks)]
    tokens = [0] * given.ranks
    for sample in sorted(range(len(given.sizes)), key=lambda i: -given.sizes[i]):
        rank = min(
            (r for r in range(given.ranks) if len(shards[r]) < each), key=lambda r: tokens[r]
        )
        shards[rank].append(sample)
        tokens[rank] += given.sizes[sample]
    return _pack_shards(given, shards)


def _pack_shards(given: PackingInput, shards: MicroBatches) -> list[MicroBatches]:
    given.refuse_oversize("AReaL's packer raises")
    minimum = 2 * given.stages if given.stages > 1 else 1
    while True:
        ranks = [_pack_shard(given, shard, minimum) for shard in shards]
        most = max(map(len, ranks))
        if all(len(rank) == most for rank in ranks):
            return ranks
        minimum = most


def _pack_shard(given: PackingInput, shard: list[int], minimum: int) -> MicroBatches:
    """At least `minimum` micro-batches, and a multiple of the stages."""
    sizes = [given.sizes[i] for i in shard]
    while True:
        if len(sizes) < minimum:
            raise RuleFailureError(
                f"one rank has {len(sizes)} samples and needs {minimum} micro-batches (a multiple "
                f"of the {given.stages} stages); pass more samples"
            )
        bins = _first_fit_decreasing(sizes, given.capacity, minimum)
        if len(bins) % given.stages == 0:
            return sorted(sorted(shard[i] for i in samples) for samples in bins)
        minimum = round_up(minimum + 1, given.stages)


def _first_fit_decreasing(sizes: list[int], capacity: int, minimum: int) -> MicroBatches:
    bins: MicroBatches = []
    filled: list[tuple[int, int]] = []
    for item in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        size = sizes[item]
        if len(bins) < minimum or filled[0][0] + size > capacity:
            insort(filled, (size, len(bins)))
            bins.append([item])
            continue
        with_room = bisect_right(filled, (capacity - size, len(sizes)))
        place = min(range(with_room), key=lambda j: len(bins[filled[j][1]]))
        tokens, index = filled.pop(place)
        insort(filled, (tokens + size, index))
        bins[index].append(item)
    return bins
