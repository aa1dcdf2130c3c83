"""This planner, its plainer modes and the rules of other frameworks on the same steps.

Guarantees: all plan the same steps, weighed by one cost model and one floor; a rule that cannot
plan a step is listed with its reason and counted, never left out; planning time is the process's
own time on the processor, so that other work on the machine does not count.
"""

from __future__ import annotations

import csv
import io
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

from mcore_batching.planning import (
    CostModel,
    Layout,
    LengthError,
    PlannerConfig,
    StepPlan,
    plan_step,
    step_statistics,
)
from mcore_batching.planning.checks import at_least
from mcore_batching.planning.config import Balance
from mcore_batching.planning.padding import row_capacity_tokens
from mcore_batching.planning.peers import PEERS, PeerFailureError, peer_plan
from mcore_batching.planning.weights import row_tokens
from mcore_batching.report import Table

Kind = Literal["ours", "mode", "peer"]
PlanFunction = Callable[[Sequence[int], Layout, PlannerConfig, CostModel], StepPlan]

OURS = "mcore_batching"

LEGEND = """\
time/floor     predicted end of the step / a time before which no plan's step ends, mean over steps
over cap       micro-batches of several samples over the cap; the worst as a multiple of the cap
rank balance   cost of the heaviest rank / mean over ranks, mean over steps
planning       processor time for one step, mean over steps"""


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
        return lambda lengths, layout, config, cost_model: plan_step(
            lengths, layout, replace(config, balance=balance), cost_model
        )

    def peer(index: int) -> PlanFunction:
        return lambda lengths, layout, config, cost_model: peer_plan(
            PEERS[index], lengths, layout, config, cost_model
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
    layout: Layout,
    config: PlannerConfig,
    cost_model: CostModel | None = None,
) -> list[Outcome]:
    """Let everyone plan every step.

    Args:
        steps: lengths of each step [steps][samples], in tokens.
        layout: sizes of the parallel groups.
        config: cap, padding and the search's options; `balance` is set by each planner.
        cost_model: weighs all plans; the default one if None.

    Returns:
        one outcome a planner, in the order of `planners()`.
    """
    model = cost_model or CostModel()
    return [_outcome(planner, steps, layout, config, model) for planner in planners()]


def _outcome(
    planner: Planner,
    steps: Sequence[Sequence[int]],
    layout: Layout,
    config: PlannerConfig,
    cost_model: CostModel,
) -> Outcome:
    capacity = row_capacity_tokens(layout, config)
    failure: str | None = None
    made: list[tuple[float, float, float, float]] = []
    seconds = 0.0
    rows, over = 0, list[int]()
    for lengths in steps:
        started = time.process_time()
        try:
            plan = planner.plan(lengths, layout, config, cost_model)
        except PeerFailureError as error:
            failure = failure or str(error)
            continue
        seconds += time.process_time() - started
        statistics = step_statistics(plan, lengths, cost_model)
        made.append(
            (
                statistics.time_over_floor,
                float(statistics.num_placeholders),
                float(statistics.num_microbatches),
                statistics.rank_balance,
            )
        )
        held = [samples for rank in plan.micro_batches for samples in rank]
        rows += len(held)
        tokens = [row_tokens(samples, lengths, layout, config) for samples in held if samples[1:]]
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


def as_table(outcomes: Sequence[Outcome]) -> Table:
    """One row a planner."""

    def number(value: float | None, digits: int) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    rows = []
    for outcome in outcomes:
        over = "-"
        if outcome.over_cap is not None:
            over = "none"
        if outcome.over_cap and outcome.worst_over_cap:
            over = f"{outcome.over_cap:.1%}, {outcome.worst_over_cap:.2f}x"
        seconds = outcome.planning_seconds
        rows.append(
            (
                outcome.name,
                f"{outcome.planned}/{outcome.steps}",
                number(outcome.time_over_floor, 3),
                over,
                number(outcome.num_microbatches, 1),
                number(outcome.placeholders, 1),
                number(outcome.rank_balance, 3),
                "-" if seconds is None else f"{1000 * seconds:.1f} ms",
            )
        )
    return Table(
        columns=(
            "planner",
            "steps",
            "time/floor",
            "over cap",
            "micro-batches/rank",
            "placeholders",
            "rank balance",
            "planning",
        ),
        rows=tuple(rows),
    )


def summary(outcomes: Sequence[Outcome]) -> list[str]:
    """Lines below the table: the gain on the best peer under the cap, and who has no plan."""
    lines = []
    ours = next((o for o in outcomes if o.kind == "ours"), None)
    rivals = [
        (o.time_over_floor, o.name)
        for o in outcomes
        if o.kind == "peer" and o.keeps_cap and o.time_over_floor is not None
    ]
    if ours and ours.time_over_floor and rivals:
        best, name = min(rivals)
        lines.append(
            f"of the peers that keep the cap {name} is best: its step takes "
            f"{best / ours.time_over_floor:.3f} x the time of {ours.name}'s"
        )
    for outcome in outcomes:
        if outcome.failure:
            missing = outcome.steps - outcome.planned
            lines.append(
                f"{outcome.name} has no plan for {missing} of {outcome.steps} "
                f"step{'s' if outcome.steps != 1 else ''}: {outcome.failure}"
            )
    return lines


def as_json(outcomes: Sequence[Outcome]) -> str:
    """A list of objects, one a planner, with `Outcome`'s fields."""
    return json.dumps([asdict(outcome) for outcome in outcomes], indent=2)


def as_csv(outcomes: Sequence[Outcome]) -> str:
    """One line a planner under a heading of `Outcome`'s fields; None is an empty cell."""
    text = io.StringIO()
    records = [asdict(outcome) for outcome in outcomes]
    writer = csv.DictWriter(text, list(records[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue().rstrip("\n")
