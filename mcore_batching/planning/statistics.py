"""Fill, balance and predicted time of a step's plan.

Every ratio is defined for every plan, the one without samples included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mcore_batching.planning.bounds import floor_of_totals, step_time_floor
from mcore_batching.planning.cost import CostModel, ordered_sum
from mcore_batching.planning.errors import LengthError
from mcore_batching.planning.integers import entries
from mcore_batching.planning.pipeline import Clock, clocks_of, inflight_tokens
from mcore_batching.planning.plan import StepPlan
from mcore_batching.planning.problem import Problem


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
    """Predicted makespan, in units of cost: `predicted_step_time`."""
    floor_time: float
    """Lower bound on any plan's makespan, in units of cost: `step_time_floor`."""
    peak_inflight_tokens: float
    """Most padded tokens in flight on a first pipeline stage; the most of any rank and step.
    Counted over the dims' context-parallel ranks, also for a row on more or fewer of them."""
    last_stage_inflight_tokens: float
    """Most padded tokens in flight on a last pipeline stage, counted in the same way."""
    largest_row_tokens: int
    """Padded tokens of the largest micro-batch, whose logits a last stage makes, counted in the
    same way."""

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
        """Predicted makespan over its lower bound."""
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
) -> StepStatistics:
    """Statistics of a valid plan.

    Args:
        step: the plan.
        lengths: total length of each sample of the whole batch [samples], in tokens.
        cost_model: the plan's own if None.
    """
    problem, ranks = step_problem(step, lengths, cost_model)
    costs = micro_batch_costs(step, problem, ranks)
    rank_costs = [ordered_sum(rank) for rank in costs]
    rows = [(problem.on_ranks[row.size], ranks[row.rank][row.slot]) for row in step.rows()]
    per_place = step.config.cap_tokens(step.dims) * step.dims.data_parallel // len(ranks)
    held = set(map(tuple, _held_tokens(step, problem, ranks)))
    schedule, last = problem.schedule, step.dims.pipeline_parallel - 1
    return StepStatistics(
        num_samples=step.num_samples,
        num_microbatches=step.num_microbatches,
        num_placeholders=sum(not samples for _, samples in rows),
        num_oversize=len(problem.oversize),
        real_tokens=sum(problem.lengths),
        padded_tokens=sum(of_size.row_tokens(samples) for of_size, samples in rows),
        offered_tokens=len(ranks) * step.num_microbatches * per_place,
        heaviest_rank_cost=max(rank_costs),
        mean_rank_cost=ordered_sum(rank_costs) / len(ranks),
        slot_maxima_cost=ordered_sum(max(slot) for slot in zip(*costs, strict=True)),
        step_time=_end(step, problem, costs),
        floor_time=step_time_floor(problem),
        peak_inflight_tokens=max(inflight_tokens(rank, schedule) for rank in held),
        last_stage_inflight_tokens=max(
            inflight_tokens(rank, schedule, stage=last) for rank in held
        ),
        largest_row_tokens=max(map(max, held)),
    )


def shard_statistics(
    problem: Problem, micro_batches: Sequence[Sequence[int]]
) -> tuple[list[float], list[float]]:
    """One rank's part of `joined_statistics`, where samples stay on their rank.

    Args:
        problem: this rank's samples.
        micro_batches: this rank's.

    Returns:
        numbers to sum over data-parallel ranks, and numbers to take the maximum of; equally many on
        every rank.
    """
    costs = [problem.cost(samples) for samples in micro_batches]
    tokens = [problem.row_tokens(samples) for samples in micro_batches]
    held = [each or problem.placeholder_tokens for each in tokens]
    fitting = [n for i, n in enumerate(problem.tokens) if i not in problem.oversize]
    work, last = ordered_sum(costs), problem.dims.pipeline_parallel - 1
    sums = [
        problem.num_samples,
        sum(not samples for samples in micro_batches),
        len(problem.oversize),
        sum(problem.lengths),
        sum(tokens),
        work,
        ordered_sum(problem.costs),
        sum(fitting),
    ]
    maxima = [
        work,
        Clock(costs, problem.schedule).end,
        inflight_tokens(held, problem.schedule),
        inflight_tokens(held, problem.schedule, stage=last),
        max(held),
        max(map(problem.cost_model.sample, problem.lengths), default=0.0),
        *costs,
    ]
    return sums, maxima


def joined_statistics(
    problem: Problem, sums: Sequence[float], maxima: Sequence[float]
) -> StepStatistics:
    """`step_statistics` where each rank knows its own micro-batches alone.

    Args:
        problem: of any rank; gives dims, config and cost model.
        sums: the first numbers of `shard_statistics`, summed over ranks.
        maxima: its second numbers, each the maximum over ranks.
    """
    samples, placeholders, oversize, real, padded, *costs, fitting = sums
    all_work, least_work = costs
    work, end, first_inflight, last_inflight, largest_row, costliest, *slots = maxima
    dims, config, ranks = problem.dims, problem.config, problem.num_ranks
    if problem.dims.in_lockstep:  # no rank's own end, but that of each slot's costliest
        end = Clock(slots, problem.schedule).end
    per_row = config.max_samples_per_row or max(1, int(samples))
    by_tokens = -(-int(fitting) // problem.capacity)
    rows = int(oversize) + max(by_tokens, -(-int(samples - oversize) // per_row))
    alone = problem.cost_model.per_micro_batch + costliest
    return StepStatistics(
        num_samples=int(samples),
        num_microbatches=len(slots),
        num_placeholders=int(placeholders),
        num_oversize=int(oversize),
        real_tokens=int(real),
        padded_tokens=int(padded),
        offered_tokens=ranks * len(slots) * config.cap_tokens(dims),
        heaviest_rank_cost=work,
        mean_rank_cost=all_work / ranks,
        slot_maxima_cost=ordered_sum(slots),
        step_time=end,
        floor_time=floor_of_totals(problem, least_work, rows, alone),
        peak_inflight_tokens=first_inflight,
        last_stage_inflight_tokens=last_inflight,
        largest_row_tokens=int(largest_row),
    )


def predicted_step_time(
    step: StepPlan,
    lengths: Sequence[int],
    cost_model: CostModel | None = None,
    *,
    forward_only: bool | None = None,
) -> float:
    """Predicted makespan of a step: the end of the straggler's pipeline.

    With expert parallelism slots run in lockstep; ranks that share a row wait for each other in it.

    Args:
        step: the plan.
        lengths: total length of each sample of the whole batch [samples], in tokens.
        cost_model: the plan's own if None.
        forward_only: of the forward passes alone; None: as the plan was made.

    Returns:
        time in units of cost.
    """
    problem, ranks = step_problem(step, lengths, cost_model, forward_only)
    return _end(step, problem, micro_batch_costs(step, problem, ranks))


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
    lengths = entries("lengths", lengths, LengthError)
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


def micro_batch_costs(
    step: StepPlan, problem: Problem, ranks: Sequence[Sequence[Sequence[int]]]
) -> list[list[float]]:
    """Forward cost of each micro-batch [ranks][slots]; a shared one costs each of its ranks.

    Args:
        step: the plan.
        problem: of `step_problem`.
        ranks: of `step_problem`.
    """
    return [
        [
            problem.on_ranks[step.row_size(rank, slot)].cost(samples)
            for slot, samples in enumerate(slots)
        ]
        for rank, slots in enumerate(ranks)
    ]


def _held_tokens(
    step: StepPlan, problem: Problem, ranks: Sequence[Sequence[Sequence[int]]]
) -> list[list[int]]:
    """Padded tokens of each micro-batch [ranks][slots] on the dims' context-parallel ranks."""
    held: list[list[int]] = []
    for rank, slots in enumerate(ranks):
        held.append([])
        for slot, samples in enumerate(slots):
            size = step.row_size(rank, slot)
            rows = problem.on_ranks[size]
            tokens = rows.row_tokens(samples) or rows.placeholder_tokens
            # Each rank of the row holds tokens / size; counted over the dims' ranks.
            held[-1].append(tokens * step.dims.context_parallel // size)
    return held


def _end(step: StepPlan, problem: Problem, costs: Sequence[Sequence[float]]) -> float:
    """End of a step, given the cost of each micro-batch [ranks][slots]."""
    return max(clock.end for clock in clocks_of(costs, problem.schedule, step.context_parallel))


def _ratio(value: float, mean: float) -> float:
    return value / mean if mean else 1.0
