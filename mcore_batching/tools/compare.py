"""Compare this planner, its plainer modes and other frameworks' rules on the same steps.

All plan the same steps and are weighed by one cost model. The cap is what memory allows; rules fill
micro-batches up to it, and some end sooner under a smaller one. Each is shown at the given cap and
at the cap under which its own steps end soonest.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from mcore_batching.planning import (
    ConfigError,
    CostModel,
    LengthError,
    OversizeSampleError,
    ParallelDims,
    PlannerConfig,
    PlanningError,
    Problem,
    StepPlan,
    plan_step,
    predicted_step_time,
)
from mcore_batching.planning.errors import named
from mcore_batching.planning.groups import steps_of_batch
from mcore_batching.planning.packing.bounds import step_time_floor
from mcore_batching.planning.plans.plan import counted
from mcore_batching.tools import report
from mcore_batching.tools.lengths_file import read_lengths
from mcore_batching.tools.options import (
    CommandParser,
    add_dims,
    add_lengths,
    add_search,
    cost_model_of,
    made_of,
    progress,
)
from mcore_batching.tools.rules import RULES, Rule, RuleFailureError, rule_plan

OURS = "mcore_batching"
# Each cap that is tried over the one before. With 0.8 the best rule's steps end up to 0.4 % later,
# single rules' 3 %; 512 samples take all rules a second.
CAP_STEP = 0.9


class Planner(NamedTuple):
    """A way to plan a step."""

    name: str
    dims: ParallelDims
    cost_model: CostModel
    changes: Mapping[str, Any] = {}  # of the planner's options
    rule: Rule | None = None  # another framework's, in place of this package's planner

    def plan(self, lengths: Sequence[int], config: PlannerConfig) -> StepPlan:
        """The plan of a step; a `RuleFailureError` where the rule has none."""
        config = replace(config, **self.changes)
        if self.rule is None:
            return plan_step(lengths, self.dims, config, self.cost_model)
        plan = rule_plan(self.rule, lengths, self.dims, config)
        return replace(plan, cost_model=self.cost_model)

    def fills_up(self, config: PlannerConfig) -> bool:
        """True if micro-batches are filled up to the cap, so that a smaller one may be better."""
        # The search takes fewer tokens than the cap allows wherever that ends sooner.
        return self.rule is not None or not replace(config, **self.changes).searches


class _Step(NamedTuple):
    """The outcome of planning a step; of no meaning beside a failure."""

    failure: PlanningError | None
    end: float = math.inf
    num_microbatches: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One planner's result over all steps; means are over those that it planned, None if none."""

    name: str
    is_rule: bool  # of another framework
    steps: int
    planned: int  # of the steps, at the given cap
    failure: PlanningError | None  # the reason for the first of the others
    time_over_floor: float | None
    time_over_ours: float | None  # of steps that this package's search has a plan for, too
    num_microbatches: float | None  # per rank
    planning_seconds: float | None  # processor time of planning a step
    best_cap: int | None  # per GPU: largest of those under which its steps end soonest
    time_over_ours_at_best_cap: float | None


def planners(
    dims: ParallelDims, config: PlannerConfig, cost_model: CostModel, rules: Mapping[str, Rule]
) -> Iterator[Planner]:
    """This package's search first, then its plainer modes, then the rules.

    Under dynamic CP also each context-parallel size for all.
    """
    yield Planner(OURS, dims, cost_model)
    for balance in ("cost", "tokens", "none"):
        yield Planner(f"{OURS}, balance {balance}", dims, cost_model, {"balance": balance})
    fixed: dict[str, Any] = {"max_context_parallel": None}
    if config.max_context_parallel is not None:
        sizes = dims.row_sizes(config.max_context_parallel)
        on_size = {size: (dims.for_rows_on(size), cost_model.on_ranks(size)) for size in sizes}
        # A sample that needs more ranks than the size counts as no plan, not as one over the cap.
        strict = fixed | {"on_oversize": "error"}
        for size in sizes:
            yield Planner(f"CP {size} for all", *on_size[size], strict)
        # The rules have one size for all: the dims', or the largest below it that rows may have.
        dims, cost_model = on_size[max(size for size in sizes if size <= dims.context_parallel)]
    for name, rule in rules.items():
        yield Planner(name, dims, cost_model, fixed, rule)


def consecutive_steps(lengths: Sequence[int], samples_per_step: int | None) -> list[list[int]]:
    """The lengths of every step of so many samples; None: of all."""
    if not lengths:
        raise LengthError("lengths holds no length; give one or more")
    steps = steps_of_batch(len(lengths), samples_per_step, None, None)
    return [[lengths[sample] for sample in samples] for samples in steps]


def compare(
    steps: Sequence[Sequence[int]],
    dims: ParallelDims,
    config: PlannerConfig,
    cost_model: CostModel | None = None,
    rules: Mapping[str, Rule] = RULES,
    on_planner: Callable[[int, int], None] | None = None,
) -> list[Outcome]:
    """Plan every step [steps][samples], in tokens, by every planner and by these rules of others;
    the cost model weighs all plans. After each planner `on_planner` is called with the number of
    those that are done, and of all."""
    model = cost_model or CostModel()
    floors = [step_time_floor(Problem.of(step, dims, config, model)) or 1.0 for step in steps]
    caps = [config.max_tokens_per_gpu]
    mean = sum(map(sum, steps)) / max(1, sum(map(len, steps)))
    # Where a micro-batch holds less than the mean length most samples run alone, and a smaller cap
    # changes nothing. It holds a cap's tokens on each of its context-parallel ranks.
    shared_by = config.max_context_parallel or dims.context_parallel
    while caps[-1] * CAP_STEP > max(1.0, mean / shared_by):
        caps.append(int(caps[-1] * CAP_STEP))
    outcomes: list[Outcome] = []
    ours: list[_Step] = []
    all_planners = list(planners(dims, config, model, rules))
    for planner in all_planners:
        made = [_planned(planner, lengths, config, caps[0]) for lengths in steps]
        ours = ours or made  # `planners` yields this package's search first
        planned = [step for step in made if step.failure is None]
        best_cap, best = caps[0], made
        for cap in caps[1:] if planner.fills_up(config) and planned else []:
            tried = [_planned(planner, lengths, config, cap) for lengths in steps]
            # Over the steps planned at the given cap: failing one makes the sum infinite.
            both = [pair for pair in zip(tried, best, made, strict=True) if not pair[2].failure]
            if sum(step.end for step, _, _ in both) < sum(step.end for _, step, _ in both):
                best_cap, best = cap, tried
        with_floors = zip(made, floors, strict=True)
        outcomes.append(
            Outcome(
                name=planner.name,
                is_rule=planner.rule is not None,
                steps=len(steps),
                planned=len(planned),
                failure=next((step.failure for step in made if step.failure), None),
                time_over_floor=_mean([s.end / floor for s, floor in with_floors if not s.failure]),
                time_over_ours=_over(made, ours),
                num_microbatches=_mean([step.num_microbatches for step in planned]),
                planning_seconds=_mean([step.seconds for step in planned]),
                best_cap=best_cap if planned else None,
                time_over_ours_at_best_cap=_over(best, ours),
            )
        )
        if on_planner is not None:
            on_planner(len(outcomes), len(all_planners))
    return outcomes


def _planned(planner: Planner, lengths: Sequence[int], config: PlannerConfig, cap: int) -> _Step:
    """One step planned under `cap`."""
    # The process's own time: other work of the machine would count against a rule.
    started = time.process_time()
    try:
        plan = planner.plan(lengths, replace(config, max_tokens_per_gpu=cap))
    except (RuleFailureError, OversizeSampleError, ConfigError) as error:
        if isinstance(error, ConfigError) and cap == config.max_tokens_per_gpu:
            raise  # of the settings, whoever plans
        return _Step(error)
    seconds = time.process_time() - started
    # The rules ignore this bound: a plan that breaks it is none.
    most = max(len(samples) for rank in plan.micro_batches for samples in rank)
    bound = config.max_samples_per_row
    if bound is not None and most > bound:
        what = f"its plan has {most} samples in a micro-batch, "
        return _Step(RuleFailureError(f"{what}{named('max_samples_per_row')} is {bound}"))
    return _Step(None, predicted_step_time(plan, lengths), plan.num_microbatches, seconds)


def _over(steps: Sequence[_Step], ours: Sequence[_Step]) -> float | None:
    both = zip(steps, ours, strict=True)
    return _mean([s.end / o.end for s, o in both if not s.failure and not o.failure and o.end])


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


COLUMNS = (
    "planner",
    "steps",
    "time/ours, given cap",
    "own best cap",
    "time/ours, own best cap",
    "time/floor",
    "micro-batches/rank",
    "planning",
)
LEGEND = f"""\
time/ours     predicted end of the step / that under {OURS}'s plan, mean over steps: at the
              given --max-tokens-per-gpu, and at the cap up to it under which the planner's
              own steps end soonest; the second is what a tuned job takes
time/floor    predicted end of the step / the floor, mean over steps; no plan ends before it:
              {report.FLOOR}
planning      processor time for one step at the given cap, mean over steps"""


def add_arguments(parser: CommandParser) -> None:
    """The command's arguments."""
    parser.description = (
        "Plan the same steps with this planner, its plainer modes and others' rules (first-fit, "
        "verl's, Megatron's dp_balanced), and predict how long each step takes, under the cap "
        "and under the best cap below it for each."
    )
    add_lengths(parser)
    add_dims(parser)
    add_search(parser)


def run(options: argparse.Namespace) -> int:
    """Compare and print the table."""
    dims, config = made_of(ParallelDims, options), made_of(PlannerConfig, options)
    lengths = read_lengths(options.lengths, options.column)
    steps = consecutive_steps(lengths, options.samples_per_step)
    with progress("comparing") as on_planner:
        outcomes = compare(steps, dims, config, cost_model_of(options), on_planner=on_planner)
    sizes = sorted({len(step) for step in steps})  # the last step may hold fewer
    samples = " to ".join([*map(str, sizes[:-1]), counted(sizes[-1], "sample")])
    print(f"{counted(len(steps), 'step')} of {samples}, {report.dims_line(dims, config)}")
    print(report.Table(columns=COLUMNS, rows=tuple(map(table_row, outcomes))))
    print(LEGEND)
    for line in summary(outcomes):
        print(line)
    return 0


def table_row(outcome: Outcome) -> tuple[str, ...]:
    """The cells of a planner."""
    seconds = outcome.planning_seconds
    figures = (
        ("{:.3f}", outcome.time_over_ours),
        ("{}", outcome.best_cap),
        ("{:.3f}", outcome.time_over_ours_at_best_cap),
        ("{:.3f}", outcome.time_over_floor),
        ("{:.1f}", outcome.num_microbatches),
        ("{:.1f} ms", seconds and 1000 * seconds),
    )
    shown = ["-" if value is None else text.format(value) for text, value in figures]
    return (outcome.name, f"{outcome.planned}/{outcome.steps}", *shown)


def summary(outcomes: Sequence[Outcome]) -> list[str]:
    """Lines below the table: the gain on the best rules, and who has no plan."""
    lines = []
    # A rule that has no plan for some steps would win by the ones that it left out.
    peers = [o for o in outcomes if o.is_rule and o.planned == o.steps]
    at_cap = [(o.time_over_ours, o.name) for o in peers if o.time_over_ours]
    best = [(time, o.name, o.best_cap) for o in peers if (time := o.time_over_ours_at_best_cap)]
    if at_cap and best:
        time, name = min(at_cap)
        time_tuned, name_tuned, cap = min(best)
        lines.append(
            f"of the other frameworks' rules at their own best caps {name_tuned} under {cap} ends "
            f"soonest, at {time_tuned:.3f} x the time of {OURS}; at the given cap {name}, at "
            f"{time:.3f} x"
        )
    return lines + [
        f"{o.name} has no plan for {o.steps - o.planned} of {counted(o.steps, 'step')}: {o.failure}"
        for o in outcomes
        if o.failure
    ]
