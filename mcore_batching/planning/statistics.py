"""How well a step fills its micro-batches and evens out its ranks and slots.

Guarantees: every ratio is defined for every plan, the one without samples included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mcore_batching.planning.bounds import step_time_floor
from mcore_batching.planning.pipeline import inflight_tokens, pipeline_time
from mcore_batching.planning.sums import ordered_sum
from mcore_batching.planning.tokens import padded_sample_tokens, row_capacity_tokens
from mcore_batching.planning.weights import row_tokens

if TYPE_CHECKING:
    from mcore_batching.planning.cost import CostModel
    from mcore_batching.planning.plan import StepPlan


@dataclass(frozen=True, kw_only=True)
class StepStatistics:
    """Sums over one step, or over several added together with `+`."""

    num_samples: int
    """Samples of the step over all ranks."""
    num_microbatches: int
    """Micro-batches of each rank, placeholders included."""
    num_placeholders: int
    """Placeholders over all ranks."""
    num_oversize: int
    """Samples that exceed the cap on their own."""
    real_tokens: int
    """Tokens of all samples."""
    padded_tokens: int
    """Tokens of all micro-batches that hold samples, padding included."""
    offered_tokens: int
    """The cap times the micro-batches of all ranks, placeholders included."""
    heaviest_rank_cost: float
    """Forward cost of the rank with the most work."""
    mean_rank_cost: float
    """Forward cost of a rank on average."""
    slot_maxima_cost: float
    """Sum over slots of the costliest micro-batch of the slot: what ranks in lockstep wait for."""
    step_time: float
    """Predicted end of the step, in units of cost: `predicted_step_time`."""
    floor_time: float
    """Before which no plan's step ends: `step_time_floor`."""
    peak_inflight_tokens: float
    """Most padded tokens whose activations the first pipeline stage of a rank holds at a time; of
    several steps the most of any."""

    @property
    def fill(self) -> float:
        """Real tokens over offered tokens; above 1 only with oversize samples."""
        return self.real_tokens / self.offered_tokens

    @property
    def padding(self) -> float:
        """Share of the padded tokens that is padding; placeholders do not count."""
        if self.padded_tokens == 0:
            return 0.0
        return (self.padded_tokens - self.real_tokens) / self.padded_tokens

    @property
    def rank_balance(self) -> float:
        """Heaviest rank over the mean rank, 1 at best."""
        return _ratio(self.heaviest_rank_cost, self.mean_rank_cost)

    @property
    def slot_balance(self) -> float:
        """Sum over slots of the costliest micro-batch over that of the mean one, 1 at best."""
        return _ratio(self.slot_maxima_cost, self.mean_rank_cost)

    @property
    def time_over_floor(self) -> float:
        """Predicted end of the step over the time before which no plan's step ends."""
        return _ratio(self.step_time, self.floor_time)

    def __add__(self, other: StepStatistics) -> StepStatistics:
        """Two steps one after the other."""
        sums = {name: getattr(self, name) + getattr(other, name) for name in vars(self)}
        most = max(self.peak_inflight_tokens, other.peak_inflight_tokens)
        return StepStatistics(**sums | {"peak_inflight_tokens": most})


def step_statistics(
    step: StepPlan, lengths: Sequence[int], cost_model: CostModel | None = None
) -> StepStatistics:
    """Statistics of a valid plan.

    Args:
        step: the plan.
        lengths: total length of each sample of the whole batch [samples], in tokens.
        cost_model: the plan's own if None.
    """
    model = cost_model or step.cost_model
    capacity = row_capacity_tokens(step.dims, step.config)
    costs = [
        [model.micro_batch([lengths[sample] for sample in samples]) for samples in rank]
        for rank in step.micro_batches
    ]
    rank_costs = [ordered_sum(rank) for rank in costs]
    real = [samples for rank in step.micro_batches for samples in rank if samples]
    num_ranks = len(step.micro_batches)
    return StepStatistics(
        num_samples=step.num_samples,
        num_microbatches=step.num_microbatches,
        num_placeholders=num_ranks * step.num_microbatches - len(real),
        num_oversize=sum(
            padded_sample_tokens(lengths[sample], step.dims, step.config) > capacity
            for sample in step.sample_indices
        ),
        real_tokens=sum(lengths[sample] for sample in step.sample_indices),
        padded_tokens=sum(row_tokens(samples, lengths, step.dims, step.config) for samples in real),
        offered_tokens=num_ranks * step.num_microbatches * step.config.cap_tokens(step.dims),
        heaviest_rank_cost=max(rank_costs),
        mean_rank_cost=ordered_sum(rank_costs) / num_ranks,
        slot_maxima_cost=ordered_sum(max(slot) for slot in zip(*costs, strict=True)),
        step_time=predicted_step_time(step, lengths, model),
        floor_time=step_time_floor(
            [lengths[sample] for sample in step.sample_indices],
            step.dims,
            step.config,
            model,
            forward_only=step.forward_only,
        ),
        peak_inflight_tokens=max(
            inflight_tokens(
                [
                    row_tokens(samples, lengths, step.dims, step.config) if samples else 0
                    for samples in rank
                ],
                step.dims,
                forward_only=step.forward_only,
            )
            for rank in step.micro_batches
        ),
    )


def predicted_step_time(
    step: StepPlan,
    lengths: Sequence[int],
    cost_model: CostModel | None = None,
    *,
    forward_only: bool | None = None,
) -> float:
    """When the slowest rank's pipeline ends; with expert parallelism, that of slots in lockstep.

    Args:
        step: the plan.
        lengths: total length of each sample of the whole batch [samples], in tokens.
        cost_model: the plan's own if None.
        forward_only: of the forward passes alone; None: what the plan was made for.

    Returns:
        time in units of cost.
    """
    model = cost_model or step.cost_model
    forward_only = step.forward_only if forward_only is None else forward_only
    costs = [
        [model.micro_batch([lengths[sample] for sample in samples]) for samples in rank]
        for rank in step.micro_batches
    ]
    if step.dims.expert_parallel > 1:
        costs = [[max(slot) for slot in zip(*costs, strict=True)]]
    return max(
        pipeline_time(
            rank, step.dims, backward_ratio=model.backward_ratio, forward_only=forward_only
        )
        for rank in costs
    )


def _ratio(value: float, mean: float) -> float:
    return value / mean if mean else 1.0
