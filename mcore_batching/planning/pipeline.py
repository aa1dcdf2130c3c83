"""Megatron's pipeline schedules, simulated for micro-batches of unequal cost.

The order of passes is that of `megatron.core.pipeline_parallel.schedules` (1F1B of Narayanan et
al., "Efficient Large-Scale Language Model Training on GPU Clusters", 2021, and its interleaved
form); a test reads it off real runs. A pass begins when its stage is free and its input is there.

Guarantees: the same times on every platform, because only IEEE `+`, `*` and comparisons are used;
`pipeline_time` is the end of the last operation of `pipeline_operations`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from mcore_batching.planning.errors import Argument, ParallelDimsError
from mcore_batching.planning.parallel_dims import ParallelDims


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


Pass = tuple[bool, int, int]
"""True for backward, the model chunk, the slot."""


def stage_order(
    dims: ParallelDims, stage: int, num_microbatches: int, *, forward_only: bool = False
) -> list[Pass]:
    """The passes of one pipeline rank, in the order in which Megatron runs them.

    Args:
        dims: gives the number of stages and chunks, and the micro-batch group size.
        stage: pipeline rank.
        num_microbatches: of each data-parallel rank.
        forward_only: no backward passes.

    Raises:
        LayoutError: the layout's schedule cannot run this many micro-batches.
    """
    if not dims.is_legal_num_microbatches(num_microbatches):
        raise ParallelDimsError(
            f"the schedule cannot run {num_microbatches} micro-batches per rank; set ",
            Argument("num_microbatches"),
            f" to {dims.round_up_num_microbatches(max(num_microbatches, 0))}",
        )
    chunks = dims.virtual_pipeline
    group = dims.group_size if chunks > 1 else num_microbatches
    forward: list[Pass] = []
    backward: list[Pass] = []
    for first in range(0, num_microbatches, group):
        slots = range(first, min(first + group, num_microbatches))
        forward += [(False, chunk, slot) for chunk in range(chunks) for slot in slots]
        backward += [(True, chunk, slot) for chunk in reversed(range(chunks)) for slot in slots]
    if forward_only:
        return forward
    behind = dims.pipeline_parallel - stage - 1
    warm_up = behind if chunks == 1 else 2 * behind + (chunks - 1) * group
    warm_up = min(warm_up, len(forward))
    order = forward[:warm_up]
    for ahead, behind_it in zip(forward[warm_up:], backward, strict=False):
        order += [ahead, behind_it]
    return order + backward[len(forward) - warm_up :]


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
        transfer: time from the end of a pass until the next stage has its output.

    Returns:
        operations of all stages, each stage's in its order, stage after stage.

    Raises:
        LayoutError: the schedule cannot run this many micro-batches, or there is not one factor for
            each stage.
    """
    made: list[list[Operation]] = [[] for _ in range(dims.pipeline_parallel)]
    clock = [0.0] * dims.pipeline_parallel
    ends: list[tuple[int, float]] = []
    for stage, step, needed in passes_in_turn(dims, len(forward_costs), forward_only):
        backward, chunk, slot = step
        ready = 0.0
        if needed >= 0:
            of_stage, ready = ends[needed]
            ready += transfer if of_stage != stage else 0.0
        start = max(clock[stage], ready)
        cost = forward_costs[slot] / dims.virtual_pipeline
        clock[stage] = start + cost * (backward_ratio if backward else 1.0)
        ends.append((stage, clock[stage]))
        made[stage].append(Operation(stage, chunk, slot, backward, start, clock[stage]))
    return [operation for operations in made for operation in operations]


def passes_in_turn(
    dims: ParallelDims, num_microbatches: int, forward_only: bool
) -> list[tuple[int, Pass, int]]:
    """All passes of a step in an order in which every one comes after what it needs.

    Returns:
        for each its stage, itself, and the number of the one that it needs (-1: none).
    """
    stages, chunks = dims.pipeline_parallel, dims.virtual_pipeline
    orders = [
        stage_order(dims, stage, num_microbatches, forward_only=forward_only)
        for stage in range(stages)
    ]
    number: list[dict[Pass, int]] = [{} for _ in range(stages)]
    made: list[tuple[int, Pass, int]] = []
    waiting = list(range(stages))
    while waiting:
        before = len(made)
        for stage in waiting:
            own, order = number[stage], orders[stage]
            for at in range(len(own), len(order)):
                step = order[at]
                needed, index = _input_of(step, stage, stages, chunks), -1
                if needed is not None:
                    index = number[needed[0]].get(needed[1], -1)
                    if index < 0:
                        break
                own[step] = len(made)
                made.append((stage, step, index))
        waiting = [stage for stage in waiting if len(number[stage]) < len(orders[stage])]
        if waiting and len(made) == before:
            raise ParallelDimsError(f"the schedule of {dims} waits for itself; this is a bug")
    return made


def _input_of(step: Pass, stage: int, stages: int, chunks: int) -> tuple[int, Pass] | None:
    """The stage and the pass whose result a pass needs; None for the first."""
    backward, chunk, slot = step
    if not backward:
        if stage > 0:
            return stage - 1, step
        return (stages - 1, (False, chunk - 1, slot)) if chunk > 0 else None
    if stage < stages - 1:
        return stage + 1, step
    return (0, (True, chunk + 1, slot)) if chunk < chunks - 1 else (stage, (False, chunk, slot))


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
        LayoutError: the schedule cannot run this many micro-batches.
    """
    if dims.virtual_pipeline > 1:
        return _interleaved_time(forward_costs, dims, backward_ratio, forward_only)
    if not forward_costs:
        raise ParallelDimsError("a schedule runs one micro-batch or more, got none")
    if forward_only:
        return _forward_time(forward_costs, dims.pipeline_parallel)
    return _one_f_one_b_time(forward_costs, dims.pipeline_parallel, backward_ratio)


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


def _interleaved_time(
    costs: Sequence[float], dims: ParallelDims, backward_ratio: float, forward_only: bool
) -> float:
    chunk_costs = [cost / dims.virtual_pipeline for cost in costs]
    # By index: the forward cost of each slot, then the backward cost of each.
    chunk_costs += [backward_ratio * cost for cost in chunk_costs]
    clock = [0.0] * dims.pipeline_parallel
    ends: list[float] = []
    ended = ends.append
    for stage, needed, cost in interleaved_program(dims, len(costs), forward_only):
        start = clock[stage]
        if needed >= 0 and ends[needed] > start:
            start = ends[needed]
        start += chunk_costs[cost]
        clock[stage] = start
        ended(start)
    return max(clock)


@functools.lru_cache(maxsize=64)
def interleaved_program(
    dims: ParallelDims, num_microbatches: int, forward_only: bool
) -> tuple[tuple[int, int, int], ...]:
    """`passes_in_turn`, with the index of its cost in place of each pass."""
    return tuple(
        (stage, needed, slot + (num_microbatches if backward else 0))
        for stage, (backward, _, slot), needed in passes_in_turn(
            dims, num_microbatches, forward_only
        )
    )


def _one_f_one_b_time(costs: Sequence[float], stages: int, backward_ratio: float) -> float:
    """1F1B in rounds: in round j every stage runs forward j, then the backward that it has due.

    Stage s is `stages - 1 - s` micro-batches behind with its backward passes, so what backward i
    of stage s needs, backward i of stage s + 1, ran one round before.
    """
    count, last = len(costs), stages - 1
    backward_costs = [backward_ratio * cost for cost in costs]
    clock = [0.0] * stages
    ended = [0.0] * (stages + 1)
    for number in range(count + last):
        if number < count:
            cost, ready = costs[number], 0.0
            for stage in range(stages):
                free = clock[stage]
                ready = (free if free > ready else ready) + cost
                clock[stage] = ready
        due = number - last
        first = 0
        if due < 0:
            first, due = -due, 0
        for stage in range(first, min(stages, first + count - due)):
            start = clock[stage]
            if stage < last and ended[stage + 1] > start:
                start = ended[stage + 1]
            start += backward_costs[due]
            clock[stage] = start
            ended[stage] = start
            due += 1
    return clock[0]
