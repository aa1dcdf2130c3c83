"""Planning for samples that stay where they are: the part of one data-parallel rank.

    problem = Problem.of(lengths, dims, config, cost_model)    # this rank's samples alone
    bins = pack_local(problem)
    latest = all_reduce_max(shard_ends(problem, bins))
    micro_batches = fill_shard(problem, bins, soonest_count(latest, dims))

`plan_step` with `owners` makes the same calls.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from mcore_batching.planning.config import PlannerConfig
from mcore_batching.planning.errors import Argument, LengthError
from mcore_batching.planning.parallel_dims import ParallelDims
from mcore_batching.planning.pipeline import Clock
from mcore_batching.planning.placement import largest_first, order_slots, split_until
from mcore_batching.planning.plans.plan import MicroBatches
from mcore_batching.planning.problem import Problem
from mcore_batching.planning.search import (
    MOST_SLOTS_PER_STAGE,
    Objective,
    best_slots,
    ends_by_count,
    improve,
    steps_of_counts,
)


def shard_ends(problem: Problem, bins: Sequence[Sequence[int]]) -> list[float]:
    """Predicted ends of one rank's step for each number of micro-batches that ranks choose among.

    Returns:
        number of `bins` (of `pack_local`), and of samples; where a search shapes micro-batches for
        a pipeline, then the end with `len(bins)` micro-batches and with each number to choose from,
        infinite where the samples do not fit. Ends are in units of cost.
    """
    held = [float(len(bins)), float(problem.num_samples)]
    if not shapes_slots(problem.dims, problem.config):
        return held
    fewest = problem.dims.round_up_num_microbatches(max(1, len(bins)))
    packed = _end(problem, _split_and_order(problem, bins, fewest))
    held.append(min(packed, *ends_by_count(problem, [fewest])))
    counts = _counts(problem.dims)
    # Fewer than the packed ones cannot hold the samples: infinite, but there, for all ranks join
    # their lists element by element.
    first = next((at for at, count in enumerate(counts) if count >= len(bins)), len(counts))
    return [*held, *[math.inf] * first, *ends_by_count(problem, counts[first:])]


def soonest_count(latest: Sequence[float], dims: ParallelDims) -> int:
    """The number of micro-batches with the earliest end of the straggler.

    Args:
        latest: element-wise maximum of `shard_ends` over all ranks.
        dims: of every rank's problem.
    """
    held, samples, *ends = latest
    fewest, most = (dims.round_up_num_microbatches(max(1, int(n))) for n in (held, samples))
    if not ends:
        return fewest
    packed, *known = ends  # with `fewest`, as packed; then with each of `counts`, as searched
    counts = _counts(dims)
    end, soonest = min(zip(known, counts, strict=True))
    # Counts to choose from are up to a seventh apart: the fewest itself may be as good.
    is_next = soonest == min((count for count in counts if count >= fewest), default=fewest)
    if end == math.inf or (is_next and packed <= end):
        soonest = fewest
    return min(soonest, most)  # beyond it, every rank has placeholders


def fill_shard(
    problem: Problem, bins: Sequence[Sequence[int]], num_microbatches: int
) -> MicroBatches:
    """One rank's micro-batches in slot order, brought to the count that all ranks agreed on.

    Args:
        problem: of this rank's own samples.
        bins: samples of each micro-batch, as from `pack_local`; may be none.
        num_microbatches: the largest ``len(bins)`` of all ranks, or more.

    Returns:
        samples of each of the `num_microbatches`; `()` is a placeholder, and not the last if there
        is a sample.

    Raises:
        LengthError: there are more `bins` than `num_microbatches`.
    """
    if len(bins) > num_microbatches:
        raise LengthError(
            Argument("num_microbatches"),
            f" must be at least this rank's {len(bins)}, got {num_microbatches}; set the maximum "
            "over all ranks",
        )
    plain = _split_and_order(problem, bins, num_microbatches)
    # In lockstep a slot is as slow as its slowest rank, which this one does not know: by descending
    # weight slot j is about the same everywhere.
    if not problem.config.searches or problem.dims.in_lockstep:
        return plain
    # On one stage a step takes the sum of its micro-batches, whatever is moved among them.
    if problem.dims.pipeline_parallel == 1 or not problem.num_samples:
        return largest_first(problem, (plain,))[0]
    by_tokens = dataclasses.replace(problem.config, balance="tokens")
    candidates = [
        plain,
        _split_and_order(dataclasses.replace(problem, config=by_tokens), bins, num_microbatches),
        best_slots(problem, num_microbatches),
    ]
    ends = [
        (_end(problem, slots), number)
        for number, slots in enumerate(candidates)
        if slots is not None
    ]
    best = _improved(problem, candidates[min(ends)[1]] or ())
    return largest_first(problem, (tuple(tuple(sorted(samples)) for samples in best),))[0]


def _improved(problem: Problem, slots: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
    """The slots after single samples were moved and swapped among them."""
    # To the search this rank is a job of one data-parallel rank.
    alone = dataclasses.replace(problem.dims, data_parallel=1)
    objective = Objective(dataclasses.replace(problem, dims=alone))
    return improve(objective.candidate([slots]), objective).ranks[0]


def _end(problem: Problem, micro_batches: Sequence[Sequence[int]]) -> float:
    """End of one rank's step by itself, in units of cost."""
    return Clock(problem.slot_costs(micro_batches), problem.schedule).end


def shapes_slots(dims: ParallelDims, config: PlannerConfig) -> bool:
    """True if a search shapes micro-batches for a pipeline, which planning takes its time for."""
    return config.searches and dims.pipeline_parallel > 1 and not dims.in_lockstep


def _counts(dims: ParallelDims) -> list[int]:
    """Numbers of micro-batches to choose from; the same on every rank, whatever it holds."""
    return steps_of_counts(1, MOST_SLOTS_PER_STAGE * dims.pipeline_parallel, dims)


def _split_and_order(
    problem: Problem, bins: Sequence[Sequence[int]], num_microbatches: int
) -> MicroBatches:
    if problem.config.fill == "split":
        bins = split_until(bins, num_microbatches, problem.weight)
    in_order = problem.config.balance == "none"
    return order_slots(bins, num_microbatches, None if in_order else problem.weight)
