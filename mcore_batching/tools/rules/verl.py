"""verl's rule: samples to ranks and micro-batches, each by Karmarkar-Karp.

Every rank gets equally many samples and partitions them into ⌈tokens / cap⌉ micro-batches, the
maximum over ranks. Earlier releases weighed tokens, later ones work, `24576 L + L²` for a sample of
L tokens. Since 0.9 the count grows until no micro-batch is over the cap. Micro-batches run with the
costliest in the middle.

All three raise RuleFailureError where verl fails an assertion: for a sample over the cap, samples
that do not divide by the ranks, or a rank with fewer samples than micro-batches.
"""

from __future__ import annotations

from mcore_batching.tools.rules.differencing import karmarkar_karp
from mcore_batching.tools.rules.packing_input import MicroBatches, PackingInput, round_up


def workload(length: int) -> int:
    """Work of a sample of `length` tokens, in units of 1/24576 of a token's."""
    return 24576 * length + length * length


def by_tokens(given: PackingInput) -> list[MicroBatches]:
    """Balanced by tokens, micro-batches in the partition's order."""
    return _plan(given, list(given.sizes), costliest_in_the_middle=False, keep_cap=False)


def by_cost(given: PackingInput) -> list[MicroBatches]:
    """Balanced by work, the costliest micro-batches in the middle."""
    work = [workload(length) for length in given.lengths]
    return _plan(given, work, costliest_in_the_middle=True, keep_cap=False)


def by_cost_under_cap(given: PackingInput) -> list[MicroBatches]:
    """`by_cost`, with one more group of micro-batches until none is over the cap."""
    work = [workload(length) for length in given.lengths]
    return _plan(given, work, costliest_in_the_middle=True, keep_cap=True)


def _plan(
    given: PackingInput, weights: list[int], *, costliest_in_the_middle: bool, keep_cap: bool
) -> list[MicroBatches]:
    given.refuse_oversize("verl asserts that max_token_len is at least the longest sample")
    sizes = given.sizes
    shards = karmarkar_karp(weights, given.ranks, equal_count=True)
    if costliest_in_the_middle:
        shards = [_ends_light(shard, weights) for shard in shards]
    count = max(
        min(len(shard), -(-sum(sizes[i] for i in shard) // given.capacity)) for shard in shards
    )
    count = round_up(count, given.group)
    while True:
        ranks = [
            [
                [shard[i] for i in part]
                for part in karmarkar_karp([weights[i] for i in shard], count, equal_count=False)
            ]
            for shard in shards
        ]
        heaviest = max(sum(sizes[i] for i in part) for rank in ranks for part in rank)
        if not keep_cap or heaviest <= given.capacity:
            break
        count += given.group or 1
    if costliest_in_the_middle:
        for rank, shard in zip(ranks, shards, strict=True):
            place = {sample: position for position, sample in enumerate(shard)}
            rank.sort(
                key=lambda part: (sum(weights[i] for i in part), place[part[0]]), reverse=True
            )
            rank[:] = rank[::2][::-1] + rank[1::2]
    return ranks


def _ends_light(shard: list[int], weights: list[int]) -> list[int]:
    """One rank's samples, lightest at both ends."""
    ascending = sorted(shard, key=lambda i: (weights[i], i))
    return ascending[::2] + ascending[1::2][::-1]
