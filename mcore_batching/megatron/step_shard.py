"""This rank's samples of one optimizer step, packed and filled by the planner."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from mcore_batching.megatron.arguments import naming_the_cap, uses_dynamic_batch_size
from mcore_batching.megatron.shards import MicroBatches
from mcore_batching.planning import (
    ConfigError,
    CostModel,
    ParallelDims,
    PlannerConfig,
    Problem,
    ShardOutlook,
    at_least,
    fill_shard,
    shard_outlook,
    shard_packings,
    soonest_packing,
)


@dataclasses.dataclass(frozen=True)
class Settings:
    """The planner's arguments beside the lengths; the same on every rank."""

    dims: ParallelDims
    config: PlannerConfig
    cost_model: CostModel


class StepShard:
    """This rank's samples of one optimizer step, and what the planner makes of them.

    Args:
        args: Megatron's arguments; without ``--use-dynamic-batch-size`` micro-batches hold
            ``micro_batch_size`` samples each.
        settings: the same on every rank.
        indices: local sample indices of the step.
        lengths: total length of each of them, in tokens.
        forward_only: plan for forward passes alone.

    Attributes:
        packings: ways to pack the samples, as places in ``indices`` [ways][micro-batches]; the
            same number of ways on every rank.
        filled: the same ways, as local sample indices, from `fill` on.
    """

    def __init__(
        self,
        args: Any,
        settings: Settings,
        indices: Sequence[int],
        lengths: list[int],
        forward_only: bool,
    ) -> None:
        with naming_the_cap(args, forward_only=forward_only):
            self._problem = Problem.of(
                lengths,
                settings.dims,
                settings.config,
                settings.cost_model,
                forward_only=forward_only,
            )
        self._indices = indices
        self.filled: list[MicroBatches] = []
        if uses_dynamic_batch_size(args):
            self.packings = shard_packings(self._problem)
        else:
            given, everything = getattr(args, "micro_batch_size", None), list(range(len(lengths)))
            size = at_least("micro_batch_size", given, 1, ConfigError)
            self.packings = [[everything[i : i + size] for i in range(0, len(lengths), size)]]

    def fill(self, largest: Sequence[int]) -> list[ShardOutlook]:
        """Bring each packing to a count that is legal for the pipeline schedule.

        Args:
            largest: of each packing, the most micro-batches that any rank has.

        Returns:
            the outlook of each.
        """
        round_up = self._problem.dims.round_up_num_microbatches
        made = [
            fill_shard(self._problem, bins, round_up(max(1, count)))
            for bins, count in zip(self.packings, largest, strict=True)
        ]
        self.filled = [
            tuple(tuple(self._indices[i] for i in places) for places in micro_batches)
            for micro_batches in made
        ]
        return [shard_outlook(self._problem, micro_batches) for micro_batches in made]

    def chosen(self, outlooks: Sequence[ShardOutlook]) -> MicroBatches:
        """Local sample indices of the packing with which the step ends first.

        Args:
            outlooks: of each packing, the worst of all ranks.
        """
        return self.filled[soonest_packing(outlooks, self._problem.config)]
