"""Planned steps over the best known ones, and how far these are from a bound that no plan beats.

    python tests/benchmarks/best_known.py [--data ../shared/data] [--only TEXT]
    python tests/benchmarks/best_known.py --anneal 1000000

The second command searches for sooner ends, which best_known.json then holds; it takes some hours
of one core and a C compiler (`cc`). For each number of micro-batches near the planner's, simulated
annealing (anneal.c) starts from the planner's step or from samples dealt longest first: a tenth of
the moves for each number, twice all of them for the three best. Ends are in units of cost of the
default model. A slow last stage costs 1.5 times the mean, by an output layer. Under dynamic CP the
cap is per GPU, samples are not cut at it, and annealing may leave ranks emptier than a plan may.

A planned step's end is also played pass by pass (tests/planning/naive_pipeline.py), by code that
shares nothing with the planner's clock: the table has the largest difference.
"""

from __future__ import annotations

import ctypes
import functools
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
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
from mcore_batching.planning.costs.layer_costs import OUTPUT, LayerCost, cost_model
from mcore_batching.planning.plans.statistics import predicted_step_time
from mcore_batching.tools.report import Table

HERE = Path(__file__).resolve().parent
SEEDS = range(3)
SLOW = ", slow last stage"
DYNAMIC = ", dynamic CP"
NEAR = range(-8, 9)
"""Numbers of micro-batches that are tried, over the planner's."""
Rows = list[list[list[int]]]
"""Samples [ranks][slots]."""
Annealed = tuple[float, Rows, list[list[int]]]
"""End of a step, its rows, and the size of each."""


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

    def problem(self, seed: int) -> Problem:
        """A draw of samples."""
        most = self.dims.data_context_parallel if DYNAMIC in self.name else None
        lengths, cap = self.source.draw(self.samples, seed, cut=most is None)
        config = PlannerConfig(max_tokens_per_gpu=cap, max_context_parallel=most)
        return Problem.of(lengths, self.dims, config, self.model)


def cases(data: Path) -> Iterator[Case]:
    """Each row of the table, but for lengths of files that are not there."""
    sources = traces(data) | made_up()
    for name, cap in (("azure_conv", 16384), ("mooncake_conv", 131072), ("mooncake_conv", 16384)):
        if name in sources:
            own = f"{name} {cap}{DYNAMIC}"
            sources[own] = replace(sources[name], name=own, cap=cap)
    for name in ("azure_conv", "mooncake_conv", "truncated reasoning", "code-like"):
        if name in sources:
            sources[name + SLOW] = replace(sources[name], name=name + SLOW)
    uncut = "σ 1.3 uncut" + DYNAMIC
    sources[uncut] = replace(sources["σ 1.3 uncut"], name=uncut)
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
        ("azure_conv 16384" + DYNAMIC, 512, PP4),
        ("azure_conv 16384" + DYNAMIC, 128, PP4),
        ("mooncake_conv 131072" + DYNAMIC, 512, PP4),
        ("mooncake_conv 131072" + DYNAMIC, 128, PP4),
        ("mooncake_conv 16384" + DYNAMIC, 512, PP4),
        (uncut, 512, PP4),
    ):
        if name in sources:
            yield Case(sources[name], samples, dims, slow_last_stage() if SLOW in name else MODEL)


def slow_last_stage() -> CostModel:
    """32 layers of the default model, and an output layer of 1.5 times the mean stage's work."""
    layer = LayerCost(MODEL.linear, MODEL.quadratic, MODEL.quadratic, 1.0)
    output = LayerCost(token=0.6 * 32 / 3.0, read=1.0)
    return cost_model("a" * 32 + OUTPUT, {"a": layer, OUTPUT: output})


class KnownEnds:
    """The soonest end known of each draw, and its number of micro-batches: best_known.json."""

    _PATH = HERE / "best_known.json"
    _NAMES = ("lengths", "samples", "dims", "seed", "end", "num_microbatches")

    def __init__(self) -> None:
        self._ends: dict[tuple[Any, ...], tuple[float, int]] = {}
        for row in json.loads(self._PATH.read_text(encoding="utf-8")):
            *draw, end, count = (row[name] for name in self._NAMES)
            self._ends[tuple(draw)] = end, count

    def of(self, case: Case, seed: int) -> tuple[float, int]:
        return self._ends[case.name, case.samples, layout_name(case.dims), seed]

    def note(self, case: Case, seed: int, end: float, count: int) -> None:
        """Write an end to the file if it is sooner than the known one."""
        draw = case.name, case.samples, layout_name(case.dims), seed
        if draw in self._ends and end >= self._ends[draw][0]:
            return
        self._ends[draw] = end, count
        rows = [
            json.dumps(dict(zip(self._NAMES, (*each, *found), strict=True)), ensure_ascii=False)
            for each, found in self._ends.items()
        ]
        self._PATH.write_text("[\n" + ",\n".join(rows) + "\n]\n", encoding="utf-8")


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


@functools.cache
def compiled() -> Any:
    """The function ``anneal`` of anneal.c."""
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder) / "anneal.so"
        flags = ["-O3", "-march=native", "-shared", "-fPIC"]
        subprocess.run(["cc", *flags, str(HERE / "anneal.c"), "-o", str(built), "-lm"], check=True)
        function = ctypes.CDLL(str(built)).anneal
    function.restype = ctypes.c_double
    return function


def doubles(values: Iterable[float]) -> Any:
    """A C array."""
    listed = list(values)
    return (ctypes.c_double * len(listed))(*listed)


def anneal(
    problem: Problem,
    ranks: Rows,
    sizes: list[list[int]],
    moves: int,
    heat: tuple[float, float],
    seed: int,
) -> Annealed:
    """The best step found with as many micro-batches; ``heat`` at first and in the end is over the
    end of the step that it starts from."""
    model, config, count = problem.cost_model, problem.config, len(ranks[0])
    alone = problem if config.max_context_parallel is None else problem.on_ranks[1]
    (fixed, costs), (last_fixed, last_costs) = (alone.costs_of_stages[i] for i in (0, -1))
    places = (ctypes.c_int * problem.num_samples)()
    flat = (ctypes.c_int * (len(ranks) * count))(*(size for own in sizes for size in own))
    for rank, slots in enumerate(ranks):
        for slot, samples in enumerate(slots):
            for sample in samples:
                places[sample] = rank // sizes[rank][slot] * sizes[rank][slot] * count + slot
    lengths = [max(length, 1) for length in problem.lengths]
    end = compiled()(
        problem.num_samples,
        doubles(costs),
        doubles(last_costs),
        (ctypes.c_long * len(lengths))(*lengths),
        ctypes.c_long(config.max_tokens_per_gpu),
        len(ranks),
        problem.dims.pipeline_parallel,
        count,
        config.max_context_parallel or 1,
        *map(ctypes.c_double, (model.backward_ratio, fixed, last_fixed)),
        ctypes.c_double(model.context_parallel_overhead),
        ctypes.c_double(model.context_parallel_fixed),
        places,
        flat,
        ctypes.c_long(moves),
        *map(ctypes.c_double, heat),
        ctypes.c_uint64(seed),
    )
    own_sizes = [list(flat[rank * count : (rank + 1) * count]) for rank in range(len(ranks))]
    found: Rows = [[[] for _ in range(count)] for _ in ranks]
    for sample, place in enumerate(places):
        first, slot = divmod(place, count)
        for rank in range(first, first + own_sizes[first][slot]):
            found[rank][slot].append(sample)
    return end, found, own_sizes


def with_empty_slots(rows: Iterable[Iterable[Any]], number: int, empty: Any) -> list[list[Any]]:
    """The same of each rank with further slots in the rise of the profile."""
    made = [list(row) for row in rows]
    at = len(made[0]) // 4
    return [[*rank[:at], *(empty for _ in range(number)), *rank[at:]] for rank in made]


def dealt(problem: Problem, count: int) -> Rows | None:
    """So many slots a rank, the longest sample first into the emptiest; None if they overflow."""
    slots: list[list[int]] = [[] for _ in range(count * problem.num_ranks)]
    for sample in sorted(range(problem.num_samples), key=lambda i: -problem.tokens[i]):
        emptiest = min(slots, key=lambda held: sum(problem.tokens[i] for i in held))
        emptiest.append(sample)
        if sum(problem.tokens[i] for i in emptiest) > problem.capacity:
            return None
    return [slots[first : first + count] for first in range(0, len(slots), count)]


def search_long(problem: Problem, step: StepPlan, moves: int) -> tuple[float, int]:
    """End and number of micro-batches of the best step found."""
    found, count = list[Annealed](), step.num_microbatches
    sizes = step.context_parallel or [[1] * count] * problem.num_ranks
    for more in NEAR:
        starts = []
        if step.context_parallel is None and count > -more:
            starts.append(
                (dealt(problem, count + more), [[1] * (count + more)] * problem.num_ranks)
            )
        if more >= 0:
            rows = with_empty_slots(step.micro_batches, more, ())
            starts.append((rows, with_empty_slots(sizes, more, 1)))
        for rows, of_rows in starts:
            if rows is not None:
                found.append(anneal(problem, rows, of_rows, moves // 10, (3e-3, 3e-5), 1))
    for _, rows, of_rows in sorted(found)[:3]:
        for hot, seed in ((4e-3, 1), (6e-3, 2)):
            found.append(anneal(problem, rows, of_rows, moves, (hot, 1e-5), seed))
    end, rows, _ = min(found)
    return end, len(rows[0])


def main() -> None:
    """Print the table; first search for sooner ends if asked to."""
    parser = parser_of(__doc__)
    parser.add_argument("--anneal", type=int, metavar="MOVES", help="search for sooner ends")
    options = parser.parse_args()
    ends, rows = KnownEnds(), []
    for case in cases(options.data):
        if options.only not in case.name:
            continue
        ours, bounds, milliseconds, differences, counts = [], [], [], [], []
        for seed in SEEDS:
            problem = case.problem(seed)
            lengths = problem.lengths
            step, took = timed_plan(lengths, case.dims, problem.config, case.model)
            if options.anneal:
                ends.note(case, seed, *search_long(problem, step, options.anneal))
            end = predicted_step_time(step, lengths)
            best, best_count = ends.of(case, seed)
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
