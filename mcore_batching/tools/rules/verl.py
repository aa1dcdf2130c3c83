"""verl's rule: every partition by Karmarkar-Karp.

Samples are shared out to ranks, as many to each, and a rank's samples are parted into ⌈Σ/cap⌉
micro-batches, the maximum over ranks. Earlier releases weighed tokens, then work; since 0.9 the
count grows until no part is over the cap. Work is `24576 L + L²`; micro-batches run with the
costliest in the middle.

A count above the number of a rank's samples is an assertion there.
"""

from __future__ import annotations

from mcore_batching.tools.rules.differencing import karmarkar_karp
from mcore_batching.tools.rules.problem import MicroBatches, Problem, round_up


def workload(length: int) -> int:
    """Work of a sample of `length` tokens, in units of 1/24576 of a token's."""
    return 24576 * length + length * length


def by_tokens(problem: Problem) -> list[MicroBatches]:
    """Tokens evened out over ranks and over micro-batches, in the partition's order.

    Raises:
        PeerFailureError: see the module.
    """
    return _plan(problem, list(problem.sizes), costliest_in_the_middle=False, keep_cap=False)


def by_cost(problem: Problem) -> list[MicroBatches]:
    """Work evened out over ranks and over micro-batches, the costliest in the middle.

    Raises:
        PeerFailureError: see the module.
    """
    work = [workload(length) for length in problem.lengths]
    return _plan(problem, work, costliest_in_the_middle=True, keep_cap=False)


def by_cost_under_cap(problem: Problem) -> list[MicroBatches]:
    """`by_cost` with more and more micro-batches until none is over the cap.

    Raises:
        PeerFailureError: see the module.
    """
    work = [workload(length) for length in problem.lengths]
    return _plan(problem, work, costliest_in_the_middle=True, keep_cap=True)


def _plan(
    problem: Problem, weights: list[int], *, costliest_in_the_middle: bool, keep_cap: bool
) -> list[MicroBatches]:
    problem.refuse_oversize("verl asserts that max_token_len is at least the longest sample")
    sizes = problem.sizes
    shards = karmarkar_karp(weights, problem.ranks, equal_count=True)
    if costliest_in_the_middle:
        shards = [_ends_light(shard, weights) for shard in shards]
    count = max(
        min(len(shard), -(-sum(sizes[i] for i in shard) // problem.capacity)) for shard in shards
    )
    count = round_up(count, problem.group)
    while True:
        ranks = [
            [
                [shard[i] for i in part]
                for part in karmarkar_karp([weights[i] for i in shard], count, equal_count=False)
            ]
            for shard in shards
        ]
        heaviest = max(sum(sizes[i] for i in part) for rank in ranks for part in rank)
        if not keep_cap or heaviest <= problem.capacity:
            break
        count += problem.group or 1
    if costliest_in_the_middle:
        for rank, shard in zip(ranks, shards, strict=True):
            place = {sample: position for position, sample in enumerate(shard)}
            rank.sort(
                key=lambda part: (sum(weights[i] for i in part), place[part[0]]), reverse=True
            )
            rank[:] = rank[::2][::-1] + rank[1::2]
    return ranks


def _ends_light(shard: list[int], weights: list[int]) -> list[int]:
    """A rank's samples, lightest at both ends."""
    ascending = sorted(shard, key=lambda i: (weights[i], i))
    return ascending[::2] + ascending[1::2][::-1]
