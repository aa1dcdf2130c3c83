"""One rank's micro-batches, where a framework has dealt samples to ranks, and their model."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from mcore_batching.batch.consensus import Consensus
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

# By the first chunk of each model that was checked; a model that is gone takes its costs along.
_costs: WeakKeyDictionary[Any, CostModel] = WeakKeyDictionary()


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
    # Each rank gives for every count when its own step would end, so that all choose the same one.
    with consensus.agreement("packing") as agree:
        problem = Problem.of(lengths, dims, config, cost_model)
        packed = pack_shard(problem)
        ends = agree.max("ends", shard_ends(problem, packed))
    # No bound on tokens in flight, so there is one count to choose.
    [soonest] = soonest_counts(ends.value, dims, config)
    count = round_up(max(soonest, fewest), multiple)
    # Ranks with fewer split what they have before they add placeholders.
    with consensus.agreement("filling"):
        return fill_shard(problem, packed, count)


def caller_with(attribute: str) -> Any:
    """The nearest caller's ``self`` with this attribute of its own; None where no caller has it."""
    # verl and SkyRL hand over a batch alone, and no public name leads from there to its model, the
    # engine's or worker's.
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if attribute in getattr(owner, "__dict__", ()):
            return owner
        frame = frame.f_back  # type: ignore[assignment]
    return None


def checked_costs(chunks: list[Any], consensus: Consensus, *, packs_rows: bool) -> CostModel:
    """The first guess of a Megatron model's costs. A collective at the first call with it.

    Where samples share rows (``packs_rows``), a model that cannot run these on some rank is a
    `RankFailedError` on every rank.
    """
    # Megatron is there where its models are; other engines' processes may lack it.
    from megatron.core.utils import get_model_config, unwrap_model

    from mcore_batching.megatron import topology
    from mcore_batching.megatron.checks.validation import prepare_packed_model

    if chunks[0] not in _costs:
        if packs_rows:
            with consensus.agreement("checking the model"):
                prepare_packed_model(chunks)
        vocabulary, config = topology.vocabulary_size(chunks), get_model_config(chunks[0])
        _costs[chunks[0]] = topology.first_guess(vocabulary, config, unwrap_model(chunks[0]))
    return _costs[chunks[0]]
