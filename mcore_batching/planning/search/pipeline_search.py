"""The search for the step that ends first: how many micro-batches, what is in them, in which order,
on which rank.

A rank's samples are laid out to a *taper* (small micro-batches first and last), ranks are evened
out by the end of their simulated step instead of by their sums, since the rank that holds a very
long sample waits for it; then samples are moved and swapped while that ends the slowest rank
sooner.

Guarantees: the cap holds; the result never ends later than a plan it is given to begin with; the
same input and effort give the same result, because effort counts simulated passes.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence

from mcore_batching.planning.parallel_dims import ParallelDims
from mcore_batching.planning.placement import by_folds
from mcore_batching.planning.search.best_step import BestStep, Candidate
from mcore_batching.planning.search.local_moves import improve
from mcore_batching.planning.search.profiles import Profile, fill_slots, profile, spread, staircase
from mcore_batching.planning.step_work import Slots, StepWork
from mcore_batching.planning.sums import ordered_sum

RESERVED_FOR_IMPROVEMENT = 0.5
"""Share of the effort that is kept for moving single samples."""
ROUNDS_OF_BALANCING = 4
MOST_COUNTS_REFINED = 5
"""Numbers of micro-batches of which all shapes are tried."""
STRIDE_OF_COUNTS = 4
"""One in so many counts is tried before the ones between them."""
SHAPES_OF_FOLDED_RANKS = 2
"""Shapes that are tried with as many samples on each rank, too."""
MOST_SLOTS_A_STAGE = 16
"""Beyond this many micro-batches for each stage, less than a sixteenth of the step is bubble."""


Shape = tuple[int, int, int]
"""Number of slots, over how many they rise, over how many they fall; the latter two in groups of
slots under the interleaved schedule."""


def search(work: StepWork, starts: Iterable[Sequence[Sequence[Sequence[int]]]]) -> list[Slots]:
    """Look for the step that ends first.

    Args:
        work: the step; its effort is used up.
        starts: legal plans [ranks][slots]; the result ends no later than any of them.

    Returns:
        every rank's slots, the same number for each.

    Raises:
        InflightBoundError: nothing was found that holds no more tokens in flight than may be.
    """
    reserved = int(work.effort * RESERVED_FOR_IMPROVEMENT)
    best = BestStep(work)
    for start in starts:
        best.consider(evaluate([[list(samples) for samples in slots] for slots in start], work))
    order = sorted(range(len(work.costs)), key=lambda sample: (-work.costs[sample], sample))
    even = _deal(order, work.costs, [0.0] * work.dims.data_parallel)
    folded = folded_ranks(work)
    shapes = _promising_shapes(even, work, reserved) if order else []
    if work.max_inflight_tokens is not None:
        # Only come to if nothing before them keeps to the bound.
        shapes += [(count, 0, 0) for count in reversed(_counts(max(even, key=len), work))]
    for number, shape in enumerate(shapes):
        deals = [folded, even] if number < SHAPES_OF_FOLDED_RANKS else [even]
        for candidate in _balanced(order, deals, shape, work):
            best.consider(candidate)
            if work.effort <= reserved:
                break
        if work.effort <= reserved and best.found:
            break
    found = best.result()
    improve(found.ranks, found.ends, work)
    return found.ranks


def best_slots(samples: Sequence[int], count: int | None, work: StepWork) -> Slots | None:
    """The slots in which one rank's step ends first, looked for among tapers alone.

    Args:
        samples: the rank's samples.
        count: how many slots; None: as many as are best.
        work: costs, tokens, the cap and the layout.

    Returns:
        the slots; None if no taper holds the samples.
    """
    order = sorted(samples, key=lambda sample: (-work.costs[sample], sample))
    counts = _counts(order, work) if count is None else [count]
    found: tuple[float, Slots] | None = None
    shapes = (shape for each in counts for shape in _shapes(each, work.dims))
    for shape in shapes:
        if found and work.spent:
            break
        slots = fill_slots(order, _sizes(shape, work.dims), work)
        if slots is not None and not work.fits_in_memory(slots):
            slots = spread(slots, work)
        if slots is None or not work.fits_in_memory(slots):
            continue
        end = work.time(work.slot_costs(slots))
        if found is None or end < found[0]:
            found = (end, slots)
    return found[1] if found else None


def evaluate(ranks: list[Slots], work: StepWork) -> Candidate:
    """A step with its ends."""
    return Candidate(ranks, [work.time(work.slot_costs(slots)) for slots in ranks])


def _promising_shapes(even: Sequence[Sequence[int]], work: StepWork, reserved: int) -> list[Shape]:
    """Shapes in the order of how soon they end the rank with the costliest sample, and that with
    the most samples.

    All counts are tried in one shape, those far apart first so that little effort sees the whole
    range; then the other shapes of the counts that did best.
    """
    costliest = min(
        range(len(even)), key=lambda r: (-max((work.costs[i] for i in even[r]), default=0.0), r)
    )
    fullest = min(range(len(even)), key=lambda r: (-len(even[r]), r))
    judges = [even[rank] for rank in sorted({costliest, fullest})]
    counts = _counts(max(even, key=len), work)
    ranked: list[tuple[float, Shape]] = []
    for first in range(STRIDE_OF_COUNTS):
        for count in counts[first::STRIDE_OF_COUNTS]:
            if ranked and work.effort <= 2 * reserved - reserved // 2:
                return [shape for _, shape in sorted(ranked)]
            _rank(_shapes(count, work.dims)[0], judges, work, ranked)
    # Which shapes keep to a bound on tokens in flight has little to do with when they end.
    refined = len(ranked) if work.max_inflight_tokens is not None else MOST_COUNTS_REFINED
    for _, (count, _, _) in sorted(ranked)[:refined]:
        for shape in _shapes(count, work.dims)[1:]:
            if work.effort <= 2 * reserved - reserved // 2:
                break
            _rank(shape, judges, work, ranked)
    return [shape for _, shape in sorted(ranked)]


def _rank(
    shape: Shape,
    judges: Iterable[Sequence[int]],
    work: StepWork,
    ranked: list[tuple[float, Shape]],
) -> None:
    """Add a shape with the end of the latest judge, if all of them fit into it."""
    ends = []
    for samples in judges:
        slots = fill_slots(samples, _sizes(shape, work.dims), work)
        if slots is None:
            return
        ends.append(work.time(work.slot_costs(slots)))
    ranked.append((max(ends), shape))


def _counts(samples: Sequence[int], work: StepWork) -> list[int]:
    """Numbers of slots to try: from the fewest that can hold the samples, in steps of a seventh."""
    tokens = sum(work.tokens[sample] for sample in samples if sample not in work.alone)
    alone = sum(sample in work.alone for sample in samples)
    dims = work.dims
    count = dims.round_up_num_microbatches(-(-tokens // work.capacity) + alone)
    if dims.pipeline_parallel == 1:
        # No bubble to shrink: further micro-batches only cost more.
        return [dims.round_up_num_microbatches(count + extra) for extra in range(3)]
    useful = len(samples)
    if work.max_inflight_tokens is None:
        useful = min(useful, MOST_SLOTS_A_STAGE * dims.pipeline_parallel)
    return steps_of_counts(count, max(useful, count), dims)


def steps_of_counts(fewest: int, most: int, dims: ParallelDims) -> list[int]:
    """Numbers of slots that the schedule can run, from the fewest to the most in steps of a
    seventh."""
    most = dims.round_up_num_microbatches(most)
    counts = [dims.round_up_num_microbatches(fewest)]
    while counts[-1] < most:
        further = dims.round_up_num_microbatches(max(counts[-1] + 1, counts[-1] * 8 // 7))
        counts.append(min(further, most))
    return counts


def _shapes(count: int, dims: ParallelDims) -> list[Shape]:
    """Shapes of so many slots, the one that is best most often first."""
    flat = (count, 0, 0)
    if dims.pipeline_parallel == 1:
        return [flat]
    if dims.virtual_pipeline > 1:
        most = -(-count // dims.group_size)
        steps = ((2, 3), (1, 3), (1, 2), (2, 4), (1, 1), (2, 2), (3, 3), (1, 0), (0, 1))
        return [*((count, *each) for each in steps if max(each) <= most), flat]
    stages = dims.pipeline_parallel
    tapers = [
        (count, rise * stages, fall * stages)
        for rise, fall in ((1, 3), (1, 2), (2, 2), (2, 3), (1, 1), (1, 4), (3, 4), (1, 0), (0, 1))
        if max(rise, fall) * stages <= count
    ]
    return [*tapers, flat]


def _sizes(shape: Shape, dims: ParallelDims) -> Profile:
    if dims.virtual_pipeline > 1:
        count, rise, fall = shape
        return staircase(count, dims.group_size, rise, fall)
    return profile(*shape)


def _balanced(
    order: Sequence[int], deals: Iterable[list[list[int]]], shape: Shape, work: StepWork
) -> Iterator[Candidate]:
    """Steps of one shape: of every deal, then of rounds that each deal less to the ranks that ended
    late in the last."""
    sizes = _sizes(shape, work.dims)
    last: Candidate | None = None
    for ranks in deals:
        last = None
        for last in _filled(ranks, sizes, work):
            yield last
    passes = 1.0 if work.forward_only else 1.0 + work.cost_model.backward_ratio
    head_start = [0.0] * work.dims.data_parallel
    for _ in range(ROUNDS_OF_BALANCING - 1):
        if last is None:
            return
        mean = ordered_sum(last.ends) / len(last.ends)
        late = [0.7 * (end - mean) / passes for end in last.ends]
        head_start = [before + more for before, more in zip(head_start, late, strict=True)]
        least = min(head_start)
        head_start = [each - least for each in head_start]
        ranks, last = _deal(order, work.costs, head_start), None
        for last in _filled(ranks, sizes, work):
            yield last


def _filled(ranks: Sequence[Sequence[int]], sizes: Profile, work: StepWork) -> Iterator[Candidate]:
    """The step of ranks that hold these samples, costliest first; nothing if some do not fit."""
    filled = []
    for samples in ranks:
        slots = fill_slots(samples, sizes, work)
        if slots is None:
            return
        filled.append(slots)
    if not all(map(work.fits_in_memory, filled)):
        yield evaluate([spread(slots, work) for slots in filled], work)
    yield evaluate(filled, work)


def folded_ranks(work: StepWork) -> list[list[int]]:
    """Samples of each rank, costliest first: as many on each, and as even as that goes."""
    ranks = work.dims.data_parallel
    dealt = by_folds(work.costs, ranks, max(1, -(-len(work.costs) // ranks)))
    return [sorted(samples, key=lambda i: (-work.costs[i], i)) for samples in dealt]


def _deal(
    order: Sequence[int], costs: Sequence[float], head_start: Sequence[float]
) -> list[list[int]]:
    """Samples, costliest first, to the rank with the least work; ties to the lowest rank."""
    dealt: list[list[int]] = [[] for _ in head_start]
    lightest = [(load, rank) for rank, load in enumerate(head_start)]
    heapq.heapify(lightest)
    for sample in order:
        load, rank = lightest[0]
        dealt[rank].append(sample)
        heapq.heapreplace(lightest, (load + costs[sample], rank))
    return dealt
