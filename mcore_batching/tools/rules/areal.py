"""AReaL's rule: samples to ranks first, then a first-fit-decreasing of its own on every rank.

An item goes into the bin with fewest items among those with room, the emptiest on a tie; bins are
opened until there are as many as the minimum: twice the pipeline's stages if there is more than
one. It is raised to a multiple of the stages, and to the maximum over ranks until all have the same
count.
"""

from __future__ import annotations

from bisect import bisect_right, insort

from mcore_batching.tools.rules.problem import MicroBatches, PeerFailureError, Problem, round_up


def dealt(problem: Problem) -> list[MicroBatches]:
    """Samples dealt out to ranks in turn.

    Raises:
        PeerFailureError: a sample is over the cap, or a rank has fewer samples than micro-batches.
    """
    return _pack_shards(problem, problem.shards())


def balanced(problem: Problem) -> list[MicroBatches]:
    """Longest sample first to the rank with the fewest tokens, as many samples to each.

    Raises:
        PeerFailureError: as `dealt`, or samples do not divide by ranks.
    """
    if len(problem.sizes) % problem.ranks or not problem.sizes:
        raise PeerFailureError(
            f"{len(problem.sizes)} samples do not divide by {problem.ranks} ranks; pass a multiple "
            f"of {problem.ranks}"
        )
    each = len(problem.sizes) // problem.ranks
    shards: MicroBatches = [[] for _ in range(problem.ranks)]
    tokens = [0] * problem.ranks
    for sample in sorted(range(len(problem.sizes)), key=lambda i: -problem.sizes[i]):
        rank = min(
            (r for r in range(problem.ranks) if len(shards[r]) < each), key=lambda r: tokens[r]
        )
        shards[rank].append(sample)
        tokens[rank] += problem.sizes[sample]
    return _pack_shards(problem, shards)


def _pack_shards(problem: Problem, shards: MicroBatches) -> list[MicroBatches]:
    problem.refuse_oversize("AReaL's packer raises")
    minimum = 2 * problem.stages if problem.stages > 1 else 1
    while True:
        ranks = [_pack_shard(problem, shard, minimum) for shard in shards]
        most = max(map(len, ranks))
        if all(len(rank) == most for rank in ranks):
            return ranks
        minimum = most


def _pack_shard(problem: Problem, shard: list[int], minimum: int) -> MicroBatches:
    """At least `minimum` micro-batches, and a multiple of the stages."""
    sizes = [problem.sizes[i] for i in shard]
    while True:
        if len(sizes) < minimum:
            raise PeerFailureError(
                f"a rank has {len(sizes)} samples and needs {minimum} micro-batches (a multiple of "
                f"the {problem.stages} stages); pass more samples"
            )
        bins = _first_fit_decreasing(sizes, problem.capacity, minimum)
        if len(bins) % problem.stages == 0:
            return sorted(sorted(shard[i] for i in samples) for samples in bins)
        minimum = round_up(minimum + 1, problem.stages)


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
