"""Rules of further frameworks, for the benchmarks: slime, NeMo-RL and AReaL."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

from mcore_batching.planning import Problem
from mcore_batching.tools.rules import (
    RULES,
    Bins,
    Rule,
    dealt,
    karmarkar_karp,
    moved_out,
    packed_in_order,
    refuse_oversize,
    refuse_uneven,
    too_few,
    verl_work,
)


def longest_first(samples: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Samples by descending size, equal ones in their order."""
    return sorted(samples, key=lambda i: -sizes[i])


def slime(problem: Problem) -> list[Bins]:
    """slime since its pull request 1926: pack first, then distribute.

    First-fit over all samples; micro-batches are cut in two until every rank can have equally many;
    these go to ranks by Karmarkar-Karp over work.
    """
    sizes, bins = problem.tokens, packed_in_order(problem)
    multiple = problem.num_ranks * problem.dims.slots_per_group
    while len(bins) % multiple:
        # The fullest micro-batch that can be cut; the last of equals, as slime's own max() picks.
        tokens = [sum(sizes[i] for i in samples) for samples in bins]
        fullest = max(range(len(bins)), key=lambda k: (len(bins[k]) > 1, tokens[k], k))
        if len(bins[fullest]) == 1:
            raise too_few(len(sizes), -(-len(bins) // multiple) * multiple)
        # Longest sample first to the half with fewer tokens.
        halves: Bins = [[], []]
        for sample in longest_first(bins[fullest], sizes):
            min(halves, key=lambda half: sum(sizes[i] for i in half)).append(sample)
        bins[fullest], other = halves
        bins.append(other)
    work = [sum(verl_work(problem.lengths[i]) for i in samples) for samples in bins]
    ranks = karmarkar_karp(work, problem.num_ranks, equal_count=True)
    return [[bins[index] for index in rank] for rank in ranks]


def nemo_rl(problem: Problem) -> list[Bins]:
    """NeMo-RL: modified first-fit-decreasing (Johnson and Garey, 1985), dealt round-robin."""
    refuse_oversize(problem, "NeMo-RL's packer raises")
    bins = _modified_first_fit_decreasing(problem.tokens, problem.capacity)
    # Ranks must divide the count: items move out of the bins that hold most.
    by_count = sorted(range(len(bins)), key=lambda i: (-len(bins[i]), -i))
    return dealt(moved_out(bins, by_count, problem.num_ranks), problem.num_ranks)


def _modified_first_fit_decreasing(sizes: Sequence[int], cap: int) -> Bins:
    items = longest_first(range(len(sizes)), sizes)
    # Each item over half a bin opens one.
    bins = [[i] for i in items if 2 * sizes[i] > cap]
    room = [cap - sizes[i] for (i,) in bins]
    medium = [i for i in items if 2 * sizes[i] <= cap < 3 * sizes[i]]
    # By (size, index), not reversed `items`: equal sizes stay in input order both ways.
    ascending = sorted(items, key=lambda i: (sizes[i], i))
    small = [i for i in ascending if 3 * sizes[i] <= cap < 6 * sizes[i]]

    def put_first(kind: list[int], index: int, order: Iterable[int]) -> None:
        item = next((i for i in order if sizes[i] <= room[index]), None)
        if item is not None:
            kind.remove(item)
            bins[index].append(item)
            room[index] -= sizes[item]

    # One over a third beside each; where there is none, from the last bin back, the smallest item
    # over a sixth and the largest that fits beside it.
    for index in range(len(bins)):
        put_first(medium, index, medium)
    for index in reversed(range(len(bins))):
        alone = len(bins[index]) == 1 and len(small) > 1
        if alone and sizes[small[0]] + sizes[small[1]] <= room[index]:
            put_first(small, index, small)
            put_first(small, index, reversed(small))
    # Then each bin takes the largest items that still fit.
    rest = longest_first([*medium, *small, *(i for i in ascending if 6 * sizes[i] <= cap)], sizes)
    for index in range(len(bins)):
        for item in rest[:]:
            put_first(rest, index, [item])
    # What is left opens bins of its own, each item going to the emptiest of these with room.
    further: list[tuple[int, list[int]]] = []  # tokens and items, ascending by tokens
    for item in rest:
        fits = further and sizes[item] <= cap - further[0][0]
        tokens, held = further.pop(0) if fits else (0, [])
        filled = tokens + sizes[item], [*held, item]
        further.insert(bisect_right(further, filled[0], key=lambda each: each[0]), filled)
    return bins + [held for _, held in further]


def areal(problem: Problem) -> list[Bins]:
    """AReaL: longest sample first to the rank with fewest tokens, equally many samples to each.

    On a rank samples open a minimum of micro-batches, twice the stages in a pipeline; the others go
    to those with room. The minimum rises until all ranks have the same count.
    """
    refuse_oversize(problem, "AReaL's packer raises")
    sizes, ranks, stages = problem.tokens, problem.num_ranks, problem.dims.pipeline_parallel
    refuse_uneven(len(sizes), ranks)
    shards: Bins = [[] for _ in range(ranks)]
    for sample in longest_first(range(len(sizes)), sizes):
        with_place = [shard for shard in shards if len(shard) < len(sizes) // ranks]
        min(with_place, key=lambda shard: sum(sizes[i] for i in shard)).append(sample)
    minimum, packs = 2 * stages if stages > 1 else 1, list[Bins]()
    while not packs or min(map(len, packs)) < minimum:
        packs = []
        for shard in shards:
            # A rank's own count must be a multiple of the stages: it packs again with more.
            least = minimum
            while len(shard) >= least and len(bins := _at_least(shard, least, problem)) % stages:
                least += stages - least % stages
            if len(shard) < least:
                raise too_few(len(shard), least)
            packs.append(sorted(map(sorted, bins)))
        minimum = max(map(len, packs))
    return packs


def _at_least(samples: Sequence[int], minimum: int, problem: Problem) -> Bins:
    """So many micro-batches or more: each sample goes to that with room and the fewest samples, of
    these the emptiest."""
    bins: Bins = []
    tokens: list[int] = []
    for sample in samples:
        size = problem.tokens[sample]
        room = [k for k, held in enumerate(tokens) if held + size <= problem.capacity]
        if len(bins) < minimum or not room:
            bins.append([sample])
            tokens.append(size)
        else:
            place = min(room, key=lambda k: (len(bins[k]), tokens[k]))
            bins[place].append(sample)
            tokens[place] += size
    return bins


ALL_RULES: dict[str, Rule] = RULES | {"slime": slime, "NeMo-RL": nemo_rl, "AReaL": areal}
