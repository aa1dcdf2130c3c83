"""Megatron's pipeline schedules on ranks that share some of their micro-batches.

    rank 0   [a]  [x]  [b]        x is one row over both ranks: in every pass of slot 1, on every
    rank 1   [c]  [x]  [d]        stage, both begin when the later one is ready

Ranks run the same passes in the same order, so one pass of all ranks is simulated after the other.
Ranks whose every slot is shared by all, as expert parallelism makes them, are one rank with the
costliest micro-batch of each slot: `pipeline.pipeline_time` is enough for those.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from mcore_batching.planning.parallel_dims import ParallelDims
from mcore_batching.planning.pass_order import passes_in_turn
from mcore_batching.planning.pipeline import Operation, interleaved_program

Blocks = Sequence[tuple[int, int]]
"""First rank, and the one after the last, of each micro-batch of a slot that ranks share."""
Ends = list[list[float]]
"""End of each pass on each rank [1 + passes][ranks], in the order of `interleaved_program`, which
numbers them from 1; before them the beginning of the step. The last pass ends last on each rank."""


def blocks_of(sizes: Sequence[Sequence[int]]) -> list[Blocks]:
    """The ranks that share a micro-batch [num_microbatches], from context-parallel sizes
    [ranks][num_microbatches]."""
    return [
        [(rank, rank + size) for rank, size in enumerate(slot) if size > 1 and rank % size == 0]
        for slot in zip(*sizes, strict=True)
    ]


@functools.lru_cache(maxsize=4096)
def _first_pass(dims: ParallelDims, num_microbatches: int, forward_only: bool, slot: int) -> int:
    """Passes of `interleaved_program` before the first of a slot or one after it."""
    passes = interleaved_program(dims, num_microbatches, forward_only)
    slots = (cost % num_microbatches for *_, cost in passes)
    return next(number for number, each in enumerate(slots) if each >= slot)


def coupled_passes(
    slot_costs: Sequence[Sequence[float]],
    slot_blocks: Sequence[Blocks],
    dims: ParallelDims,
    *,
    backward_ratio: float = 2.0,
    forward_only: bool = False,
    before: tuple[Ends, int] | None = None,
) -> Ends:
    """End of every pass on every rank.

    Args:
        slot_costs: forward cost of each micro-batch on a stage [num_microbatches][ranks], that of
            a shared one on each of its ranks.
        slot_blocks: which ranks share a micro-batch [num_microbatches].
        dims: gives stages and chunks.
        backward_ratio: cost of a backward pass over its forward pass.
        forward_only: no backward passes.
        before: what this gave for costs that are the same in all slots below a number, and that
            number; saves time.
    """
    count, chunks = len(slot_costs), dims.virtual_pipeline
    costs = [[cost / chunks for cost in of_slot] for of_slot in slot_costs]
    costs += [[backward_ratio * cost for cost in of_slot] for of_slot in costs]
    blocks = [*slot_blocks, *slot_blocks]
    ranks = len(slot_costs[0])
    passes = interleaved_program(dims, count, forward_only)
    ends: Ends = [[0.0] * ranks]
    if before is not None:
        same = _first_pass(dims, count, forward_only, before[1])
        ends, passes = before[0][: same + 1], passes[same:]
    ended = ends.append
    for earlier, taken, held, further, cost in passes:
        free, ready = ends[earlier], ends[taken]
        if held:
            ready = list(map(max, ready, ends[held], ends[further]))
        shared = blocks[cost]
        if not shared:
            ended(
                [
                    (a if a > b else b) + more
                    for a, b, more in zip(free, ready, costs[cost], strict=True)
                ]
            )
        elif shared[0][1] - shared[0][0] == ranks:
            ended([max(max(free), max(ready)) + costs[cost][0]] * ranks)
        else:
            start = [a if a > b else b for a, b in zip(free, ready, strict=True)]
            for first, after in shared:
                start[first:after] = [max(start[first:after])] * (after - first)
            ended([a + more for a, more in zip(start, costs[cost], strict=True)])
    return ends


def coupled_operations(
    slot_costs: Sequence[Sequence[float]],
    slot_blocks: Sequence[Blocks],
    dims: ParallelDims,
    *,
    backward_ratio: float = 2.0,
    forward_only: bool = False,
) -> list[list[Operation]]:
    """Every pass of each rank's step with its times, stage after stage, each in its order.

    Arguments as in `coupled_passes`.
    """
    ends = coupled_passes(
        slot_costs, slot_blocks, dims, backward_ratio=backward_ratio, forward_only=forward_only
    )
    made: list[list[Operation]] = []
    for rank in range(len(slot_costs[0])):
        operations = []
        for number, (stage, (backward, chunk, slot), _) in enumerate(
            passes_in_turn(dims, len(slot_costs), forward_only)
        ):
            took = slot_costs[slot][rank] / dims.virtual_pipeline
            end = ends[number + 1][rank]
            start = end - took * (backward_ratio if backward else 1.0)
            operations.append(Operation(stage, chunk, slot, backward, start, end))
        made.append(sorted(operations, key=lambda each: each.stage))
    return made


def coupled_chain(
    ends: Ends,
    rank: int,
    slot_blocks: Sequence[Blocks],
    dims: ParallelDims,
    *,
    backward_ratio: float = 2.0,
    forward_only: bool = False,
) -> dict[tuple[int, int], float]:
    """The longest chain of passes up to the end of a rank's step: how often each micro-batch is on
    it, forward passes counting 1, by its first rank and slot.

    No costs of the same micro-batches make that rank end before the sum of weights times costs.

    Args:
        ends: what `coupled_passes` gave for the rest.
        rank: whose end.
        slot_blocks: as there.
        dims: as there.
        backward_ratio: as there.
        forward_only: as there.
    """
    count = len(slot_blocks)
    passes = interleaved_program(dims, count, forward_only)
    number = len(passes)
    share = 1.0 / dims.virtual_pipeline
    weights: dict[tuple[int, int], float] = {}
    while number:
        *needs, cost = passes[number - 1]
        slot = cost if cost < count else cost - count
        own = rank
        waiting: Sequence[int] = (rank,)
        for first, after in slot_blocks[slot]:
            if first <= rank < after:
                own, waiting = first, range(first, after)
        weights[own, slot] = weights.get((own, slot), 0.0) + share * (
            1.0 if cost < count else backward_ratio
        )
        latest, number = 0.0, 0
        for earlier in needs:
            for each in waiting:
                if ends[earlier][each] > latest:
                    latest, number, rank = ends[earlier][each], earlier, each
    return weights
