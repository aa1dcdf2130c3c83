"""Lower bounds on the number of micro-batches of any packing, and on the end of any plan's step
that keeps to the cap and to `max_samples_per_row`."""

from __future__ import annotations

from mcore_batching.planning.costs.cost import ordered_sum
from mcore_batching.planning.problem import Problem
from mcore_batching.planning.schedule import Schedule


def micro_batch_lower_bound(problem: Problem) -> int:
    """Lower bound on the number of micro-batches of any packing."""
    # No two samples over half of the cap share a micro-batch.
    large = sum(2 * tokens > problem.capacity for tokens in problem.tokens)
    return max(large, problem.fewest_rows)


def step_time_floor(problem: Problem) -> float:
    """Lower bound on the makespan of any plan, in units of cost.

    The largest of three times: a mean rank's work in the fewest micro-batches after the pipeline
    was filled by an empty one; the longest sample's way through all stages and back; and the passes
    of a mean rank's samples on the slowest stage.
    """
    schedule, ranks = problem.schedule, problem.num_ranks
    fixed = problem.cost_model.per_micro_batch
    fewest = problem.dims.round_up_num_microbatches(-(-problem.fewest_rows // ranks))
    even = least_end(schedule, ordered_sum(problem.least_costs) / ranks + fewest * fixed, fixed)
    longest = max(range(problem.num_samples), key=problem.lengths.__getitem__, default=None)
    samples = () if longest is None else (longest,)
    alone = min(rows.cost(samples) for rows in problem.on_ranks.values())
    slowest = 0.0
    # Under dynamic CP a sample's cost on a stage depends on its size, which is not chosen yet.
    if schedule.which_cost and not problem.config.max_context_parallel:
        works = [ordered_sum(costs) / ranks for _, costs in problem.costs_of_stages]
        slowest = max(ordered_sum(works[kind] for kind in stage) for stage in schedule.which_cost)
    passes = schedule.cost_of_passes * slowest / problem.dims.virtual_pipeline
    return max(even, pipeline_latency(schedule) * alone, passes)


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
