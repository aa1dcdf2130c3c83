"""Shapes for ranks that run by themselves, each in its own pipeline.

A rank's samples are laid out to a profile (`profiles`). Ranks are evened out by the end of their
simulated step instead of by their sums, since the rank that holds a very long sample waits for it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

from mcore_batching.planning.cost import ordered_sum
from mcore_batching.planning.parallel_dims import ParallelDims
from mcore_batching.planning.placement import by_folds
from mcore_batching.planning.problem import Problem
from mcore_batching.planning.search.objective import Candidate, Objective, Slots
from mcore_batching.planning.search.profiles import (
    MOST_SLOTS_PER_STAGE,
    Profile,
    Shape,
    fill_slots,
    profile_of,
    spread,
    steps_of_counts,
)

ROUNDS_OF_BALANCING = 4
"""Times that samples are dealt to ranks anew, by the ends of the time before."""
DAMPING = 0.7
"""Share of a rank's lateness that the next round takes off its work. Nothing hangs on the value:
from 0.4 to 1.0 ends of steps differ by less than 0.03 %."""
SHAPES_OF_FOLDED_RANKS = 2
"""Shapes, best first, that are also tried with as many samples on each rank."""

# Rise and fall in stages, for the interleaved schedule in groups of slots. The first judges a
# number of slots; all are tried of the numbers that did best.
TAPERS = ((1, 3), (1, 2), (2, 2), (2, 3), (1, 1), (1, 4), (3, 4), (1, 0), (0, 1))
STAIRCASES = ((2, 3), (1, 3), (1, 2), (2, 4), (1, 1), (2, 2), (3, 3), (1, 0), (0, 1))


class PipelineShapes:
    """The family of shapes for ranks that run by themselves.

    Args:
        objective: of the step.
    """

    # Judging is cheap, since two ranks stand for all: a quarter of the effort goes a long way. Half
    # is kept for moving single samples.
    kept_after_judging = 0.75
    kept_for_moves = 0.5

    def __init__(self, objective: Objective) -> None:
        problem = objective.problem
        ranks = problem.dims.data_parallel
        self._objective = objective
        self._order = by_cost(range(problem.num_samples), problem.costs)
        self._even = _deal(self._order, problem.costs, [0.0] * ranks)
        self._folded = folded_ranks(problem)
        costliest = min(
            range(ranks),
            key=lambda r: (-max((problem.costs[i] for i in self._even[r]), default=0.0), r),
        )
        fullest = min(range(ranks), key=lambda r: (-len(self._even[r]), r))
        self._judges = [self._even[rank] for rank in sorted({costliest, fullest})]

    def counts(self) -> list[int]:
        """Numbers of slots to try."""
        return _counts(max(self._even, key=len), self._objective)

    def shapes(self, count: int) -> list[Shape]:
        """Shapes of so many slots, the one that judges the number first."""
        return _shapes(count, self._objective.problem.dims)

    def last_resort(self) -> list[Shape]:
        """Shapes that are only come to if nothing before them keeps to a bound on tokens in
        flight."""
        if self._objective.max_inflight_tokens is None:
            return []
        return [Shape(count, 0, 0) for count in reversed(self.counts())]

    def judge(self, shape: Shape) -> float | None:
        """End of the later of the rank with the costliest sample and the one with the most
        samples; None if the samples of one do not fit into the shape."""
        sizes = profile_of(shape, self._objective.problem.dims)
        ends = []
        for samples in self._judges:
            slots = fill_slots(samples, sizes, self._objective)
            if slots is None:
                return None
            ends.append(self._objective.end_of(self._objective.slot_costs(slots)))
        return max(ends)

    def steps(self, shape: Shape, number: int) -> Iterator[Candidate]:
        """Steps of one shape: of every deal, then of rounds that each deal less to the ranks that
        ended late in the last.

        Args:
            shape: the shape.
            number: shapes before it.
        """
        objective = self._objective
        problem = objective.problem
        sizes = profile_of(shape, problem.dims)
        last: Candidate | None = None
        folded = [self._folded] if number < SHAPES_OF_FOLDED_RANKS else []
        for ranks in [*folded, self._even]:
            last = None
            for last in self._filled(ranks, sizes):
                yield last
        passes = 1.0 if problem.forward_only else 1.0 + problem.cost_model.backward_ratio
        head_start = [0.0] * problem.dims.data_parallel
        for _ in range(ROUNDS_OF_BALANCING - 1):
            if last is None:
                return
            mean = ordered_sum(last.ends) / len(last.ends)
            late = [DAMPING * (end - mean) / passes for end in last.ends]
            head_start = [before + more for before, more in zip(head_start, late, strict=True)]
            least = min(head_start)
            head_start = [each - least for each in head_start]
            ranks, last = _deal(self._order, problem.costs, head_start), None
            for last in self._filled(ranks, sizes):
                yield last

    def _filled(self, ranks: Sequence[Sequence[int]], sizes: Profile) -> Iterator[Candidate]:
        """The step of ranks that hold these samples, costliest first; nothing if some do not
        fit."""
        filled = []
        for samples in ranks:
            slots = fill_slots(samples, sizes, self._objective)
            if slots is None:
                return
            filled.append(slots)
        if not all(map(self._objective.fits_in_memory, filled)):
            yield self._objective.candidate([spread(slots, self._objective) for slots in filled])
        yield self._objective.candidate(filled)


def best_slots(problem: Problem, count: int | None) -> Slots | None:
    """The slots in which one rank's step ends first, looked for among profiles alone.

    Args:
        problem: the rank's samples.
        count: number of slots; None: the best one.

    Returns:
        the slots; None if no profile holds the samples.
    """
    objective = Objective(problem)
    order = by_cost(range(problem.num_samples), problem.costs)
    counts = _counts(order, objective) if count is None else [count]
    found: tuple[float, Slots] | None = None
    for shape in (shape for each in counts for shape in _shapes(each, problem.dims)):
        if found and objective.spent:
            break
        slots = fill_slots(order, profile_of(shape, problem.dims), objective)
        if slots is not None and not objective.fits_in_memory(slots):
            slots = spread(slots, objective)
        if slots is None or not objective.fits_in_memory(slots):
            continue
        end = objective.end_of(objective.slot_costs(slots))
        if found is None or end < found[0]:
            found = (end, slots)
    return found[1] if found else None


def by_cost(samples: Sequence[int], costs: Sequence[float]) -> list[int]:
    """The samples, costliest first, ties in index order."""
    return sorted(samples, key=lambda sample: (-costs[sample], sample))


def folded_ranks(problem: Problem) -> list[list[int]]:
    """Samples of each rank, costliest first: as many on each, and as even as that goes."""
    ranks = problem.dims.data_parallel
    dealt = by_folds(problem.costs, ranks, max(1, -(-problem.num_samples // ranks)))
    return [by_cost(samples, problem.costs) for samples in dealt]


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


def _counts(samples: Sequence[int], objective: Objective) -> list[int]:
    """Numbers of slots to try for one rank, from the fewest that can hold its samples."""
    problem = objective.problem
    dims = problem.dims
    count = dims.round_up_num_microbatches(problem.subset(samples).fewest_rows)
    if dims.pipeline_parallel == 1 and objective.max_inflight_tokens is None:
        # No bubble to shrink: further micro-batches only cost more.
        return [dims.round_up_num_microbatches(count + extra) for extra in range(3)]
    useful = len(samples)
    if objective.max_inflight_tokens is None:
        useful = min(useful, MOST_SLOTS_PER_STAGE * dims.pipeline_parallel)
    return steps_of_counts(count, max(useful, count), dims)


def _shapes(count: int, dims: ParallelDims) -> list[Shape]:
    """Shapes of so many slots, the one that is best most often first."""
    flat = Shape(count, 0, 0)
    if dims.pipeline_parallel == 1:
        return [flat]
    if dims.virtual_pipeline > 1:
        groups = -(-count // dims.group_size)
        return [*(Shape(count, *each) for each in STAIRCASES if max(each) <= groups), flat]
    stages = dims.pipeline_parallel
    tapers = [
        Shape(count, rise * stages, fall * stages)
        for rise, fall in TAPERS
        if max(rise, fall) * stages <= count
    ]
    return [*tapers, flat]
