"""One plan for the samples of all data-parallel ranks, and the exchange that it asks for.

Guarantees
- Lengths are gathered first, and every rank makes the same plan of them; only then do samples
  move, each once, to the rank that runs it.
- Every sample of the step ends up on exactly one data-parallel rank.
- All ranks of a replica hold the same samples afterwards, as before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import accumulate
from typing import Any

from mcore_batching.megatron.consensus import Consensus, require_equal
from mcore_batching.megatron.errors import PlanningFailedError
from mcore_batching.megatron.rollout_batch import RolloutBatch
from mcore_batching.megatron.schedule import MicroBatches
from mcore_batching.planning import CostModel, ParallelDims, PlannerConfig, StepPlan, plan_step


def plan_globally(
    batch: RolloutBatch,
    dims: ParallelDims,
    config: PlannerConfig,
    cost_model: CostModel,
    consensus: Consensus,
    *,
    forward_only: bool = False,
) -> tuple[RolloutBatch, Callable[[], tuple[MicroBatches, ...]]]:
    """Plan one step over all ranks' samples and move them where the plan wants them.

    A collective over all ranks.

    Args:
        batch: this replica's samples.
        dims: the job's layout.
        config: the planner's settings.
        cost_model: what a sample costs.
        rendezvous: where ranks compare notes.
        forward_only: plan for forward passes alone.

    Returns:
        the samples that this replica runs, and what gives its micro-batches of them, in one step.

    Raises:
        PlanningFailedError: on every rank, if planning failed on any.
        PlanMismatchError: on every rank, if their fields or plans differ.
    """

    def resolve() -> RolloutBatch:
        return batch if batch.template else batch.resolved()

    def says(final: RolloutBatch) -> dict[str, Any]:
        return {"lengths": final.total_lengths, "everywhere": final.comparable()}

    final, notes = consensus.guard(PlanningFailedError, resolve, says)
    require_equal(notes, lambda note: note.value["everywhere"])
    shards = {note.data_parallel_rank: note.value["lengths"] for note in notes}
    ranks = sorted(shards)
    lengths = [length for rank in ranks for length in shards[rank]]
    first = dict(zip(ranks, accumulate((len(shards[r]) for r in ranks), initial=0), strict=False))

    plan, notes = consensus.guard(
        PlanningFailedError,
        lambda: plan_step(lengths, dims, config, cost_model, forward_only=forward_only),
        StepPlan.digest,
    )
    require_equal(notes, lambda note: {"plan (sha256)": note.value})

    mine = range(
        first[consensus.data_parallel_rank],
        first[consensus.data_parallel_rank] + len(final.total_lengths),
    )
    outgoing = []
    for rank in ranks:
        leaving = [i for i in _samples_of(plan, rank) if i in mine]
        columns = {
            name: [values[i - mine.start] for i in leaving] for name, values in final.data.items()
        }
        outgoing.append((leaving, columns))
    held: dict[int, tuple[dict[str, list[Any]], int]] = {}
    for numbers, columns in consensus.exchange(outgoing):
        held |= {number: (columns, place) for place, number in enumerate(numbers)}
    here = _samples_of(plan, consensus.data_parallel_rank)
    data = {name: [held[i][0][name][held[i][1]] for i in here] for name in final.template}
    local = {number: place for place, number in enumerate(here)}
    moved = dataclasses.replace(final, data=data, total_lengths=[lengths[i] for i in here])
    micro_batches = plan.micro_batches[consensus.data_parallel_rank]

    def fill() -> tuple[MicroBatches, ...]:
        return (tuple(tuple(local[i] for i in ids) for ids in micro_batches),)

    return moved, fill


def _samples_of(plan: StepPlan, rank: int) -> list[int]:
    """The samples that a data-parallel rank runs, ascending."""
    return sorted(i for micro_batch in plan.micro_batches[rank] for i in micro_batch)
