"""This rank's samples of one optimizer step: packed, then filled up to the count of all ranks.

packed = StepShard.of(options, settings, indices, lengths, forward_only).packed(plan)
latest = element-wise maximum of packed.ends over all ranks
packed.filled(latest)       micro-batches in the number with which the latest rank ends soonest
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mcore_batching.megatron.job.options import Options
from mcore_batching.megatron.rollout.maker import Plan
from mcore_batching.megatron.rollout.settings import Settings
from mcore_batching.megatron.rows.shards import MicroBatches
from mcore_batching.planning import (
    Problem,
    fill_shard,
    pack_local,
    shard_ends,
    soonest_count,
)
from mcore_batching.planning.planning_process import Call


@dataclass(frozen=True)
class StepShard:
    """This rank's samples of one step: to the planner they count from 0, `indices` are local."""

    problem: Problem
    indices: Sequence[int]

    @classmethod
    def of(
        cls,
        options: Options,
        settings: Settings,
        indices: Sequence[int],
        lengths: list[int],
        forward_only: bool,
    ) -> StepShard:
        """Of local samples and their total lengths, in tokens; raises where they may not be over
        the cap."""
        parts = settings.dims, settings.config, settings.cost_model
        with options.naming_the_cap(forward_only=forward_only, samples=indices):
            return cls(Problem.of(lengths, *parts, forward_only=forward_only), indices)

    def packed(self, plan: Plan) -> PackedShard:
        """In as few micro-batches as hold the samples; filling splits them."""
        bins = plan(Call(pack_local, (self.problem,)))
        return PackedShard(self, plan, bins, plan(Call(shard_ends, (self.problem, bins))))


@dataclass(frozen=True)
class PackedShard:
    """A packed `StepShard`."""

    shard: StepShard
    plan: Plan  # of what takes long
    bins: list[list[int]]  # samples of each micro-batch, as the planner counts them
    ends: list[float]  # of `shard_ends`

    def filled(self, latest: Sequence[float]) -> MicroBatches:
        """The micro-batches brought to the `soonest_count`, from the largest `ends` of all
        ranks."""
        problem = self.shard.problem
        count = soonest_count(latest, problem.dims)
        made = self.plan(Call(fill_shard, (problem, self.bins, count)))
        return tuple(tuple(self.shard.indices[i] for i in places) for places in made)
