"""This planner, its plainer modes and the rules of other frameworks on the same steps.

Guarantees: all plan the same steps, weighed by one cost model and one floor; a rule that cannot
plan a step is listed with its reason and counted, never left out; planning time is the process's
own time on the processor, so that other work on the machine does not count.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from mcore_batching.planning import (
    CostModel,
    InflightBoundError,
    LengthError,
    ParallelDims,
    PlannerConfig,
    StepPlan,
    plan_step,
    step_statistics,
)
from mcore_batching.planning.checks import at_least
from mcore_batching.planning.config import Balance
from mcore_batching.planning.tokens import row_capacity_tokens
from mcore_batching.planning.weights import row_tokens
from mcore_batching.tools.rules import PEERS, PeerFailureError, peer_plan

Kind = Literal["ours", "mode", "peer"]
PlanFunction = Callable[[Sequence[int], ParallelDims, PlannerConfig, CostModel], StepPlan]

OURS = "mcore_batching"


@dataclass(frozen=True, kw_only=True)
class Planner:
    """Something that plans a step."""

    name: str
    """As the table shows it."""
    kind: Kind
    """This package's search, one of its plainer modes, or another framework's rule."""
    plan: PlanFunction
    """Raises PeerFailureError where it cannot."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one planner made of all steps; numbers are None if it planned none of them."""

    name: str
    """The planner's."""
    kind: Kind
    """The planner's."""
    steps: int
    """Steps that it was given."""
    planned: int
    """Steps that it has a plan for; means are over these."""
    failure: str | None
    """Why it has none for the first of the others."""
    time_over_floor: float | None
    """Predicted step time over the floor, mean over steps."""
    over_cap: float | None
    """Share of micro-batches that hold several samples and more than the cap."""
    worst_over_cap: float | None
    """Tokens of the fullest of these over the cap; None if there are none."""
    placeholders: float | None
    """Of all ranks, mean over steps."""
    num_microbatches: float | None
    """Of each rank, mean over steps."""
    rank_balance: float | None
    """Cost of the heaviest rank over the mean, mean over steps."""
    planning_seconds: float | None
    """Processor time of planning a step, mean over steps."""

    @property
    def keeps_cap(self) -> bool:
        """Whether it planned every step without going over the cap."""
        return self.planned == self.steps and self.over_cap == 0


def planners() -> list[Planner]:
    """This package's search first, then its plainer modes, then the peers."""

    def mode(balance: Balance) -> PlanFunction:
        return lambda lengths, dims, config, cost_model: plan_step(
            lengths, dims, replace(config, balance=balance), cost_model
        )

    def peer(index: int) -> PlanFunction:
        return lambda lengths, dims, config, cost_model: peer_plan(
            PEERS[index], lengths, dims, config, cost_model
        )

    plainer: tuple[Balance, ...] = ("cost", "tokens", "none")
    return [
        Planner(name=OURS, kind="ours", plan=mode("pipeline")),
        *(Planner(name=f"{OURS}, balance {b}", kind="mode", plan=mode(b)) for b in plainer),
        *(Planner(name=p.name, kind="peer", plan=peer(i)) for i, p in enumerate(PEERS)),
    ]


def draw_steps(
    lengths: Sequence[int],
    samples_per_step: int | None = None,
    draws: int | None = None,
    seed: int = 0,
) -> list[list[int]]:
    """The lengths of every step to be planned.

    Args:
        lengths: of the whole batch, in tokens.
        samples_per_step: samples of each step; None: all.
        draws: how many steps to draw, each without replacement; None: consecutive steps.
        seed: draw i is that of `random.Random(seed + i)`.

    Raises:
        LengthError: there are no lengths, or fewer than a step takes.
    """
    if not lengths:
        raise LengthError("there is nothing to compare: LENGTHS holds no length")
    per_step = len(lengths)
    if samples_per_step is not None:
        per_step = at_least("samples_per_step", samples_per_step, 1, LengthError)
    if draws is None:
        return [
            list(lengths[first : first + per_step]) for first in range(0, len(lengths), per_step)
        ]
    if per_step > len(lengths):
        raise LengthError(
            f"samples_per_step={per_step} cannot be drawn from {len(lengths)} lengths; set "
            f"samples_per_step to {len(lengths)} or less"
        )
    count = at_least("draws", draws, 1, LengthError)
    return [random.Random(seed + i).sample(list(lengths), per_step) for i in range(count)]


def compare(
    steps: Sequence[Sequence[int]],
    dims: ParallelDims,
    config: PlannerConfig,
    cost_model: CostModel | None = None,
) -> list[Outcome]:
    """Let everyone plan every step.

    Args:
        steps: lengths of each step [steps][samples], in tokens.
        dims: sizes of the parallel groups.
        config: cap, padding and the search's options; `balance` is set by each planner.
        cost_model: weighs all plans; the default one if None.

    Returns:
        one outcome a planner, in the order of `planners()`.
    """
    model = cost_model or CostModel()
    return [_outcome(planner, steps, dims, config, model) for planner in planners()]


def _outcome(
    planner: Planner,
    steps: Sequence[Sequence[int]],
    dims: ParallelDims,
    config: PlannerConfig,
    cost_model: CostModel,
) -> Outcome:
    capacity = row_capacity_tokens(dims, config)
    failure: str | None = None
    made: list[tuple[float, float, float, float]] = []
    seconds = 0.0
    rows, over = 0, list[int]()
    for lengths in steps:
        started = time.process_time()
        try:
            plan = planner.plan(lengths, dims, config, cost_model)
        except (PeerFailureError, InflightBoundError) as error:
            failure = failure or str(error)
            continue
        seconds_of_step = time.process_time() - started
        statistics = step_statistics(plan, lengths, cost_model)
        held, bound = statistics.peak_inflight_tokens, config.max_inflight_tokens
        if bound is not None and held > bound:
            failure = failure or (
                f"its plan holds {held:.0f} tokens in flight, max_inflight_tokens is {bound}"
            )
            continue
        seconds += seconds_of_step
        made.append(
            (
                statistics.time_over_floor,
                float(statistics.num_placeholders),
                float(statistics.num_microbatches),
                statistics.rank_balance,
            )
        )
        made_rows = [samples for rank in plan.micro_batches for samples in rank]
        rows += len(made_rows)
        tokens = [
            row_tokens(samples, lengths, dims, config) for samples in made_rows if samples[1:]
        ]
        over += [padded for padded in tokens if padded > capacity]
    count = len(made)
    means = [sum(column) / count for column in zip(*made, strict=True)] if made else [None] * 4
    return Outcome(
        name=planner.name,
        kind=planner.kind,
        steps=len(steps),
        planned=count,
        failure=failure,
        time_over_floor=means[0],
        over_cap=len(over) / rows if rows else None,
        worst_over_cap=max(over) / capacity if over else None,
        placeholders=means[1],
        num_microbatches=means[2],
        rank_balance=means[3],
        planning_seconds=seconds / count if count else None,
    )
