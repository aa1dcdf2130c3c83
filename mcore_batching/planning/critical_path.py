"""The longest chain of passes of a step, and how often each micro-batch is on it.

A step's end is the length of the longest of many chains, each the sum over micro-batches of a
weight times a cost. So with the weights of any chain found once,

    end(costs) >= sum(weight * cost)        for all costs, with equality for those it was found for

and a change of costs that does not shorten this sum cannot make the step end sooner: most changes
need no simulation to be refused.
"""

from __future__ import annotations

from collections.abc import Sequence

from mcore_batching.planning.compiled import as_list
from mcore_batching.planning.parallel_dims import ParallelDims
from mcore_batching.planning.pipeline import interleaved_ends, interleaved_program
from mcore_batching.planning.rounds import Rounds


def critical_path(
    forward_costs: Sequence[float],
    dims: ParallelDims,
    *,
    backward_ratio: float = 2.0,
    forward_only: bool = False,
) -> tuple[float, list[float]]:
    """End of one data-parallel rank's step, and the weights of a chain that is as long.

    Args:
        forward_costs: of each micro-batch on a stage [num_microbatches], at least one.
        dims: gives stages and chunks.
        backward_ratio: cost of a backward pass over its forward pass.
        forward_only: no backward passes.

    Returns:
        what `pipeline_time` returns; weight of each micro-batch [num_microbatches].
    """
    if dims.virtual_pipeline > 1:
        return _interleaved(forward_costs, dims, backward_ratio, forward_only)
    if forward_only:
        return _forward(forward_costs, dims.pipeline_parallel)
    rounds = Rounds(forward_costs, dims.pipeline_parallel, backward_ratio)
    return rounds.end, rounds.weights()


def _forward(costs: Sequence[float], stages: int) -> tuple[float, list[float]]:
    """Every stage waits for the costliest micro-batch once."""
    costliest = max(range(len(costs)), key=costs.__getitem__)
    weights = [1.0] * len(costs)
    weights[costliest] = float(stages)
    end = 0.0
    for cost, weight in zip(costs, weights, strict=True):
        end += weight * cost
    return end, weights


def _interleaved(
    costs: Sequence[float], dims: ParallelDims, backward_ratio: float, forward_only: bool
) -> tuple[float, list[float]]:
    program = interleaved_program(dims, len(costs), forward_only)
    ends = as_list(interleaved_ends(costs, dims, backward_ratio, forward_only))
    weights = [0.0] * len(costs)
    number = len(program)
    while number:
        before, taken, held, further, cost = program[number - 1]
        if cost < len(costs):
            weights[cost] += 1.0 / dims.virtual_pipeline
        else:
            weights[cost - len(costs)] += backward_ratio / dims.virtual_pipeline
        number = before
        for needed in (taken, held, further):
            if ends[needed] > ends[number]:
                number = needed
    return ends[-1], weights
