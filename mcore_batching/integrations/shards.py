"""One rank's micro-batches, where samples stay on the ranks to which a framework dealt them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mcore_batching.integrations.replacements import HookError
from mcore_batching.planning import (
    MicroBatches,
    ParallelDims,
    PlannerConfig,
    Problem,
    fill_shard,
    pack_shard,
    shard_ends,
    soonest_counts,
)
from mcore_batching.planning.integers import round_up

Maxima = Callable[[list[float]], list[float]]
"""The largest of each of some numbers over the ranks that plan together; a collective."""


def planned_shard(
    lengths: Sequence[int],
    dims: ParallelDims,
    config: PlannerConfig,
    maxima: Maxima,
    *,
    fewest: int = 1,
    multiple: int = 1,
) -> MicroBatches:
    """The rank's micro-batches, as many on every rank; empty ones are placeholders.

    Collective: calls `maxima` twice.

    Args:
        lengths: of the rank's samples.
        dims: parallel dims.
        config: the planner's settings, without a bound on tokens in flight.
        maxima: over the ranks that need equally many.
        fewest: micro-batches.
        multiple: their number is a multiple of this.

    Raises:
        HookError: planning failed on another rank. On those where it did, its own error.
    """
    problem, bins = None, []

    def pack() -> list[float]:
        nonlocal problem, bins
        problem = Problem.of(lengths, dims, config)
        bins = pack_shard(problem)
        return shard_ends(problem, bins)

    width = len(shard_ends(Problem.of((), dims, config), []))
    [soonest] = soonest_counts(worst(maxima, width, pack), dims, config)
    filled: list[MicroBatches] = []

    def fill() -> list[float]:
        assert problem is not None
        count = round_up(max(soonest, fewest), multiple)
        filled.append(fill_shard(problem, bins, count))
        return []

    worst(maxima, 0, fill)
    return filled[0]


def worst(maxima: Maxima, width: int, attempt: Callable[[], list[float]]) -> list[float]:
    """The largest of each of an attempt's values over the ranks.

    Args:
        maxima: over them.
        width: number of values.
        attempt: gives them; may raise.

    Raises:
        HookError: the attempt failed on another rank. On those where it did, its own error.
    """
    values, failure = [], None
    try:
        values = attempt()
    except Exception as error:  # raised below, once the others know
        failure = error
    failed, *largest = maxima([float(failure is not None), *values, *[0.0] * (width - len(values))])
    if failure is not None:
        raise failure
    if failed:
        raise HookError("planning failed on another data-parallel rank: its log says why")
    return largest
