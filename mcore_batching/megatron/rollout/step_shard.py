"""This rank's samples of one optimizer step, packed and filled by the planner."""

from __future__ import annotations

from collections.abc import Sequence
from operator import methodcaller

from mcore_batching.megatron.errors import DynamicBatchArgumentError
from mcore_batching.megatron.job.options import Options
from mcore_batching.megatron.rollout.maker import Plan
from mcore_batching.megatron.rollout.settings import Settings
from mcore_batching.megatron.rows.shards import MicroBatches
from mcore_batching.planning import (
    ConfigError,
    Problem,
    ShardOutlook,
    at_least,
    fill_shard,
    pack_shard,
    shard_ends,
    shard_outlook,
    soonest_counts,
    soonest_filling,
)
from mcore_batching.planning.pipeline import SplitStage
from mcore_batching.planning.planning_process import Call
from mcore_batching.planning.shard import split_shard


class StepShard:
    """This rank's samples of one optimizer step, and what the planner makes of them.

    Args:
        options: without ``--use-dynamic-batch-size`` micro-batches hold ``micro_batch_size``
            samples each.
        settings: the same on every rank.
        indices: local sample indices of the step.
        lengths: total length of each of them, in tokens.
        forward_only: plan for forward passes alone.

    Attributes:
        plan: plans what takes long; in line at first.
        ends: of `shard_ends`, of which all ranks need the largest; from `pack` on.
        filled: the micro-batches with each number that is left to choose from, as local sample
            indices, from `fill` on.
    """

    def __init__(
        self,
        options: Options,
        settings: Settings,
        indices: Sequence[int],
        lengths: list[int],
        forward_only: bool,
    ) -> None:
        with options.naming_the_cap(forward_only=forward_only, samples=indices):
            self._problem = Problem.of(
                lengths,
                settings.dims,
                settings.config,
                settings.cost_model,
                forward_only=forward_only,
            )
        self._indices = indices
        self._size: int | None = None
        self.plan: Plan = methodcaller("plan")
        self.ends: list[float] = []
        self.filled: list[MicroBatches] = []
        if not options.use_dynamic_batch_size:
            if options.micro_batch_size is None:
                raise DynamicBatchArgumentError(
                    "micro-batches have no size: set --use-dynamic-batch-size and "
                    "--max-tokens-per-gpu, or micro_batch_size to a number of samples"
                )
            self._size = at_least("micro_batch_size", options.micro_batch_size, 1, ConfigError)

    def pack(self) -> None:
        """Know `ends`."""
        if self._size is None:
            # As few as hold the samples; `fill` splits them up to the count that all ranks take.
            self._bins: list[list[int]] = self.plan(Call(pack_shard, (self._problem,)))
            self.ends = self.plan(Call(shard_ends, (self._problem, self._bins)))
        else:
            everything, size = list(range(self._problem.num_samples)), self._size
            self._bins = [everything[i : i + size] for i in range(0, len(everything), size)]
            # As `shard_ends` has it where nothing is searched for: all ranks then take the most
            # that any has.
            self.ends = [float(len(self._bins)), float(len(everything))]

    def fill(self, latest: Sequence[float]) -> list[ShardOutlook]:
        """Bring the micro-batches to the numbers of `soonest_counts`.

        Args:
            latest: the largest of each of `ends` over all ranks.

        Returns:
            the outlook with each number.
        """
        problem = self._problem
        # Two where tokens in flight are bounded: which of them fits is known once all have filled.
        made = [
            self.plan(Call(fill_shard, (problem, self._bins, count)))
            for count in soonest_counts(latest, problem.dims, problem.config)
        ]
        self.filled = [
            # The planner counts the step's samples from 0; from here on they are those of the
            # batch.
            tuple(tuple(self._indices[i] for i in places) for places in micro_batches)
            for micro_batches in made
        ]
        return [shard_outlook(problem, micro_batches) for micro_batches in made]

    def chosen(self, outlooks: Sequence[ShardOutlook]) -> MicroBatches:
        """Local sample indices of the micro-batches with which the step ends first.

        Args:
            outlooks: with each number, the worst of all ranks.
        """
        return self.filled[soonest_filling(outlooks, self._problem.config)]

    def split(self, micro_batches: MicroBatches) -> tuple[MicroBatches, tuple[SplitStage, ...]]:
        """As `split_shard`, of micro-batches as local sample indices."""
        place = {index: at for at, index in enumerate(self._indices)}
        places = tuple(tuple(place[i] for i in indices) for indices in micro_batches)
        ordered, stages = self.plan(Call(split_shard, (self._problem, places)))
        return tuple(tuple(self._indices[i] for i in at) for at in ordered), stages
