"""Compare this planner, its plainer modes and other frameworks' rules on the same steps.

All plan the same steps and are weighed by one cost model against one lower bound. A rule that
cannot plan a step stays in the table, with its reason and the number of such steps. Planning time
is the process's own time on the processor, so that other work on the machine does not count.
"""

from __future__ import annotations

import csv
import io
import json
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

from mcore_batching.planning import (
    Argument,
    CostModel,
    InflightBoundError,
    LengthError,
    OversizeSampleError,
    ParallelDims,
    PlannerConfig,
    StepStatistics,
    at_least,
    plan_step,
    step_problem,
    step_statistics,
)
from mcore_batching.planning.dynamic_cp import of_one_size
from mcore_batching.tools.dynamic_cp import PlanFunction, rivals
from mcore_batching.tools.report import Table, counted
from mcore_batching.tools.rules import (
    RULES,
    Rule,
    RuleFailureError,
    megatron_dynamic_plan,
    rule_plan,
)

Kind = Literal["ours", "mode", "peer"]

OURS = "mcore_batching"

COLUMNS = (
    "planner",
    "steps",
    "time/floor",
    "over cap",
    "micro-batches/rank",
    "placeholders",
    "rank balance",
    "planning",
)

LEGEND = """\
time/floor     predicted end of the step / a lower bound on the end of any plan's, mean over steps
over cap       micro-batches of several samples over the cap; the worst as a multiple of the cap
rank balance   cost of the heaviest rank / mean over ranks, mean over steps
planning       processor time for one step, mean over steps"""


@dataclass(frozen=True, kw_only=True)
class Planner:
    """A way to plan a step."""

    name: str
    """As the table shows it."""
    kind: Kind
    """This package's search, one of its plainer modes, or another framework's rule ("peer")."""
    plan: PlanFunction
    """Raises RuleFailureError where it cannot."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One planner's result over all steps; numbers are None if it planned none of them."""

    name: str
    """The planner's."""
    kind: Kind
    """The planner's."""
    steps: int
    """Steps that it was given."""
    planned: int
    """Steps that it has a plan for; means are over these."""
    failure: str | None
    """The reason for the first of the others."""
    time_over_floor: float | None
    """Predicted step time over the floor, mean over steps."""
    over_cap: float | None
    """Share of micro-batches that hold several samples and more than the cap."""
    worst_over_cap: float | None
    """Tokens of the fullest of these over the cap; None if there are none."""
    placeholders: float | None
    """Over all ranks, mean over steps."""
    num_microbatches: float | None
    """Per rank, mean over steps."""
    rank_balance: float | None
    """Cost of the heaviest rank over the mean, mean over steps."""
    planning_seconds: float | None
    """Processor time of planning a step, mean over steps."""

    @property
    def keeps_cap(self) -> bool:
        """True if it planned every step and stayed under the cap."""
        return self.planned == self.steps and self.over_cap == 0


def planners(dims: ParallelDims, config: PlannerConfig) -> list[Planner]:
    """This package's search first, then its plainer modes, then the rules.

    Under dynamic CP rules without it plan by the dims' context-parallel size for all; each other
    size for all, planned by this package, and Megatron's rule for dynamic CP are there as well.
    """

    def mode(balance: Literal["pipeline", "cost", "tokens", "none"]) -> PlanFunction:
        return lambda lengths, dims, config, cost_model: plan_step(
            lengths, dims, replace(config, balance=balance), cost_model
        )

    def by_rule(rule: Rule) -> PlanFunction:
        if config.max_context_parallel is None:
            return lambda *step: rule_plan(rule, *step)
        return lambda lengths, dims, config, cost_model: of_one_size(
            rule_plan(rule, lengths, dims, replace(config, max_context_parallel=None)),
            dims,
            config,
            cost_model,
        )

    further: list[Planner] = []
    if config.max_context_parallel is not None:
        for name, plan in rivals(dims, config):
            kind: Kind = "peer" if plan is megatron_dynamic_plan else "mode"
            further.append(Planner(name=name, kind=kind, plan=plan))
    return [
        Planner(name=OURS, kind="ours", plan=mode("pipeline")),
        Planner(name=f"{OURS}, balance cost", kind="mode", plan=mode("cost")),
        Planner(name=f"{OURS}, balance tokens", kind="mode", plan=mode("tokens")),
        Planner(name=f"{OURS}, balance none", kind="mode", plan=mode("none")),
        *further,
        *(Planner(name=rule.name, kind="peer", plan=by_rule(rule)) for rule in RULES),
    ]


MAX_DRAWS = 100_000
"""Each is planned by every planner: hours for so many, and the mean no longer moves."""


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
        draws: number of steps, each drawn without replacement; None: consecutive steps.
        seed: draw i is that of `random.Random(seed + i)`.

    Raises:
        LengthError: there are no lengths, fewer than a step takes, or too many draws.
    """
    if not lengths:
        raise LengthError("there is nothing to compare: ", Argument("lengths"), " holds no length")
    per_step = len(lengths)
    if samples_per_step is not None:
        per_step = at_least("samples_per_step", samples_per_step, 1, LengthError)
    if draws is None:
        return [
            list(lengths[first : first + per_step]) for first in range(0, len(lengths), per_step)
        ]
    if per_step > len(lengths):
        raise LengthError(
            Argument("samples_per_step", per_step),
            f" cannot be drawn from {len(lengths)} lengths; set ",
            Argument("samples_per_step"),
            f" to {len(lengths)} or less",
        )
    count = at_least("draws", draws, 1, LengthError)
    if count > MAX_DRAWS:
        raise LengthError(
            Argument("draws"),
            f" must be at most {MAX_DRAWS}, got {count}; decrease ",
            Argument("draws"),
        )
    return [random.Random(seed + i).sample(list(lengths), per_step) for i in range(count)]


def compare(
    steps: Sequence[Sequence[int]],
    dims: ParallelDims,
    config: PlannerConfig,
    cost_model: CostModel | None = None,
) -> list[Outcome]:
    """Plan every step by every planner.

    Args:
        steps: lengths of each step [steps][samples], in tokens.
        dims: sizes of the parallel groups.
        config: cap, padding and the search's options; each planner sets `balance` itself.
        cost_model: weighs all plans; the default one if None.

    Returns:
        one outcome per planner, in the order of `planners`.
    """
    model = cost_model or CostModel()
    return [_outcome(planner, steps, dims, config, model) for planner in planners(dims, config)]


def _outcome(
    planner: Planner,
    steps: Sequence[Sequence[int]],
    dims: ParallelDims,
    config: PlannerConfig,
    cost_model: CostModel,
) -> Outcome:
    failure: str | None = None
    made: list[StepStatistics] = []
    seconds: list[float] = []
    over: list[float] = []
    for lengths in steps:
        started = time.process_time()
        try:
            plan = planner.plan(lengths, dims, config, cost_model)
        except (RuleFailureError, InflightBoundError, OversizeSampleError) as error:
            failure = failure or str(error)
            continue
        taken = time.process_time() - started
        statistics = step_statistics(plan, lengths, cost_model)
        held, bound = statistics.peak_inflight_tokens, config.max_inflight_tokens
        if bound is not None and held > bound:
            failure = failure or (
                f"its plan holds {held:.0f} tokens in flight, max_inflight_tokens is {bound}"
            )
            continue
        sharing = max(len(samples) for rank in plan.micro_batches for samples in rank)
        if sharing > (config.max_samples_per_row or sharing):
            failure = failure or (
                f"its plan has {sharing} samples in a micro-batch, max_samples_per_row is "
                f"{config.max_samples_per_row}"
            )
            continue
        made.append(statistics)
        seconds.append(taken)
        problem, ranks = step_problem(plan, lengths)
        for row in plan.rows():
            if len(row.samples) > 1:
                of_size = problem.on_ranks[row.size]
                tokens = of_size.row_tokens(ranks[row.rank][row.slot])
                over += [tokens / of_size.capacity] if tokens > of_size.capacity else []
    rows = config.num_ranks(dims) * sum(statistics.num_microbatches for statistics in made)
    return Outcome(
        name=planner.name,
        kind=planner.kind,
        steps=len(steps),
        planned=len(made),
        failure=failure,
        time_over_floor=_mean([statistics.time_over_floor for statistics in made]),
        over_cap=len(over) / rows if rows else None,
        worst_over_cap=max(over, default=None),
        placeholders=_mean([statistics.num_placeholders for statistics in made]),
        num_microbatches=_mean([statistics.num_microbatches for statistics in made]),
        rank_balance=_mean([statistics.rank_balance for statistics in made]),
        planning_seconds=_mean(seconds),
    )


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def as_table(outcomes: Sequence[Outcome]) -> Table:
    """One row per planner."""
    return Table(columns=COLUMNS, rows=tuple(map(_row, outcomes)))


def _row(outcome: Outcome) -> tuple[str, ...]:
    def number(value: float | None, digits: int) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    over = "-" if outcome.over_cap is None else "none"
    if outcome.over_cap and outcome.worst_over_cap:
        over = f"{outcome.over_cap:.1%}, {outcome.worst_over_cap:.2f}x"
    seconds = outcome.planning_seconds
    return (
        outcome.name,
        f"{outcome.planned}/{outcome.steps}",
        number(outcome.time_over_floor, 3),
        over,
        number(outcome.num_microbatches, 1),
        number(outcome.placeholders, 1),
        number(outcome.rank_balance, 3),
        "-" if seconds is None else f"{1000 * seconds:.1f} ms",
    )


def summary(outcomes: Sequence[Outcome]) -> list[str]:
    """Lines below the table: the gain on the best rule under the cap, and who has no plan."""
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
            f"of the other frameworks' rules that keep the cap {name} is best: its step takes "
            f"{best / ours.time_over_floor:.3f} x the time of {ours.name}'s"
        )
    return lines + [
        f"{o.name} has no plan for {o.steps - o.planned} of {counted(o.steps, 'step')}: {o.failure}"
        for o in outcomes
        if o.failure
    ]


def as_json(outcomes: Sequence[Outcome]) -> str:
    """A list of objects, one per planner, with `Outcome`'s fields."""
    return json.dumps([asdict(outcome) for outcome in outcomes], indent=2)


def as_csv(outcomes: Sequence[Outcome]) -> str:
    """One line per planner under a heading of `Outcome`'s fields; None is an empty cell."""
    text = io.StringIO()
    records = [asdict(outcome) for outcome in outcomes]
    writer = csv.DictWriter(text, list(records[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue().rstrip("\n")
