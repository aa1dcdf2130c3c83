"""Megatron's pipeline schedules, simulated for micro-batches of unequal cost.

Passes run in the order of `pass_order`; a transfer between stages takes no time.

Guarantees: the same times on every platform, because only IEEE `+`, `*` and comparisons are used;
`pipeline_time` is the end of the last operation of `pipeline_operations`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from mcore_batching.planning.compiled import Integers, Numbers, integers, kernel, numbers
from mcore_batching.planning.errors import ParallelDimsError
from mcore_batching.planning.parallel_dims import ParallelDims
from mcore_batching.planning.pass_order import passes_in_turn, stage_order
from mcore_batching.planning.rounds import rounds_end


@dataclass(frozen=True, slots=True)
class Operation:
    """One pass of one micro-batch through one model chunk."""

    stage: int
    """Pipeline rank."""
    chunk: int
    """Model chunk of the stage."""
    slot: int
    """Number of the micro-batch on its data-parallel rank."""
    backward: bool
    """False for the forward pass."""
    start: float
    """In units of cost since the step began."""
    end: float
    """Likewise."""


def pipeline_operations(
    forward_costs: Sequence[float],
    dims: ParallelDims,
    *,
    backward_ratio: float = 2.0,
    forward_only: bool = False,
    transfer: float = 0.0,
) -> list[Operation]:
    """Every pass of one data-parallel rank's step, with its times.

    Args:
        forward_costs: of each micro-batch on a whole stage [num_microbatches]; a model chunk takes
            its share of them.
        dims: gives stages and chunks.
        backward_ratio: cost of a backward pass over its forward pass.
        forward_only: no backward passes.
        transfer: time that a transfer between stages takes.

    Returns:
        operations of all stages, each stage's in its order, stage after stage.

    Raises:
        ParallelDimsError: the schedule cannot run this many micro-batches.
    """
    made: list[list[Operation]] = [[] for _ in range(dims.pipeline_parallel)]
    clock = [0.0] * dims.pipeline_parallel
    ends: list[tuple[int, float]] = []
    for stage, step, needed in passes_in_turn(dims, len(forward_costs), forward_only):
        backward, chunk, slot = step
        start = clock[stage]
        for number in needed:
            of_stage, end = ends[number]
            start = max(start, end + (transfer if of_stage != stage else 0.0))
        cost = forward_costs[slot] / dims.virtual_pipeline
        clock[stage] = start + cost * (backward_ratio if backward else 1.0)
        ends.append((stage, clock[stage]))
        made[stage].append(Operation(stage, chunk, slot, backward, start, clock[stage]))
    return [operation for operations in made for operation in operations]


def pipeline_time(
    forward_costs: Sequence[float],
    dims: ParallelDims,
    *,
    backward_ratio: float = 2.0,
    forward_only: bool = False,
) -> float:
    """End of the last pass of one data-parallel rank's step, stages being equal.

    Args:
        forward_costs: of each micro-batch on a stage [num_microbatches].
        dims: gives stages and chunks.
        backward_ratio: cost of a backward pass over its forward pass.
        forward_only: no backward passes.

    Raises:
        ParallelDimsError: the schedule cannot run this many micro-batches.
    """
    if dims.virtual_pipeline > 1:
        return float(interleaved_ends(forward_costs, dims, backward_ratio, forward_only)[-1])
    if not forward_costs:
        raise ParallelDimsError("a schedule runs one micro-batch or more, got none")
    if forward_only:
        return _forward_time(forward_costs, dims.pipeline_parallel)
    return rounds_end(forward_costs, dims.pipeline_parallel, backward_ratio)


def inflight_tokens(
    slot_tokens: Sequence[int], dims: ParallelDims, *, forward_only: bool = False, stage: int = 0
) -> float:
    """Most tokens whose activations a stage holds at a time.

    A micro-batch is held from its forward to its backward pass, by each model chunk its share of
    the layers. Under 1F1B stage s of P holds P - s micro-batches.

    Args:
        slot_tokens: padded tokens of each micro-batch [num_microbatches].
        dims: gives stages and chunks.
        forward_only: a micro-batch is held during its own pass alone.
        stage: pipeline rank; the first holds most.
    """
    if forward_only:
        return float(max(slot_tokens))
    if dims.virtual_pipeline == 1:
        window = min(dims.pipeline_parallel - stage, len(slot_tokens))
        held = most = sum(slot_tokens[:window])
        for slot in range(window, len(slot_tokens)):
            held += slot_tokens[slot] - slot_tokens[slot - window]
            most = max(most, held)
        return float(most)
    held = most = 0
    for backward, _, slot in stage_order(dims, stage, len(slot_tokens)):
        held += -slot_tokens[slot] if backward else slot_tokens[slot]
        most = max(most, held)
    return most / dims.virtual_pipeline


def _forward_time(costs: Sequence[float], stages: int) -> float:
    ends = [0.0] * stages
    for cost in costs:
        ready = 0.0
        for stage in range(stages):
            free = ends[stage]
            ready = (free if free > ready else ready) + cost
            ends[stage] = ready
    return ends[-1]


def interleaved_ends(
    costs: Sequence[float], dims: ParallelDims, backward_ratio: float, forward_only: bool
) -> Numbers:
    """End of each pass of `interleaved_program`, which numbers them from 1; before them 0."""
    chunk_costs = [cost / dims.virtual_pipeline for cost in costs]
    # By index: the forward cost of each slot, then the backward cost of each.
    chunk_costs += [backward_ratio * cost for cost in chunk_costs]
    columns = _columns(dims, len(costs), forward_only)
    ends = numbers([0.0] * (len(columns[0]) + 1))
    _run(*columns, numbers(chunk_costs), ends)
    return ends


@kernel
def _run(
    earlier: Integers,
    taken: Integers,
    held: Integers,
    further: Integers,
    costs_of: Integers,
    costs: Numbers,
    ends: Numbers,
) -> None:
    """Run the passes of a program, given by its columns."""
    passes = zip(earlier, taken, held, further, costs_of)  # noqa: B905
    for number, (before, first, second, third, cost) in enumerate(passes):
        start = ends[before]
        if ends[first] > start:
            start = ends[first]
        if ends[second] > start:
            start = ends[second]
        if ends[third] > start:
            start = ends[third]
        ends[number + 1] = start + costs[cost]


@functools.lru_cache(maxsize=64)
def _columns(
    dims: ParallelDims, num_microbatches: int, forward_only: bool
) -> tuple[Integers, Integers, Integers, Integers, Integers]:
    """Those of `interleaved_program`."""
    columns = zip(*interleaved_program(dims, num_microbatches, forward_only), strict=True)
    earlier, taken, held, further, costs = map(integers, columns)
    return earlier, taken, held, further, costs


@functools.lru_cache(maxsize=64)
def interleaved_program(
    dims: ParallelDims, num_microbatches: int, forward_only: bool
) -> tuple[tuple[int, int, int, int, int], ...]:
    """All passes of `passes_in_turn`, numbered from 1; none ends after the last.

    Returns:
        for each the numbers of the pass before it on its stage and of three more that it needs, 0
        in place of those that it does not, and the index of its cost: the slot, beyond
        `num_microbatches` for backward passes.
    """
    newest = [0] * dims.pipeline_parallel
    made = []
    for number, (stage, (backward, _, slot), needs) in enumerate(
        passes_in_turn(dims, num_microbatches, forward_only), start=1
    ):
        taken, held, further = [*(each + 1 for each in needs), 0, 0, 0][:3]
        cost = slot + (num_microbatches if backward else 0)
        made.append((newest[stage], taken, held, further, cost))
        newest[stage] = number
    return tuple(made)
