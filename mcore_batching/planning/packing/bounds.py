"""Lower bounds on the number of bins of any packing, and on the end of any plan's step that keeps
to the cap and to `max_samples_per_row`."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

from mcore_batching.planning.costs.cost import ordered_sum
from mcore_batching.planning.problem import Problem
from mcore_batching.planning.schedule import Schedule


def bin_lower_bound(sizes: Sequence[int], capacity: int) -> int:
    """The bound L2 of Martello and Toth (*Knapsack Problems*, 1990, section 8.3), in O(n log n);
    items are of 0 to `capacity`."""
    if not sizes:
        return 0
    # Sums of any range of sizes in one subtraction, so that each threshold costs two bisections.
    ascending = sorted(sizes)
    prefix = [0, *accumulate(ascending)]
    num_items = len(ascending)
    first_over_half = bisect_right(ascending, capacity // 2)
    best = 1
    # For a threshold t: items over `capacity - t` share a bin with nothing of size t or more, and
    # no two items over half a bin share one. What else is t or larger must fit beside the latter
    # or into further bins. The bound is the largest count over all t.
    for threshold in {0, *ascending[:first_over_half]}:
        first_alone = bisect_right(ascending, capacity - threshold)
        first_small = bisect_left(ascending, threshold)
        first_large = min(first_over_half, first_alone)
        num_large = first_alone - first_large
        room_beside_large = num_large * capacity - (prefix[first_alone] - prefix[first_large])
        small_tokens = prefix[first_large] - prefix[first_small]
        further = max(0, -(-(small_tokens - room_beside_large) // capacity)) if capacity else 0
        best = max(best, num_items - first_large + further)
    return best


def micro_batch_lower_bound(problem: Problem) -> int:
    """Lower bound on the number of micro-batches of any packing."""
    # One per oversize sample and L2 of the rest, or by the number of samples if that is more.
    fitting = [tokens for i, tokens in enumerate(problem.tokens) if i not in problem.oversize]
    by_tokens = len(problem.oversize) + bin_lower_bound(fitting, problem.capacity)
    return max(by_tokens, problem.fewest_rows)


def step_time_floor(problem: Problem) -> float:
    """Lower bound on the makespan of any plan, in units of cost."""
    longest = max(range(problem.num_samples), key=problem.lengths.__getitem__, default=None)
    samples = () if longest is None else (longest,)
    work = ordered_sum(problem.least_costs)
    # Under dynamic CP a sample's cost on a stage depends on its size, which is not chosen yet.
    of_stages = [] if problem.config.max_context_parallel else works_of_stages(problem)
    return min(
        floor_of_totals(problem, work, problem.fewest_rows, rows.cost(samples), of_stages)
        for rows in problem.on_ranks.values()
    )


def works_of_stages(problem: Problem) -> list[float]:
    """Forward cost of all samples on each kind of stage; none where stages are equal."""
    if not problem.schedule.which_cost:
        return []
    return [ordered_sum(costs) for _, costs in problem.costs_of_stages]


def floor_of_totals(
    problem: Problem,
    work: float,
    fewest_rows: int,
    costliest_sample: float,
    of_stages: Sequence[float] = (),
) -> float:
    """`step_time_floor`, from totals.

    Args:
        problem: gives dims, schedule and fixed costs; its samples are not read.
        work: forward cost of all samples, summed over the ranks that share each.
        fewest_rows: lower bound on the number of micro-batches of all ranks.
        costliest_sample: forward cost of the longest sample alone in a micro-batch.
        of_stages: `works_of_stages`.
    """
    dims, schedule, fixed = problem.dims, problem.schedule, problem.cost_model.per_micro_batch
    fewest = dims.round_up_num_microbatches(-(-fewest_rows // problem.num_ranks))
    # The largest of three times: a mean rank's work in the fewest micro-batches after the pipeline
    # was filled by an empty one; the longest sample's way through all stages and back; and the
    # passes of a mean rank's samples on the slowest stage.
    even = least_end(schedule, work / problem.num_ranks + fewest * fixed, fixed)
    slowest = 0.0
    if of_stages:
        works = [each / problem.num_ranks for each in of_stages]
        slowest = max(ordered_sum(works[kind] for kind in stage) for stage in schedule.which_cost)
    passes = schedule.cost_of_passes * slowest / dims.virtual_pipeline
    return max(even, pipeline_latency(schedule) * costliest_sample, passes)


def way_of_longest(problem: Problem) -> float:
    """The longest sample's way through all stages and back, plus the fixed costs of the other
    micro-batches that the first stage runs before and after it, of the fewest that there can be."""
    if not problem.num_samples:
        return 0.0
    fixed, schedule = problem.cost_model.per_micro_batch, problem.schedule
    beside = least_beside(schedule, -(-problem.fewest_rows // problem.num_ranks))
    return pipeline_latency(schedule) * (fixed + max(problem.costs)) + beside * fixed


def pipeline_latency(schedule: Schedule) -> float:
    """Time of one micro-batch through all stages, and back, over its cost on a mean stage."""
    return schedule.dims.pipeline_parallel * schedule.cost_of_passes


def least_end(schedule: Schedule, work: float, least: float) -> float:
    """No rank with so much work ends its step sooner: each stage waits until it is reached, and
    until all are done after it.

    Args:
        schedule: of the step.
        work: forward costs of all its micro-batches on a mean stage.
        least: the smallest of them.
    """
    if schedule.which_cost:  # some stage has as much work as the mean one
        return schedule.cost_of_passes * work
    # The last stage waits longest.
    latency = schedule.cost_of_passes / schedule.dims.virtual_pipeline
    waits = schedule.dims.pipeline_parallel - 1
    return schedule.cost_of_passes * work + waits * latency * least


def least_beside(schedule: Schedule, count: int) -> float:
    """Least cost of what the first stage runs before the forward pass of one of `count`
    micro-batches and after its backward pass, if each other costs 1; 0 except for plain 1F1B on
    equal stages.

    Of K micro-batches on P stages, p of them before that one, these are p forward and
    max(0, p - P + 1) backward passes, then max(0, K - P - p) forward and K - 1 - p backward
    passes.
    """
    if schedule.dims.slots_per_group > 1 or schedule.forward_only or schedule.which_cost:
        return 0.0
    fewest = count - schedule.dims.pipeline_parallel
    # Before a plan is made its place is not known: the least over all places.
    return min(
        max(before, fewest) + schedule.backward_ratio * max(count - 1 - before, fewest)
        for before in range(count)
    )
