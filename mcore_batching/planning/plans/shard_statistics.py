"""Statistics of a step where samples stay on their rank, and each rank knows its own alone.

totals, maxima = shard_statistics(problem, micro_batches)           on each rank
joined_statistics(problem, {summed totals} | {maxima over ranks})   as `step_statistics`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from mcore_batching.planning.costs.cost import ordered_sum
from mcore_batching.planning.packing.bounds import floor_of_totals, works_of_stages
from mcore_batching.planning.pipeline import Clock
from mcore_batching.planning.plans.statistics import StepStatistics, tokens_in_flight
from mcore_batching.planning.problem import Problem


def shard_statistics(
    problem: Problem, micro_batches: Sequence[Sequence[int]]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """One rank's part of `joined_statistics`.

    Args:
        problem: of the rank's samples.
        micro_batches: its own, in slot order.

    Returns:
        numbers by name to sum over data-parallel ranks, and numbers by name to take the maximum of;
        "slot costs" of the latter is a list [num_microbatches]. Where stages differ the former have
        a list "works of stages" [kinds], the latter "stage costs" [num_microbatches * kinds].
    """
    # Placeholders take no padded tokens of a sample, but are held in flight like any row.
    costs, on_stages = list(map(problem.cost, micro_batches)), problem.slot_costs(micro_batches)
    tokens = [problem.row_tokens(samples) for samples in micro_batches]
    held = [each or problem.placeholder_tokens for each in tokens]
    work, last, schedule = ordered_sum(costs), problem.dims.pipeline_parallel - 1, problem.schedule
    totals: dict[str, Any] = {
        "num_samples": problem.num_samples,
        "num_placeholders": sum(not samples for samples in micro_batches),
        "num_oversize": len(problem.oversize),
        "real_tokens": sum(problem.lengths),
        "padded_tokens": sum(tokens),
        "cost": work,
        "cost of samples": ordered_sum(problem.costs),
        # Oversize samples have micro-batches of their own, and count for no other.
        "fitting tokens": sum(n for i, n in enumerate(problem.tokens) if i not in problem.oversize),
    }
    maxima: dict[str, Any] = {
        "heaviest_rank_cost": work,
        "step_time": Clock(on_stages, schedule).end,
        "peak_inflight_tokens": tokens_in_flight(held, schedule),
        "last_stage_inflight_tokens": tokens_in_flight(held, schedule, last),
        "largest_row_tokens": max(held),
        "sample cost": max(map(problem.cost_model.sample, problem.lengths), default=0.0),
        "slot costs": costs,
    }
    if works := works_of_stages(problem):
        totals["works of stages"], maxima["stage costs"] = works, on_stages
    return totals, maxima


def joined_statistics(problem: Problem, joined: Mapping[str, Any]) -> StepStatistics:
    """`step_statistics` of the plan over all ranks, from the numbers of `shard_statistics`, summed
    and maximised; `problem` is any rank's."""
    config, slots = problem.config, joined["slot costs"]
    known = {each.name: joined[each.name] for each in fields(StepStatistics) if each.name in joined}
    if problem.dims.in_lockstep:  # no rank's own end, but that of each slot's costliest
        known["step_time"] = Clock(joined.get("stage costs", slots), problem.schedule).end
    # As `Problem.fewest_rows` counts them.
    oversize, fitting = joined["num_oversize"], joined["num_samples"] - joined["num_oversize"]
    by_samples = -(-fitting // (config.max_samples_per_row or max(1, joined["num_samples"])))
    rows = oversize + max(-(-joined["fitting tokens"] // problem.capacity), by_samples)
    # The longest sample may be another rank's: its cost travels, not its length.
    alone = problem.cost_model.per_micro_batch + joined["sample cost"]
    return StepStatistics(
        **known,
        num_microbatches=len(slots),
        offered_tokens=problem.num_ranks * len(slots) * config.cap_tokens(problem.dims),
        mean_rank_cost=joined["cost"] / problem.num_ranks,
        slot_maxima_cost=ordered_sum(slots),
        floor_time=floor_of_totals(
            problem,
            joined["cost of samples"],
            rows,
            alone,
            joined.get("works of stages", ()),
        ),
    )
