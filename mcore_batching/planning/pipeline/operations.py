"""The end of a step, and the tokens in flight on a stage."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from mcore_batching.planning.parallel_dims import ParallelDims
from mcore_batching.planning.pipeline.clock import Clock
from mcore_batching.planning.pipeline.passes import Schedule


def pipeline_time(
    forward_costs: Sequence[float],
    dims: ParallelDims,
    *,
    backward_ratio: float = 2.0,
    forward_only: bool = False,
    which_cost: Sequence[Sequence[int]] = (),
) -> float:
    """End of the last pass of one data-parallel rank's step.

    Args:
        forward_costs: of each micro-batch on a stage [num_microbatches], over all its chunks;
            with `which_cost` on each kind of stage [num_microbatches * kinds].
        dims: stages and chunks.
        backward_ratio: cost of a backward pass over its forward pass.
        forward_only: no backward passes.
        which_cost: the kind of each model chunk [stages][chunks]; empty: equal.

    Raises:
        ParallelDimsError: the schedule cannot run this many micro-batches.
    """
    schedule = Schedule(
        dims=dims,
        backward_ratio=backward_ratio,
        forward_only=forward_only,
        which_cost=tuple(map(tuple, which_cost)),
    )
    return Clock(forward_costs, schedule).end


def inflight_tokens(slot_tokens: Sequence[int], schedule: Schedule, *, stage: int = 0) -> float:
    """Peak of the tokens whose activations a stage holds.

    A micro-batch is in flight from its forward to its backward pass; each model chunk holds its
    share of the stage's layers. Under 1F1B stage s of P has P - s micro-batches in flight. Of
    forward passes alone each holds its micro-batch by itself.

    Args:
        slot_tokens: padded tokens of each micro-batch [num_microbatches].
        schedule: gives the order of passes.
        stage: pipeline rank; stage 0 holds most.
    """
    if schedule.forward_only:
        return float(max(slot_tokens))  # one at a time: nothing waits for a backward pass
    held = most = 0  # whole micro-batches; a chunk holds 1 / virtual_pipeline of the layers
    for is_forward, slot in _held_passes(schedule, stage, len(slot_tokens)):
        if is_forward:
            held += slot_tokens[slot]
            most = held if held > most else most
        else:
            held -= slot_tokens[slot]
    return most / schedule.dims.virtual_pipeline


@functools.lru_cache(maxsize=64)
def _held_passes(schedule: Schedule, stage: int, count: int) -> list[tuple[bool, int]]:
    """A stage's passes that begin or end to hold tokens: whether forward, and the slot."""
    order = schedule.order(stage, count)
    return [(each.kind == "F", each.slot) for each in order]
