"""Planning for samples that stay where they are: the part of one data-parallel rank.

    problem = Problem.of(lengths, dims, config, cost_model)    # this rank's samples alone
    bins = pack_shard(problem)
    latest = all_reduce_max(shard_ends(problem, bins))
    for count in soonest_counts(latest, dims, config):
        micro_batches = fill_shard(problem, bins, count)
        worst = all_reduce_max(shard_outlook(problem, micro_batches))

and then the micro-batches that `soonest_filling` picks by the worst outlooks; only a bound on
tokens in flight leaves two of them to pick from. `plan_step` with `owners` is these calls for each
rank and nothing else, so a rank that sees only its own lengths reaches the plan that one who sees
all of them makes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mcore_batching.planning.bounds import bin_lower_bound
from mcore_batching.planning.config import PlannerConfig
from mcore_batching.planning.errors import Argument, InflightBoundError, LengthError
from mcore_batching.planning.packing import first_fit, first_fit_decreasing
from mcore_batching.planning.parallel_dims import ParallelDims
from mcore_batching.planning.pipeline import Clock
from mcore_batching.planning.placement import largest_first, order_slots, split_until
from mcore_batching.planning.plan import MicroBatches
from mcore_batching.planning.problem import Problem
from mcore_batching.planning.search import (
    MOST_SLOTS_PER_STAGE,
    Objective,
    best_slots,
    ends_by_count,
    improve,
    steps_of_counts,
)

MOST_COUNTED = 1 << 16
"""Micro-batches up to which ranks choose their number under a bound on tokens in flight, which more
of them keep to more easily."""


def pack_shard(problem: Problem) -> list[list[int]]:
    """Samples packed under the cap, as few micro-batches as the packing rule finds.

    Returns:
        the micro-batches' samples, ascending inside each: packed ones in the order in which the
        packing opened them, then oversize samples, each alone. No samples give no micro-batches.
    """
    fitting = [i for i in range(problem.num_samples) if i not in problem.oversize]
    sizes = [problem.tokens[i] for i in fitting]
    packed = _pack(sizes, problem)
    return [
        *(sorted(fitting[item] for item in items) for items in packed),
        *([sample] for sample in sorted(problem.oversize)),
    ]


def _pack(sizes: Sequence[int], problem: Problem) -> list[list[int]]:
    config, capacity, most = problem.config, problem.capacity, problem.config.max_samples_per_row
    if config.packing == "first-fit":
        return first_fit(sizes, capacity, max_items=most)
    decreasing = first_fit_decreasing(sizes, capacity, max_items=most)
    if config.packing == "first-fit-decreasing":
        return decreasing
    if len(decreasing) == bin_lower_bound(sizes, capacity):
        return decreasing
    in_order = first_fit(sizes, capacity, max_items=most)
    return in_order if len(in_order) < len(decreasing) else decreasing


def shard_ends(problem: Problem, bins: Sequence[Sequence[int]]) -> list[float]:
    """How soon one rank's step would end, by the number of micro-batches of all ranks.

    A number that is best for one rank need not be for ranks that hold other samples: the one at
    which the latest of them ends soonest is best for the step.

    Args:
        problem: this rank's samples.
        bins: of `pack_shard`.

    Returns:
        the number of `bins`, and of samples; then, where micro-batches are shaped for a pipeline,
        the predicted end, in units of cost, with as many as there are `bins`, and with each of the
        numbers that ranks choose among, infinite where this rank's samples do not fit. As many on
        every rank of a job.
    """
    held = [float(len(bins)), float(problem.num_samples)]
    if not _shapes_slots(problem.dims, problem.config):
        return held
    fewest = problem.dims.round_up_num_microbatches(max(1, len(bins)))
    packed = shard_outlook(problem, _split_and_order(problem, bins, fewest)).end
    held.append(min(packed, *ends_by_count(problem, [fewest])))
    counts = _counts(problem.dims, problem.config)
    first = next((at for at, count in enumerate(counts) if count >= len(bins)), len(counts))
    return [*held, *[math.inf] * first, *ends_by_count(problem, counts[first:])]


def soonest_counts(latest: Sequence[float], dims: ParallelDims, config: PlannerConfig) -> list[int]:
    """The number of micro-batches with which the latest rank's step ends soonest.

    Args:
        latest: the largest of each number of `shard_ends` over all ranks.
        dims: parallel dims, as in every rank's problem.
        config: the planner's settings, likewise.

    Returns:
        a single number; under a bound on tokens in flight the fewest that hold the samples as well,
        since what ranks hold is known only once micro-batches are made.
    """
    held, samples, *ends = latest
    fewest, most = (dims.round_up_num_microbatches(max(1, int(n))) for n in (held, samples))
    if not ends:
        return [fewest]
    packed, *known = ends
    counts = _counts(dims, config)
    end, soonest = min(zip(known, counts, strict=True))
    # The next number above the fewest may be a seventh more, for nothing.
    is_next = soonest == min((count for count in counts if count >= fewest), default=fewest)
    if end == math.inf or (is_next and packed <= end):
        soonest = fewest
    soonest = min(soonest, most)  # beyond it, every rank has placeholders
    if config.max_inflight_tokens is None:
        return [soonest]
    return list(dict.fromkeys([fewest, soonest]))


def fill_shard(
    problem: Problem, bins: Sequence[Sequence[int]], num_microbatches: int
) -> MicroBatches:
    """Bring one rank's micro-batches to the count that all ranks agreed on, in slot order.

    Args:
        problem: this rank's samples; `config.fill` says whether to split before adding
            placeholders, `config.balance` by what to order.
        bins: of `pack_shard`; may be empty.
        num_microbatches: the common count, `len(bins)` or more.

    Returns:
        exactly `num_microbatches` tuples of samples; `()` is a placeholder. In a pipeline they are
        in the order that ends soonest; else real ones by descending weight, with
        `balance="none"` in the order of packing. The default `balance` puts the largest before
        them where order takes no time. The last is real if there is a sample.

    Raises:
        LengthError: there are more `bins` than `num_microbatches`.
    """
    if len(bins) > num_microbatches:
        raise LengthError(
            Argument("num_microbatches"),
            f" must be at least the {len(bins)} micro-batches this shard packs into, got "
            f"{num_microbatches}; set it to the maximum over all ranks",
        )
    plain = _split_and_order(problem, bins, num_microbatches)
    if not problem.config.searches or problem.dims.in_lockstep:
        return plain
    if problem.dims.pipeline_parallel == 1 or not problem.num_samples:
        return largest_first(problem, (plain,))[0]
    by_tokens = dataclasses.replace(problem.config, balance="tokens")
    candidates = [
        plain,
        _split_and_order(dataclasses.replace(problem, config=by_tokens), bins, num_microbatches),
        best_slots(problem, num_microbatches),
    ]
    bound = _inflight_bound(problem.config)
    found = []
    for number, slots in enumerate(candidates):
        if slots is not None:
            outlook = shard_outlook(problem, slots)
            found.append((max(outlook.inflight_tokens, bound), outlook.end, number))
    best = _improved(problem, candidates[min(found)[2]] or ())
    return largest_first(problem, (tuple(tuple(sorted(samples)) for samples in best),))[0]


def _improved(problem: Problem, slots: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
    """The slots after single samples were moved and swapped among them."""
    alone = dataclasses.replace(problem.dims, data_parallel=1)
    objective = Objective(dataclasses.replace(problem, dims=alone))
    return improve(objective.candidate([slots]), objective).ranks[0]


@dataclass(frozen=True, slots=True)
class ShardOutlook:
    """Prediction for one rank's micro-batches."""

    end: float
    """End of the rank's step by itself, in units of cost."""
    inflight_tokens: float
    """Most padded tokens whose activations its first pipeline stage holds at a time."""


def shard_outlook(problem: Problem, micro_batches: Sequence[Sequence[int]]) -> ShardOutlook:
    """The end of one rank's step, and the tokens that it holds meanwhile.

    Args:
        problem: this rank's samples.
        micro_batches: of `fill_shard`.
    """
    return ShardOutlook(
        end=Clock([problem.cost(samples) for samples in micro_batches], problem.schedule).end,
        inflight_tokens=problem.inflight_tokens(micro_batches),
    )


def worst_outlook(outlooks: Iterable[ShardOutlook]) -> ShardOutlook:
    """The latest end and the most tokens in flight of all ranks, not always of the same one."""
    ends, inflight = zip(*((each.end, each.inflight_tokens) for each in outlooks), strict=True)
    return ShardOutlook(end=max(ends), inflight_tokens=max(inflight))


def soonest_filling(outlooks: Sequence[ShardOutlook], config: PlannerConfig) -> int:
    """The number of micro-batches with which the step ends first.

    Args:
        outlooks: with each of `soonest_counts`, the worst of all ranks.
        config: gives `max_inflight_tokens`.

    Returns:
        its index; the first of equals.

    Raises:
        InflightBoundError: under each of them some rank holds more tokens in flight than it may.
    """
    bound = _inflight_bound(config)
    least = min(outlook.inflight_tokens for outlook in outlooks)
    if least > bound:
        raise InflightBoundError(config.max_inflight_tokens, least)

    def rank(index: int) -> tuple[bool, float, int]:
        return outlooks[index].inflight_tokens > bound, outlooks[index].end, index

    return min(range(len(outlooks)), key=rank)


def _shapes_slots(dims: ParallelDims, config: PlannerConfig) -> bool:
    return config.searches and dims.pipeline_parallel > 1 and not dims.in_lockstep


def _counts(dims: ParallelDims, config: PlannerConfig) -> list[int]:
    """Numbers of micro-batches that ranks choose among, without knowing what others hold."""
    most = MOST_SLOTS_PER_STAGE * dims.pipeline_parallel
    return steps_of_counts(1, most if config.max_inflight_tokens is None else MOST_COUNTED, dims)


def _inflight_bound(config: PlannerConfig) -> float:
    return math.inf if config.max_inflight_tokens is None else config.max_inflight_tokens


def _split_and_order(
    problem: Problem, bins: Sequence[Sequence[int]], num_microbatches: int
) -> MicroBatches:
    if problem.config.fill == "split":
        bins = split_until(bins, num_microbatches, problem.weight)
    in_order = problem.config.balance == "none"
    return order_slots(bins, num_microbatches, None if in_order else problem.weight)
