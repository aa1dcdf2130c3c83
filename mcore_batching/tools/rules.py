"""Other frameworks' packing rules, written from their description, to compare plans with.

A rule takes one step's `Problem` and returns the micro-batches of each rank, equally many on all.
Sizes are padded tokens, which this package's cap counts. A micro-batch over the cap holds one
sample. Where the framework crashes, asserts or hangs, the rule raises `RuleFailureError`. Tests
hold the rules against the frameworks' own functions.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import replace

from mcore_batching.planning import (
    ParallelDims,
    PlannerConfig,
    PlanningError,
    Problem,
    StepPlan,
)
from mcore_batching.planning.errors import named
from mcore_batching.planning.packing.packing import first_fit

# Samples of each micro-batch, as positions in the problem.
Bins = list[list[int]]
Rule = Callable[[Problem], list[Bins]]
# Of each set its sum, its number of items, and these in the order in which they came together.
Sets = list[tuple[int, int, list[int]]]


class RuleFailureError(PlanningError):
    """Another framework's rule crashes, asserts or hangs on this input."""


def rule_plan(
    rule: Rule, lengths: Sequence[int], dims: ParallelDims, config: PlannerConfig
) -> StepPlan:
    """One step as another framework's rule plans it, by the cap and padding of the config.

    A `RuleFailureError` where the framework crashes on this input, there are no samples, or the
    interleaved schedule cannot run the rule's count of micro-batches.
    """
    # The rule decides whether an oversize sample is an error, not the config.
    problem = Problem.of(lengths, dims, replace(config, on_oversize="own-bin"))
    ranks = rule(problem) if problem.num_samples else []
    return StepPlan(
        micro_batches=tuple(tuple(map(tuple, rank)) for rank in ranks),
        num_microbatches=legal_count(ranks, dims),
        sample_indices=tuple(range(problem.num_samples)),
        dims=dims,
        config=config,
    )


def first_fit_in_order(problem: Problem) -> list[Bins]:
    """First-fit over all samples in order, dealt round-robin; a sample over the cap runs alone."""
    # A sample cut to the cap leaves no room, so it stays alone without a case of its own.
    sizes = [min(size, problem.capacity) for size in problem.tokens]
    return dealt(first_fit(sizes, problem.capacity), problem.num_ranks)


def verl(problem: Problem) -> list[Bins]:
    """verl 0.9: samples to ranks, then to micro-batches, each by Karmarkar-Karp over work.

    Every rank gets equally many samples and parts them into ⌈tokens / cap⌉ micro-batches, the most
    of any rank, or more, until all keep to the cap (as since its pull request 7553; before, parts
    exceed it). They run with the costliest in the middle.
    """
    refuse_oversize(problem, "verl asserts that max_token_len is at least the longest sample")
    sizes, cap, group = problem.tokens, problem.capacity, problem.dims.slots_per_group
    work = [verl_work(length) for length in problem.lengths]
    shards = []
    for shard in karmarkar_karp(work, problem.num_ranks, equal_count=True):
        # verl's own order on a rank, costliest in the middle; it decides ties further down.
        ascending = sorted(shard, key=lambda i: (work[i], i))
        shards.append(ascending[::2] + ascending[1::2][::-1])
    needed = [min(len(shard), -(-sum(sizes[i] for i in shard) // cap)) for shard in shards]
    count, heaviest = -(-max(needed) // group) * group, cap + 1
    # Parts of even work need not keep to the cap: more of them, until all do.
    while heaviest > cap:
        ranks = [
            [[shard[i] for i in part] for part in karmarkar_karp([work[i] for i in shard], count)]
            for shard in shards
        ]
        heaviest = max(sum(sizes[i] for i in part) for rank in ranks for part in rank)
        count += group
    for rank, shard in zip(ranks, shards, strict=True):
        # Descending work dealt to both ends from the middle: light ones fill and drain a pipeline.
        rank.sort(key=lambda part: (sum(work[i] for i in part), shard.index(part[0])), reverse=True)
        rank[:] = rank[::2][::-1] + rank[1::2]
    return ranks


def verl_work(length: int) -> int:
    """verl's work of a sample of `length` tokens, in units of 1/24576 of a token's."""
    # Integers: sums compare equal in whatever order they were added, as ties must.
    return 24576 * length + length * length


def megatron_dp_balanced(problem: Problem) -> list[Bins]:
    """Megatron-Core's `dp_balanced`: close a micro-batch once the next sample does not fit.

    The count is made a multiple of ranks × group by moving samples off the end, then dealt.
    """
    refuse_oversize(problem, "Megatron-Core packs it regardless, or an empty row first")
    bins: Bins = []
    room = -1
    for sample, size in enumerate(problem.tokens):
        if size > room:
            bins.append([])
            room = problem.capacity
        bins[-1].append(sample)
        room -= size
    multiple = problem.num_ranks * problem.dims.slots_per_group
    target = -(-len(bins) // multiple) * multiple
    if problem.num_samples < target:
        raise too_few(problem.num_samples, target)
    further: Bins = []
    for samples in reversed(bins):
        while len(samples) > 1 and len(bins) + len(further) < target:
            further.append([samples.pop()])
    return dealt(bins + further, problem.num_ranks)


# In the order in which tables list them.
RULES: dict[str, Rule] = {
    "first-fit in order": first_fit_in_order,
    "verl 0.9": verl,
    "Megatron dp_balanced": megatron_dp_balanced,
}


def karmarkar_karp(
    values: Sequence[int], parts: int, *, equal_count: bool = False
) -> list[list[int]]:
    """Indices of each part's items by the largest differencing method, heaviest part first.

    8 7 6 5 4 in two parts give 8 + 6 and 7 + 5 + 4. Ties are broken as verl and slime break them.
    """
    if len(values) < parts:
        raise too_few(len(values), parts)
    if equal_count:
        refuse_uneven(len(values), parts)
    # A partial solution is a row of sets, empty ones left out: with many parts most are. For equal
    # counts each starts with one item in every set, and merging keeps the counts equal.
    ascending = sorted(range(len(values)), key=lambda item: (values[item], item))
    width = parts if equal_count else 1
    heap = [
        _entry([(values[item], 1, [item]) for item in ascending[first : first + width]], parts)
        for first in range(0, len(ascending), width)
    ]
    heapq.heapify(heap)
    while len(heap) > 1:
        # The two with the widest spread, the heaviest set of one on the lightest of the other:
        # set i meets set parts - 1 - i, where neither is empty.
        one, other = heapq.heappop(heap)[-1], heapq.heappop(heap)[-1]
        kept = min(len(one), parts - len(other))
        meet = zip(one[kept:], reversed(other[parts - len(one) :]), strict=True)
        merged = [(a + b, m + n, left + right) for (a, m, left), (b, n, right) in meet]
        heapq.heappush(heap, _entry(one[:kept] + other[: parts - len(one)] + merged, parts))
    return [sorted(items) for _, _, items in heap[0][-1]]


def _entry(sets: Sets, parts: int) -> tuple[int, int, int, int, Sets]:
    """For the heap: widest spread first, then largest first set."""
    sets.sort(reverse=True)
    total, count, items = sets[0]
    least = sets[-1][0] if len(sets) == parts else 0
    return least - total, -total, -count, -items[0], sets


def dealt(bins: Bins, ranks: int) -> list[Bins]:
    """Micro-batches of each rank, dealt round-robin; an empty one evens out the count."""
    count = -(-len(bins) // ranks)
    return [[*bins[rank::ranks], []][:count] for rank in range(ranks)]


def legal_count(ranks: Sequence[Sequence[object]], dims: ParallelDims) -> int:
    """Micro-batches per rank, which the interleaved schedule must be able to run."""
    if not ranks:
        raise RuleFailureError("no rule plans a step without samples; pass one or more")
    count = len(ranks[0])
    if not dims.is_legal_num_microbatches(count):
        raise RuleFailureError(
            f"the interleaved schedule cannot run {count} micro-batches per rank; it can run "
            f"{dims.round_up_num_microbatches(count)}"
        )
    return count


def refuse_oversize(problem: Problem, how: str) -> None:
    """Raise if a sample is over the cap; `how`: what the framework does then."""
    if problem.oversize:
        raise RuleFailureError(
            f"{max(problem.tokens)} tokens exceed the cap of {problem.capacity}: {how}; set "
            f"{named('max_tokens_per_gpu')} so that every sample fits"
        )


def refuse_uneven(samples: int, parts: int) -> None:
    """Raise if samples cannot be dealt equally."""
    if samples % parts:
        raise RuleFailureError(
            f"{samples} samples do not divide by {parts}; pass a multiple of {parts}"
        )


def too_few(samples: int, rows: int) -> RuleFailureError:
    """The error for a rule that needs a sample in each of its micro-batches."""
    return RuleFailureError(
        f"{samples} samples cannot fill {rows} micro-batches; pass {rows} or more"
    )
