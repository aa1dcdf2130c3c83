"""The order in which Megatron's pipeline schedules run passes, and what each pass waits for.

The order is that of `megatron.core.pipeline_parallel.schedules` (1F1B of Narayanan et al.,
"Efficient Large-Scale Language Model Training on GPU Clusters", 2021, and its interleaved form); a
test reads it off real runs. A pass begins when its stage is free and its input is there.

A transfer between stages ends only when the receiver has begun it, too: which is at the end of its
pass before the one that needs it. The interleaved schedule waits for what it sent (since
megatron-core 0.18; an earlier one, up to 11 % faster where costs are unequal, could free a tensor
that was still on its way): `_Transfers`. Under 1F1B a stage waits for no more than the next input,
which comes later, unless micro-batches shrink while the pipeline fills.
"""

from __future__ import annotations

from collections.abc import Sequence

from mcore_batching.planning.errors import Argument, ParallelDimsError
from mcore_batching.planning.parallel_dims import ParallelDims

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
        ParallelDimsError: the layout's schedule cannot run this many micro-batches.
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
