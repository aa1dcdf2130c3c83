"""One step as the search sees it: numbers for each sample, and what a rank's slots take.

Guarantees: the objective counts units of work, never time, so that a search which stops after so
many units stops at the same place everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mcore_batching.planning.config import PlannerConfig
from mcore_batching.planning.cost import CostModel
from mcore_batching.planning.parallel_dims import ParallelDims
from mcore_batching.planning.pipeline import inflight_tokens, pipeline_time
from mcore_batching.planning.tokens import (
    padded_sample_tokens,
    round_up,
    row_capacity_tokens,
    row_multiple_tokens,
)

MOST_SAMPLES_COUNTED = 4096
"""Effort grows with the samples of a step up to here; beyond, there is ever less to gain."""

Slots = list[list[int]]
"""One rank's micro-batches in slot order: sample indices, an empty list for a placeholder."""


@dataclass(kw_only=True)
class StepWork:
    """A step to be planned.

    Attributes:
        costs: forward cost of each sample [samples].
        tokens: padded tokens of each sample [samples].
        alone: the samples that exceed the cap.
        capacity: most padded tokens of a micro-batch.
        row_multiple: a micro-batch's tokens are padded to a multiple of this.
        dims: the job's layout.
        cost_model: the rest of the costs.
        forward_only: whether the step has no backward passes.
        max_inflight_tokens: most padded tokens whose activations the first stage may hold; None: no
            bound.
        effort: units of work left; one unit is one pass of one micro-batch, simulated.
    """

    costs: list[float]
    tokens: list[int]
    alone: frozenset[int]
    capacity: int
    dims: ParallelDims
    cost_model: CostModel
    row_multiple: int = 1
    forward_only: bool = False
    max_inflight_tokens: int | None = None
    effort: int = 0
    _passes_a_slot: int = field(init=False)

    def __post_init__(self) -> None:
        """Work out what a simulated slot counts."""
        passes = 1 if self.forward_only else 2
        chunks = self.dims.pipeline_parallel * self.dims.virtual_pipeline
        self._passes_a_slot = passes * chunks

    @property
    def spent(self) -> bool:
        """Whether no effort is left."""
        return self.effort <= 0

    def slot_costs(self, slots: Sequence[Sequence[int]]) -> list[float]:
        """Forward cost of each micro-batch [slots]."""
        fixed, costs = self.cost_model.per_micro_batch, self.costs
        made = []
        for samples in slots:
            total = fixed
            for sample in samples:
                total += costs[sample]
            made.append(total)
        return made

    def time(self, slot_costs: Sequence[float]) -> float:
        """When a rank with these slots has ended its step."""
        self.effort -= self._passes_a_slot * (len(slot_costs) + self.dims.pipeline_parallel)
        return pipeline_time(
            slot_costs,
            self.dims,
            backward_ratio=self.cost_model.backward_ratio,
            forward_only=self.forward_only,
        )

    def inflight(self, slots: Sequence[Sequence[int]]) -> float:
        """Padded tokens that the first stage holds at most."""
        return inflight_tokens(
            [
                round_up(sum(self.tokens[sample] for sample in samples), self.row_multiple)
                for samples in slots
            ],
            self.dims,
            forward_only=self.forward_only,
        )

    def fits_in_memory(self, slots: Sequence[Sequence[int]]) -> bool:
        """Whether the first stage holds no more than it may."""
        bound = self.max_inflight_tokens
        return bound is None or self.inflight(slots) <= bound


def step_work(
    lengths: Sequence[int],
    dims: ParallelDims,
    config: PlannerConfig,
    cost_model: CostModel,
    *,
    forward_only: bool = False,
) -> StepWork:
    """The step of these samples.

    Args:
        lengths: total length of each sample [samples], in tokens.
        dims: the job's layout.
        config: cap, padding and effort.
        cost_model: what micro-batches cost.
        forward_only: whether the step has no backward passes.

    Raises:
        ConfigError: the cap leaves no room for a single token.
    """
    capacity = row_capacity_tokens(dims, config)
    tokens = [padded_sample_tokens(length, dims, config) for length in lengths]
    row_multiple = row_multiple_tokens(dims, config)
    bound = config.max_inflight_tokens
    if bound is not None and bound >= sum(round_up(padded, row_multiple) for padded in tokens):
        bound = None  # all samples together are within it
    return StepWork(
        costs=[cost_model.sample(length) for length in lengths],
        tokens=tokens,
        alone=frozenset(i for i, padded in enumerate(tokens) if padded > capacity),
        capacity=capacity,
        dims=dims,
        cost_model=cost_model,
        row_multiple=row_multiple,
        forward_only=forward_only,
        max_inflight_tokens=bound,
        effort=config.plan_effort * min(len(lengths), MOST_SAMPLES_COUNTED),
    )
