"""Megatron's pipeline schedules, simulated for micro-batches of unequal cost.

The order of passes is that of `megatron.core.pipeline_parallel.schedules` (1F1B of Narayanan et
al., "Efficient Large-Scale Language Model Training on GPU Clusters", 2021, and its interleaved
form); a test reads it off real runs. A pass begins when its stage is free and its input is there.

A transfer between stages takes no time, but ends only when the receiver has begun it, too: which is
at the end of its pass before the one that needs it. The interleaved schedule waits for what it sent
(since megatron-core 0.18; an earlier one, up to 11 % faster where costs are unequal, could free a
tensor that was still on its way): `_Transfers`. Under 1F1B a stage waits for no more than the next
input, which comes later, unless micro-batches shrink while the pipeline fills.

Guarantees: the same times on every platform, because only IEEE `+`, `*` and comparisons are used;
`pipeline_time` is the end of the last operation of `pipeline_operations`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from mcore_batching.planning.compiled import Integers, Numbers, integers, kernel, numbers
from mcore_batching.planning.errors import Argument, ParallelDimsError
from mcore_batching.planning.parallel_dims import ParallelDims
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
    warm_up = _warm_up(dims, stage, num_microbatches)
    order = forward[:warm_up]
    for ahead, behind_it in zip(forward[warm_up:], backward, strict=False):
        order += [ahead, behind_it]
    return order + backward[len(forward) - warm_up :]


def _warm_up(dims: ParallelDims, stage: int, num_microbatches: int) -> int:
    """Forward passes of a stage before those that alternate with backward passes."""
    behind, chunks = dims.pipeline_parallel - stage - 1, dims.virtual_pipeline
    passes = behind if chunks == 1 else 2 * behind + (chunks - 1) * dims.group_size
    return min(passes, chunks * num_microbatches)


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
        LayoutError: the schedule cannot run this many micro-batches, or there is not one factor for
            each stage.
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


def passes_in_turn(
    dims: ParallelDims, num_microbatches: int, forward_only: bool
) -> list[tuple[int, Pass, tuple[int, ...]]]:
    """All passes of a step in an order in which every one comes after what it needs.

    Returns:
        for each its stage, itself, and the numbers of those that it needs beside the one before it
        on its stage: first the one whose output it takes, then others at whose end a transfer ends
        that it waits for.
    """
    stages, chunks = dims.pipeline_parallel, dims.virtual_pipeline
    orders = [
        stage_order(dims, stage, num_microbatches, forward_only=forward_only)
        for stage in range(stages)
    ]
    waits: list[list[list[_Place]]] = [[[] for _ in order] for order in orders]
    if chunks > 1:
        transfers = _Transfers(orders, dims, num_microbatches)
        waits = [transfers.waits(stage) for stage in range(stages)]
    number: list[dict[Pass, int]] = [{} for _ in range(stages)]
    made: list[tuple[int, Pass, tuple[int, ...]]] = []
    waiting = list(range(stages))
    while waiting:
        before = len(made)
        for stage in waiting:
            own, order = number[stage], orders[stage]
            for at in range(len(own), len(order)):
                taken = _input_of(order[at], stage, stages, chunks)
                needs = [taken] if taken is not None else []
                needs += waits[stage][at]
                known = [number[of_stage].get(step, -1) for of_stage, step in needs]
                if -1 in known:
                    break
                own[order[at]] = len(made)
                made.append((stage, order[at], tuple(dict.fromkeys(known))))
        waiting = [stage for stage in waiting if len(number[stage]) < len(orders[stage])]
        if waiting and len(made) == before:
            raise ParallelDimsError(f"the schedule of {dims} waits for itself; this is a bug")
    return made


_Place = tuple[int, Pass]
"""A stage and one of its passes."""


class _Transfers:
    """Waits of the interleaved schedule for transfers other than of a pass's own input.

    After the passes of warm-up and cool-down a stage waits for both its neighbours at once; after
    other forward passes for what it sent, after other backward passes for what it sent the time
    before.

    Args:
        orders: passes of each stage.
        dims: gives stages and chunks.
        num_microbatches: of each data-parallel rank.
    """

    def __init__(
        self, orders: Sequence[Sequence[Pass]], dims: ParallelDims, num_microbatches: int
    ) -> None:
        self._orders = orders
        self._last = dims.pipeline_parallel - 1
        self._last_chunk = dims.virtual_pipeline - 1
        self._passes = [
            {way: [step for step in order if step[0] == way] for way in (False, True)}
            for order in orders
        ]
        self._warm_ups = [
            len(order)
            if len(order) == dims.virtual_pipeline * num_microbatches
            else _warm_up(dims, stage, num_microbatches)
            for stage, order in enumerate(orders)
        ]

    def waits(self, stage: int) -> list[list[_Place]]:
        """Of each pass of a stage, the passes of others that it waits for."""
        order, forwards = self._orders[stage], len(self._passes[stage][False])
        steady = forwards - self._warm_ups[stage]
        waits: list[list[_Place]] = [[] for _ in order]
        numbers = {False: 0, True: 0}
        unfinished: list[_Place] = []
        for at, (backward, _, _) in enumerate(order[:-1]):
            number = numbers[backward]
            numbers[backward] += 1
            sent = self._receiver_begins(stage, backward, number)
            if backward and number < steady:
                sent, unfinished = unfinished, sent
            elif backward or number < self._warm_ups[stage]:
                sent = sent + self._received(stage, backward, number)
            waits[at + 1] += sent
        return waits

    def _receiver_begins(self, stage: int, backward: bool, number: int) -> list[_Place]:
        """The pass after which the next stage begins to receive what a pass has sent."""
        ahead, beyond, last_chunk = 1, self._last, self._last_chunk
        if backward:
            ahead, beyond, last_chunk = -1, 0, 0
        receiver, before = stage + ahead, number - 1
        if stage == beyond:
            if self._passes[stage][backward][number][1] == last_chunk:
                return []
            receiver, before = self._last - beyond, number + self._last
        if before >= 0:
            return [(receiver, self._passes[receiver][backward][before])]
        if backward:  # begun after the last pass of warm-up
            return [(receiver, self._passes[receiver][False][self._warm_ups[receiver] - 1])]
        return []

    def _received(self, stage: int, backward: bool, number: int) -> list[_Place]:
        """The pass from which the stage that begins a chunk receives, for a later pass, after one
        of its own."""
        sender, last_chunk = (0, 0) if backward else (self._last, self._last_chunk)
        of_sender = number - self._last
        if stage != self._last - sender or of_sender < 0:
            return []
        step = self._passes[sender][backward][of_sender]
        return [] if step[1] == last_chunk else [(sender, step)]


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
