"""Planned steps over the best known ones, and how far these are from a bound that no plan beats.

    python tests/benchmarks/best_known.py [--data ../shared/data] [--only TEXT]

best_known.json holds the soonest ends that simulated annealing of 10^6 moves found, in units of
cost of the default model: for each number of micro-batches near the planner's, from its step
and from samples assigned longest first. A slow last stage costs 1.5 times the mean, by an output
layer. Under dynamic CP the cap is per GPU, samples are not cut at it, and annealing may leave ranks
emptier than a plan may.

A planned step's end is also played pass by pass (tests/planning/naive_pipeline.py), by code that
shares nothing with the planner's clock: the table has the largest difference.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "planning"))

from benchmark_cases import (
    MODEL,
    PP4,
    PP8,
    Lengths,
    layout_name,
    made_up,
    mean,
    parser_of,
    timed_plan,
    traces,
)
from naive_pipeline import played
from step_bound import step_time_bound

from mcore_batching.planning import CostModel, ParallelDims, PlannerConfig, Problem, StepPlan
from mcore_batching.planning.costs.cost import OUTPUT, LayerCost
from mcore_batching.planning.costs.layers_of import cost_model
from mcore_batching.planning.plans.statistics import predicted_step_time
from mcore_batching.tools.report import Table

HERE = Path(__file__).resolve().parent
SEEDS = range(3)
SLOW = ", slow last stage"
DYNAMIC = ", dynamic CP"


@dataclass(frozen=True)
class Case:
    """A row of the table."""

    source: Lengths
    samples: int
    dims: ParallelDims
    model: CostModel

    @property
    def name(self) -> str:
        return self.source.name

    def draw(self, seed: int) -> tuple[Any, ...]:
        return self.name, self.samples, layout_name(self.dims), seed

    def problem(self, seed: int) -> Problem:
        """A draw of samples."""
        most = self.dims.data_context_parallel if DYNAMIC in self.name else None
        lengths, cap = self.source.draw(self.samples, seed, cut=most is None)
        config = PlannerConfig(max_tokens_per_gpu=cap, max_context_parallel=most)
        return Problem.of(lengths, self.dims, config, self.model)


ROWS = (
    ("azure_conv", 512, PP4),
    ("azure_conv", 512, PP8),
    ("azure_conv", 128, PP4),
    ("mooncake_conv", 512, PP4),
    ("mooncake_conv", 512, PP8),
    ("mooncake_conv", 128, PP8),
    ("long-tailed", 512, PP4),
    ("short questions", 512, PP4),
    ("code-like", 512, PP4),
    ("σ 1.3", 512, PP4),
    ("σ 1.3 uncut", 512, PP4),
    ("truncated reasoning", 512, PP4),
    ("truncated reasoning", 256, PP8),
    ("uniform", 256, PP4),
    ("powers of two", 512, PP8),
    ("short or long", 512, PP4),
    ("heavy-tailed", 512, PP4),
    ("many equal", 512, PP4),
    ("azure_conv" + SLOW, 512, PP4),
    ("mooncake_conv" + SLOW, 512, PP4),
    ("truncated reasoning" + SLOW, 512, PP4),
    ("code-like" + SLOW, 512, PP4),
    ("azure_conv 16384" + DYNAMIC, 512, PP4),
    ("azure_conv 16384" + DYNAMIC, 128, PP4),
    ("mooncake_conv 131072" + DYNAMIC, 512, PP4),
    ("mooncake_conv 131072" + DYNAMIC, 128, PP4),
    ("mooncake_conv 16384" + DYNAMIC, 512, PP4),
    ("σ 1.3 uncut" + DYNAMIC, 512, PP4),
)
"""Lengths, with their cap where it is another, samples and layout."""


def cases(data: Path) -> Iterator[Case]:
    """Each row of the table, but for lengths of files that are not there."""
    sources = traces(data) | made_up()
    for name, samples, dims in ROWS:
        own, cap = re.fullmatch(r"(.+?)(?: (\d{4,}))?(?:, .*)?", name).groups()
        if own in sources:
            source = replace(sources[own], name=name, cap=int(cap) if cap else sources[own].cap)
            yield Case(source, samples, dims, slow_last_stage() if SLOW in name else MODEL)


def slow_last_stage() -> CostModel:
    """32 layers of the default model, and an output layer of 1.5 times the mean stage's work."""
    layer = LayerCost(MODEL.linear, MODEL.quadratic, MODEL.quadratic, 1.0)
    output = LayerCost(token=0.6 * 32 / 3.0, read=1.0)
    return cost_model("a" * 32 + OUTPUT, {"a": layer, OUTPUT: output})


def known_ends() -> dict[tuple[Any, ...], tuple[float, int]]:
    """By `Case.draw` the soonest end known, and its number of micro-batches: best_known.json."""
    names = ("lengths", "samples", "dims", "seed", "end", "num_microbatches")
    found = {}
    for row in json.loads(HERE.joinpath("best_known.json").read_text(encoding="utf-8")):
        *draw, end, count = (row[name] for name in names)
        found[tuple(draw)] = end, count
    return found


def played_end(problem: Problem, step: StepPlan) -> float:
    """The end of a step by the pipeline that is played pass by pass."""
    sizes = step.context_parallel or [[1] * step.num_microbatches] * len(step.micro_batches)
    slots = range(step.num_microbatches)
    rows = {1: problem} | (dict(problem.on_ranks) if step.context_parallel else {})
    costs = [
        [
            fixed + sum(costs[i] for i in rank[slot])
            for rank, size in zip(step.micro_batches, sizes, strict=True)
            for fixed, costs in [rows[size[slot]].costs_of_stages[kind]]
        ]
        for slot in slots
        for kind in range(len(problem.costs_of_stages))
    ]
    blocks = [
        [(first, first + size[slot]) for first, size in enumerate(sizes) if first % size[slot] == 0]
        for slot in slots
    ]
    return max(end for _, end in played(costs, problem.schedule, blocks).values())


def main() -> None:
    """Print the table."""
    options = parser_of(__doc__).parse_args()
    ends, rows = known_ends(), []
    for case in cases(options.data):
        if options.only not in case.name:
            continue
        ours, bounds, milliseconds, differences, counts = [], [], [], [], []
        for seed in SEEDS:
            problem = case.problem(seed)
            lengths = problem.lengths
            step, took = timed_plan(lengths, case.dims, problem.config, case.model)
            end = predicted_step_time(step, lengths)
            best, best_count = ends[case.draw(seed)]
            ours.append(end / best)
            bounds.append(best / step_time_bound(problem))
            milliseconds.append(took)
            differences.append(abs(played_end(problem, step) / end - 1.0))
            counts.append(f"{step.num_microbatches}/{best_count}")
        rows.append(
            (
                f"{case.name}, {case.samples}, {layout_name(case.dims)}",
                *(f"{figure:.3f}" for figure in (mean(ours), max(ours), mean(bounds))),
                " ".join(counts),
                f"{mean(milliseconds):.0f} ms",
                f"{max(differences):.0e}",
            )
        )
    columns = ("lengths, samples, layout", "ours/best known", "worst draw", "best known/bound")
    columns += ("micro-batches ours/best", "planning", "clocks differ by")
    print(Table(columns=columns, rows=tuple(rows)))


if __name__ == "__main__":
    main()
