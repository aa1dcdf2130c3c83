"""Planned steps over the best known ones, and how far these are from a bound that no plan beats.

    python tests/benchmarks/best_known.py [--data ../shared/data] [--only TEXT]
    python tests/benchmarks/best_known.py --anneal 1000000

The second command searches for sooner ends, which best_known.json then holds; it takes an hour of
one core and a C compiler (`cc`). For each number of micro-batches near the planner's, simulated
annealing (anneal.c) starts from the planner's step or from samples dealt longest first: a tenth of
the moves for each number, twice all of them for the three best. Ends are in units of cost of the
default model. A slow last stage costs 1.5 times the mean, by an output layer.

A planned step's end is also played pass by pass (tests/planning/naive_pipeline.py), by code that
shares nothing with the planner's clock: the table has the largest difference.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "planning"))

from annealing import KnownEnds, Slots, compiled, doubles, with_empty_slots
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
from mcore_batching.planning.costs.layer_costs import OUTPUT, LayerCost, cost_model
from mcore_batching.planning.plans.statistics import predicted_step_time
from mcore_batching.tools.report import Table

SEEDS = range(3)
SLOW = ", slow last stage"
NEAR = range(-8, 9)
"""Numbers of micro-batches that are tried, over the planner's."""


def cases(data: Path) -> Iterator[tuple[Lengths, int, ParallelDims, CostModel]]:
    """Lengths, samples, layout and costs of each row of the table."""
    sources = traces(data) | made_up()
    for name in ("azure_conv", "mooncake_conv", "truncated reasoning", "code-like"):
        if name in sources:
            sources[name + SLOW] = replace(sources[name], name=name + SLOW)
    for name, samples, dims in (
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
    ):
        if name in sources:
            yield sources[name], samples, dims, slow_last_stage() if SLOW in name else MODEL


def slow_last_stage() -> CostModel:
    """32 layers of the default model, and an output layer of 1.5 times the mean stage's work."""
    layer = LayerCost(MODEL.linear, MODEL.quadratic, MODEL.quadratic, 1.0)
    output = LayerCost(token=0.6 * 32 / 3.0, read=1.0)
    return cost_model("a" * 32 + OUTPUT, {"a": layer, OUTPUT: output})


def known() -> KnownEnds:
    return KnownEnds("best_known.json", ("lengths", "samples", "dims", "seed"))


def played_end(problem: Problem, step: StepPlan) -> float:
    """The end of a step by the pipeline that is played pass by pass."""
    costs = [
        [fixed + sum(costs[i] for i in rank[slot]) for rank in step.micro_batches]
        for slot in range(step.num_microbatches)
        for fixed, costs in problem.costs_of_stages
    ]
    return max(end for _, end in played(costs, problem.schedule).values())


class Annealer:
    """anneal.c, for one problem."""

    def __init__(self, problem: Problem) -> None:
        self._anneal, self._problem = compiled("anneal.c"), problem

    def __call__(self, ranks: Slots, moves: int, hot: float, cold: float, seed: int) -> Slots:
        """The best step found with as many micro-batches."""
        problem, dims, count = self._problem, self._problem.dims, len(ranks[0])
        (fixed, costs), (last_fixed, last_costs) = (problem.costs_of_stages[i] for i in (0, -1))
        places = (ctypes.c_int * problem.num_samples)()
        for rank, slots in enumerate(ranks):
            for slot, samples in enumerate(slots):
                for sample in samples:
                    places[sample] = rank * count + slot
        self._anneal(
            problem.num_samples,
            doubles(costs),
            doubles(last_costs),
            doubles(problem.tokens),
            ctypes.c_double(problem.capacity),
            dims.data_parallel,
            dims.pipeline_parallel,
            count,
            ctypes.c_double(problem.cost_model.backward_ratio),
            ctypes.c_double(fixed),
            ctypes.c_double(last_fixed),
            places,
            ctypes.c_long(moves),
            ctypes.c_double(hot),
            ctypes.c_double(cold),
            ctypes.c_uint64(seed),
        )
        found: Slots = [[[] for _ in range(count)] for _ in range(dims.data_parallel)]
        for sample, place in enumerate(places):
            found[place // count][place % count].append(sample)
        return found


def dealt(problem: Problem, count: int) -> Slots | None:
    """So many slots a rank, the longest sample first into the emptiest; None if they overflow."""
    slots: list[list[int]] = [[] for _ in range(count * problem.dims.data_parallel)]
    for sample in sorted(range(problem.num_samples), key=lambda i: -problem.tokens[i]):
        emptiest = min(slots, key=lambda held: sum(problem.tokens[i] for i in held))
        emptiest.append(sample)
        if sum(problem.tokens[i] for i in emptiest) > problem.capacity:
            return None
    return [slots[first : first + count] for first in range(0, len(slots), count)]


def search_long(problem: Problem, step: StepPlan, moves: int) -> tuple[float, int]:
    """End and number of micro-batches of the best step found."""
    anneal, found = Annealer(problem), list[tuple[float, Slots]]()

    def note(ranks: Slots) -> None:
        micro_batches = tuple(tuple(map(tuple, rank)) for rank in ranks)
        made = replace(step, micro_batches=micro_batches, num_microbatches=len(ranks[0]))
        found.append((played_end(problem, made), ranks))

    for more in NEAR:
        starts = (
            [dealt(problem, step.num_microbatches + more)] if step.num_microbatches > -more else []
        )
        if more >= 0:
            starts.append(with_empty_slots(step.micro_batches, more))
        for start in starts:
            if start is not None:
                note(anneal(start, moves // 10, 3e-3, 3e-5, 1))
    for _, ranks in sorted(found)[:3]:
        for seed in (1, 2):
            note(anneal(ranks, moves, 4e-3, 1e-5, seed))
    end, ranks = min(found)
    return end, len(ranks[0])


def main() -> None:
    """Print the table; first search for sooner ends if asked to."""
    parser = parser_of(__doc__)
    parser.add_argument("--anneal", type=int, metavar="MOVES", help="search for sooner ends")
    options = parser.parse_args()
    ends, rows = known(), []
    for source, samples, dims, model in cases(options.data):
        if options.only not in source.name:
            continue
        ours, bounds, milliseconds, differences, counts = [], [], [], [], []
        for seed in SEEDS:
            lengths, cap = source.draw(samples, seed)
            config = PlannerConfig(max_tokens_per_gpu=cap)
            problem = Problem.of(lengths, dims, config, model)
            step, took = timed_plan(lengths, dims, config, model)
            case = (source.name, samples, layout_name(dims), seed)
            if options.anneal:
                ends.note(case, *search_long(problem, step, options.anneal))
            end = predicted_step_time(step, lengths)
            best, best_count = ends[case]
            ours.append(end / best)
            bounds.append(best / step_time_bound(problem))
            milliseconds.append(took)
            differences.append(abs(played_end(problem, step) / end - 1.0))
            counts.append(f"{step.num_microbatches}/{best_count}")
        rows.append(
            (
                f"{source.name}, {samples}, {layout_name(dims)}",
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
