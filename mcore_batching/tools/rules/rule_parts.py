"""Parts that several frameworks' rules share: dealing, splitting off, differencing, refusals."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from mcore_batching.planning import Argument, ParallelDims, PlanningError, Problem
from mcore_batching.planning.packing.packing import first_fit

# Samples of each micro-batch, as positions in the problem.
Bins = list[list[int]]
# Of each set its sum, its number of items, and these in the order in which they came together.
Sets = list[tuple[int, int, list[int]]]


class RuleFailureError(PlanningError):
    """Another framework's rule crashes, asserts or hangs on this input."""


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

    def entry(sets: Sets) -> tuple[int, int, int, int, Sets]:
        """For the heap: widest spread first, then largest first set."""
        sets.sort(reverse=True)
        total, count, items = sets[0]
        least = sets[-1][0] if len(sets) == parts else 0
        return least - total, -total, -count, -items[0], sets

    # A partial solution is a row of sets, empty ones left out: with many parts most are. For equal
    # counts each starts with one item in every set, and merging keeps the counts equal.
    ascending = sorted(range(len(values)), key=lambda item: (values[item], item))
    width = parts if equal_count else 1
    heap = [
        entry([(values[item], 1, [item]) for item in ascending[first : first + width]])
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
        heapq.heappush(heap, entry(one[:kept] + other[: parts - len(one)] + merged))
    return [sorted(items) for _, _, items in heap[0][-1]]


def packed_in_order(problem: Problem) -> Bins:
    """First-fit in the order of the samples; one over the cap fills a bin by itself."""
    # A sample cut to the cap leaves no room, so it stays alone without a case of its own.
    return first_fit([min(size, problem.capacity) for size in problem.tokens], problem.capacity)


def longest_first(samples: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Samples by descending size, equal ones in their order."""
    return sorted(samples, key=lambda i: -sizes[i])


def moved_out(bins: Bins, order: Sequence[int], multiple: int) -> Bins:
    """Bins, and their last samples moved out into bins of their own until `multiple` divides all.

    Those at the first positions of `order` are emptied first, in place.
    """
    target = -(-len(bins) // multiple) * multiple
    if sum(map(len, bins)) < target:
        raise too_few(sum(map(len, bins)), target)
    further: Bins = []
    for index in order:
        while len(bins[index]) > 1 and len(bins) + len(further) < target:
            further.append([bins[index].pop()])
    return bins + further


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
    """Raise if a sample is over the cap; `how` says what the framework does then."""
    if problem.oversize:
        raise RuleFailureError(
            f"{max(problem.tokens)} tokens exceed the cap of {problem.capacity}: {how}; set ",
            Argument("max_tokens_per_gpu"),
            " so that every sample fits",
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
