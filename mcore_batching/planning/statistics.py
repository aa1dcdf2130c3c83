"""Fill, balance and predicted time of a step's plan.

Every ratio is defined for every plan, the one without samples included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mcore_batching.planning.bounds import step_time_floor
from mcore_batching.planning.cost import CostModel, ordered_sum
from mcore_batching.planning.pipeline import pipeline_time
from mcore_batching.planning.plan import StepPlan
from mcore_batching.planning.problem import Problem
from mcore_batching.planning.step_bound import step_time_bound


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
    """Mean forward cost per rank."""
    slot_maxima_cost: float
    """Sum over slots of the costliest micro-batch of the slot: the time of ranks in lockstep."""
    step_time: float
    """Predicted end of the step, in units of cost: `predicted_step_time`."""
    floor_time: float
    """Time before which no plan's step ends: `step_time_floor`, or the tight `step_time_bound`."""
    peak_inflight_tokens: float
    """Most padded tokens whose activations a first pipeline stage holds at a time, over all ranks;
    of several steps the most of any."""
    last_stage_inflight_tokens: float
    """Likewise, of a last pipeline stage."""
    largest_row_tokens: int
    """Padded tokens of the largest micro-batch, of which a last stage makes logits; of several
    steps the most of any."""

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
        both = {name: (value, getattr(other, name)) for name, value in vars(self).items()}
        return StepStatistics(
            **{name: max(a, b) if name in _PEAKS else a + b for name, (a, b) in both.items()}
        )


_PEAKS = {"peak_inflight_tokens", "last_stage_inflight_tokens", "largest_row_tokens"}


def step_statistics(
    step: StepPlan,
    lengths: Sequence[int],
    cost_model: CostModel | None = None,
    *,
    tight_floor: bool = False,
) -> StepStatistics:
    """Statistics of a valid plan.

    Args:
        step: the plan.
        lengths: total length of each sample of the whole batch [samples], in tokens.
        cost_model: the plan's own if None.
        tight_floor: a later `floor_time`, which takes up to a second the first time.
    """
    problem, ranks = step_problem(step, lengths, cost_model)
    costs = [[problem.cost(samples) for samples in rank] for rank in ranks]
    rank_costs = [ordered_sum(rank) for rank in costs]
    real = [samples for rank in ranks for samples in rank if samples]
    num_rows = len(ranks) * step.num_microbatches
    last = step.dims.pipeline_parallel - 1
    return StepStatistics(
        num_samples=step.num_samples,
        num_microbatches=step.num_microbatches,
        num_placeholders=num_rows - len(real),
        num_oversize=len(problem.oversize),
        real_tokens=sum(problem.lengths),
        padded_tokens=sum(map(problem.row_tokens, real)),
        offered_tokens=num_rows * step.config.cap_tokens(step.dims),
        heaviest_rank_cost=max(rank_costs),
        mean_rank_cost=ordered_sum(rank_costs) / len(ranks),
        slot_maxima_cost=ordered_sum(max(slot) for slot in zip(*costs, strict=True)),
        step_time=_step_time(problem, costs),
        floor_time=(step_time_bound if tight_floor else step_time_floor)(problem),
        peak_inflight_tokens=max(map(problem.inflight_tokens, ranks)),
        last_stage_inflight_tokens=max(problem.inflight_tokens(r, stage=last) for r in ranks),
        largest_row_tokens=max(map(problem.row_tokens, real), default=problem.placeholder_tokens),
    )


def predicted_step_time(
    step: StepPlan,
    lengths: Sequence[int],
    cost_model: CostModel | None = None,
    *,
    forward_only: bool | None = None,
) -> float:
    """End of the slowest rank's pipeline; with expert parallelism, that of slots in lockstep.

    Args:
        step: the plan.
        lengths: total length of each sample of the whole batch [samples], in tokens.
        cost_model: the plan's own if None.
        forward_only: of the forward passes alone; None: as the plan was made.

    Returns:
        time in units of cost.
    """
    problem, ranks = step_problem(step, lengths, cost_model, forward_only)
    return _step_time(problem, [[problem.cost(samples) for samples in rank] for rank in ranks])


def step_problem(
    step: StepPlan,
    lengths: Sequence[int],
    cost_model: CostModel | None = None,
    forward_only: bool | None = None,
) -> tuple[Problem, list[list[list[int]]]]:
    """The problem that a plan solves, and its micro-batches in the problem's own numbering.

    Args:
        step: the plan, valid or not.
        lengths: total length of each sample of the whole batch [samples], in tokens.
        cost_model: the plan's own if None.
        forward_only: as the plan was made if None.

    Returns:
        the problem of the step's samples; samples of each micro-batch [ranks][slots].
    """
    number = {sample: position for position, sample in enumerate(step.sample_indices)}
    problem = Problem.of(
        [lengths[sample] for sample in step.sample_indices],
        step.dims,
        step.config,
        cost_model or step.cost_model,
        forward_only=step.forward_only if forward_only is None else forward_only,
    )
    ranks = [[[number[i] for i in samples] for samples in rank] for rank in step.micro_batches]
    return problem, ranks


def _step_time(problem: Problem, costs: Sequence[Sequence[float]]) -> float:
    """End of the step, given the cost of each micro-batch [ranks][slots]."""
    if problem.dims.expert_parallel > 1:
        costs = [[max(slot) for slot in zip(*costs, strict=True)]]
    return max(
        pipeline_time(
            rank,
            problem.dims,
            backward_ratio=problem.cost_model.backward_ratio,
            forward_only=problem.forward_only,
        )
        for rank in costs
    )


def _ratio(value: float, mean: float) -> float:
    return value / mean if mean else 1.0
