"""One rank's micro-batches, where samples stay on the ranks to which a framework dealt them."""

from __future__ import annotations

from collections.abc import Sequence

from mcore_batching.batch.agreement.consensus import Consensus, Statement
from mcore_batching.batch.agreement.figures import largest
from mcore_batching.planning import (
    CostModel,
    MicroBatches,
    ParallelDims,
    PlannerConfig,
    Problem,
    fill_shard,
    pack_shard,
    shard_ends,
    soonest_counts,
)
from mcore_batching.planning.integers import round_up


def planned_shard(
    lengths: Sequence[int],
    dims: ParallelDims,
    config: PlannerConfig,
    consensus: Consensus,
    *,
    cost_model: CostModel | None = None,
    fewest: int = 1,
    multiple: int = 1,
) -> MicroBatches:
    """This rank's micro-batches, the same number on every rank; empty ones are placeholders.

    A collective over the ranks of ``consensus``, on all of which a failure of one is raised. Their
    number is at least ``fewest`` and a multiple of ``multiple``.
    """

    def pack() -> tuple[Problem, list[list[int]]]:
        problem = Problem.of(lengths, dims, config, cost_model)
        return problem, pack_shard(problem)

    # Each rank says at every count when its own step would end, so that all choose the same one.
    packed = consensus.agree(
        "packing",
        pack,
        lambda packed: Statement(figures={"ends": largest(shard_ends(*packed))}),
    )
    # No bound on tokens in flight, so there is one count to choose.
    [soonest] = soonest_counts(packed.figures["ends"], dims, config)
    count = round_up(max(soonest, fewest), multiple)
    # Ranks with fewer split what they have before they add placeholders.
    return consensus.agree("filling", lambda: fill_shard(*packed.result, count)).result
