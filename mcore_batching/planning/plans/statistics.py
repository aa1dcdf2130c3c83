"""Fill, balance and predicted time of a step's plan; every ratio is defined for every plan."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from mcore_batching.planning.clock import Clock, clocks_of
from mcore_batching.planning.costs.cost import CostModel, ordered_sum
from mcore_batching.planning.errors import LengthError
from mcore_batching.planning.integers import entries
from mcore_batching.planning.packing.bounds import step_time_floor
from mcore_batching.planning.plans.plan import StepPlan
from mcore_batching.planning.problem import Problem
from mcore_batching.planning.schedule import Schedule

Ranks = Sequence[Sequence[Sequence[int]]]
"""Samples of each micro-batch [ranks][num_microbatches], numbered as in a problem."""


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
    """Tokens that are computed: of the samples, those that several share counted once."""
    padded_tokens: int
    """Tokens of all micro-batches that hold samples, with padding and the room that prefix trees
    take for their keys."""
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
    """Most padded tokens in flight on a first pipeline stage, over the dims' context-parallel
    ranks."""
    last_stage_inflight_tokens: float
    """Most padded tokens in flight on a last pipeline stage, over the same ranks."""
    largest_row_tokens: int
    """Padded tokens of the largest micro-batch, over the same ranks; the last stage makes its
    logits."""
    sample_tokens: int = 0
    """Tokens of all samples."""
    keys: int = 0
    """Keys that attention reads: those of the tokens that are computed, and of their paths."""

    @property
    def fill(self) -> float:
        """Real tokens over offered tokens; above 1 only with oversize samples."""
        return self.real_tokens / self.offered_tokens

    @property
    def sharing(self) -> str:
        """Tokens saved by samples that begin alike, in words; empty where none are."""
        return sharing(self.sample_tokens, self.real_tokens, self.keys)

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


# Two steps do not hold their tokens at the same time: these take the maximum, all else adds up.
_PEAKS = {"peak_inflight_tokens", "last_stage_inflight_tokens", "largest_row_tokens"}


@dataclass(frozen=True)
class WeighedStep:
    """A plan beside the problem that it solves: what its micro-batches cost, and when they end."""

    step: StepPlan
    problem: Problem
    """The step's samples as the planner takes them, a tree as one of them."""
    ranks: Ranks
    """The plan's micro-batches in the problem's own numbering."""

    @classmethod
    def of(
        cls, step: StepPlan, lengths: Sequence[int], cost_model: CostModel | None = None
    ) -> WeighedStep:
        """Weigh a plan.

        Args:
            step: the plan, valid or not.
            lengths: total length of each sample of the whole batch [samples], in tokens.
            cost_model: the plan's own if None.

        Raises:
            LengthError: there are fewer lengths than the step's samples need.
        """
        lengths = entries("lengths", lengths, LengthError)
        last = max(step.sample_indices, default=-1)
        if last >= len(lengths):
            raise LengthError(
                f"lengths has {len(lengths)} entries, but the step runs sample {last}; pass the "
                "whole batch's"
            )
        # Plans name samples by their place in the batch, problems units by their place in the step.
        units = step.units(step.sample_indices)
        number = {unit: position for position, unit in enumerate(units)}
        trees = [None if isinstance(unit, int) else unit for unit in units]
        problem = Problem.of(
            [lengths[unit] if isinstance(unit, int) else unit.size for unit in units],
            step.dims,
            step.config,
            cost_model or step.cost_model,
            forward_only=step.forward_only,
            trees=trees if step.trees else (),
        )
        ranks = [
            [[number[unit] for unit in step.units(samples)] for samples in rank]
            for rank in step.micro_batches
        ]
        return cls(step, problem, ranks)

    @cached_property
    def rows(self) -> list[list[tuple[Problem, Sequence[int]]]]:
        """Each micro-batch with the problem as if all had its size [ranks][slots]."""
        return [
            [
                (self.problem.on_ranks[self.step.row_size(rank, slot)], samples)
                for slot, samples in enumerate(slots)
            ]
            for rank, slots in enumerate(self.ranks)
        ]

    @cached_property
    def costs_on_stages(self) -> list[list[float]]:
        """Forward cost of each micro-batch on each kind of stage [ranks][slots * kinds], as clocks
        take them; a shared one costs each of its ranks."""
        return [
            [cost for of_size, samples in rank for cost in of_size.slot_costs([samples])]
            for rank in self.rows
        ]

    @cached_property
    def clocks(self) -> list[Clock]:
        """The clocks of the step, as `clocks_of`."""
        return clocks_of(self.costs_on_stages, self.problem.schedule, self.step.context_parallel)

    @property
    def end(self) -> float:
        """Predicted makespan, in units of cost."""
        return max(clock.end for clock in self.clocks)


def step_statistics(
    step: StepPlan, lengths: Sequence[int], cost_model: CostModel | None = None
) -> StepStatistics:
    """Statistics of a valid plan, given the total length of each sample of the whole batch
    [samples] in tokens; by the plan's own costs if None are given."""
    lengths = entries("lengths", lengths, LengthError)
    weighed = WeighedStep.of(step, lengths, cost_model)
    problem = weighed.problem
    sample_tokens, tokens, keys = shared_tokens(step, lengths)
    costs = [[of_size.cost(samples) for of_size, samples in rank] for rank in weighed.rows]
    rank_costs = [ordered_sum(rank) for rank in costs]
    rows = [weighed.rows[row.rank][row.slot] for row in step.rows()]
    held = [
        [problem.held_tokens(samples, of_size.dims.context_parallel) for of_size, samples in rank]
        for rank in weighed.rows
    ]
    last = step.dims.pipeline_parallel - 1
    return StepStatistics(
        num_samples=step.num_samples,
        num_microbatches=step.num_microbatches,
        num_placeholders=sum(not samples for _, samples in rows),
        num_oversize=len(problem.oversize),
        real_tokens=tokens,
        padded_tokens=sum(of_size.row_tokens(samples) for of_size, samples in rows),
        # Under dynamic CP as well: each rank of a cap's has its part of it.
        offered_tokens=step.num_microbatches
        * step.dims.data_parallel
        * step.config.cap_tokens(step.dims),
        heaviest_rank_cost=max(rank_costs),
        mean_rank_cost=ordered_sum(rank_costs) / len(rank_costs),
        slot_maxima_cost=ordered_sum(max(slot) for slot in zip(*costs, strict=True)),
        step_time=weighed.end,
        floor_time=step_time_floor(problem),
        peak_inflight_tokens=tokens_in_flight(held, problem.schedule, 0),
        last_stage_inflight_tokens=tokens_in_flight(held, problem.schedule, last),
        largest_row_tokens=max(map(max, held)),
        sample_tokens=sample_tokens,
        keys=keys,
    )


def sharing(sample_tokens: int, tokens: int, keys: int) -> str:
    """Tokens saved by samples that begin alike, in words; empty where none are.

    Args: tokens of the samples; tokens that are computed; keys that attention reads.
    """
    if tokens == sample_tokens:
        return ""
    return (
        f"{sample_tokens:,} tokens of samples computed as {tokens:,}: "
        f"{sample_tokens / tokens:.1f}x fewer, {keys / tokens:.1f} keys per token"
    )


def shared_tokens(step: StepPlan, lengths: Sequence[int]) -> tuple[int, int, int]:
    """Arguments of `sharing` for a valid plan, given the total length of each sample of the whole
    batch [samples] in tokens."""
    units = step.units(step.sample_indices)
    own = [lengths[unit] for unit in units if isinstance(unit, int)]
    trees = [unit for unit in units if not isinstance(unit, int)]
    tokens = sum(own) + sum(tree.tokens for tree in trees)
    keys = sum(own) + sum(tree.keys for tree in trees)
    return sum(lengths[sample] for sample in step.sample_indices), tokens, keys


def total_statistics(statistics: Iterable[StepStatistics]) -> StepStatistics:
    """The sums over one or more steps, one after the other."""
    return functools.reduce(operator.add, statistics)


def predicted_step_time(
    step: StepPlan, lengths: Sequence[int], cost_model: CostModel | None = None
) -> float:
    """Predicted makespan of a step in units of cost: the end of the straggler's pipeline. Arguments
    are those of `WeighedStep.of`."""
    return WeighedStep.of(step, lengths, cost_model).end


def tokens_in_flight(held: Iterable[Sequence[int]], schedule: Schedule, stage: int) -> float:
    """Largest number of tokens that a stage of any rank holds activations of at a time.

    A micro-batch is in flight from its forward to its backward pass; each model chunk holds its
    share of the stage's layers. Under 1F1B stage s of P has P - s micro-batches in flight. Of
    forward passes alone each holds its micro-batch by itself.

    Args:
        held: padded tokens of each micro-batch [ranks][num_microbatches].
        schedule: gives the order of passes.
        stage: pipeline rank; stage 0 holds most.
    """
    ranks = set(map(tuple, held))  # most ranks of a large job hold the same
    if schedule.forward_only:
        return float(max(map(max, ranks)))
    most = 0  # whole micro-batches; a chunk holds 1 / virtual_pipeline of the layers
    order = schedule.order(stage, len(min(ranks)))
    for tokens in ranks:
        now = 0
        for kind, _, slot in order:
            now += tokens[slot] if kind == "F" else -tokens[slot]
            most = max(most, now)
    return most / schedule.dims.virtual_pipeline


def _ratio(value: float, mean: float) -> float:
    return value / mean if mean else 1.0  # a step without samples is even
