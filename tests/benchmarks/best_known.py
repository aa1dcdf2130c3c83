"""Planned steps over the best known ones, and how far these are from a bound that no plan beats.

    python tests/benchmarks/best_known.py [--data ../shared/data]
    python tests/benchmarks/best_known.py --anneal 1000000

The best known ends in best_known.json come from the second command, which takes an hour of one core
and a C compiler (`cc`): for each number of micro-batches that could be best, simulated annealing
(anneal.c) of the planner's own step, a tenth of the moves for all numbers and twice all of them for
the three best. Ends are in units of cost of the default model; lengths and seeds are those of
bench_step_time.py. An end is replaced by a sooner one alone. Where the last stage is slow, an
output layer makes it 1.5 times the mean; `--only slow` plans or anneals these cases alone.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from bench_step_time import (
    MODEL,
    PP4,
    PP8,
    REPOSITORY,
    Lengths,
    layout_name,
    log_normal,
    mean,
    sources,
    timed_plan,
)
from step_bound import step_time_bound

from mcore_batching.planning import CostModel, ParallelDims, PlannerConfig, Problem
from mcore_batching.planning.costs.layer_costs import OUTPUT, LayerCost, cost_model
from mcore_batching.planning.plans.statistics import predicted_step_time
from mcore_batching.planning.search import Objective
from mcore_batching.planning.search.objective import Candidate
from mcore_batching.planning.search.steps import FIRSTS, Steps
from mcore_batching.planning.search.targets import Kind
from mcore_batching.tools.report import Table

HERE = Path(__file__).resolve().parent
KNOWN = HERE / "best_known.json"
SEEDS = range(3)
SLOW = ", slow last stage"
Known = dict[tuple[str, int, str, int], tuple[float, int]]
"""End and number of micro-batches of lengths, samples, layout and seed."""


def cases(data: Path) -> Iterator[tuple[Lengths, int, ParallelDims]]:
    by_name = {source.name: source for source in sources(data)}
    long = [min(length, 200_000) for length in log_normal(2048, 1.6, 20_000)]
    short = [min(length, 4096) for length in log_normal(200, 0.6, 20_000)]
    code = [min(length, 8192) for length in log_normal(1500, 1.0, 20_000)]
    by_name |= {
        "long-tailed": Lengths("long-tailed", long, 200_000),
        "short questions": Lengths("short questions", short, 4096),
        "code-like": Lengths("code-like", code, 8192),
    } | made_up()
    for name in ("azure_conv", "mooncake_conv", "truncated reasoning", "code-like"):
        if name in by_name:
            by_name[name + SLOW] = replace(by_name[name], name=name + SLOW)
    for name, samples, dims in (
        ("azure_conv", 512, PP4),
        ("azure_conv", 512, PP8),
        ("azure_conv", 128, PP4),
        ("mooncake_conv", 512, PP4),
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
        ("azure_conv" + SLOW, 512, PP4),
        ("mooncake_conv" + SLOW, 512, PP4),
        ("truncated reasoning" + SLOW, 512, PP4),
        ("code-like" + SLOW, 512, PP4),
    ):
        if name in by_name:
            yield by_name[name], samples, dims


def made_up() -> dict[str, Lengths]:
    """Kinds of lengths on which nothing in the search was chosen."""
    draw = random.Random(11)

    def reasoning() -> int:
        """Answers, chains of thought, and a tenth that ran into the limit on new tokens."""
        kind = draw.random()
        if kind < 0.1:
            return 32768
        median, sigma = (1200, 0.6) if kind < 0.7 else (7000, 0.5)
        return min(32768, int(median * draw.lognormvariate(0, sigma)) + 1)

    reasoned = [reasoning() for _ in range(20_000)]
    even = [draw.randint(64, 16384) for _ in range(20_000)]
    powers = [256 << draw.randrange(8) for _ in range(20_000)]
    return {
        "truncated reasoning": Lengths("truncated reasoning", reasoned, 34816),
        "uniform": Lengths("uniform", even, 24576),
        "powers of two": Lengths("powers of two", powers, 40960),
    }


def slow_last_stage() -> CostModel:
    """32 layers of the default model; an output layer makes the last of four stages 1.5 times the
    mean in work on tokens."""
    layer = LayerCost(MODEL.linear, MODEL.quadratic, MODEL.quadratic, 1.0)
    output = LayerCost(token=0.6 * 32 / 3.0, read=1.0)
    return cost_model("a" * 32 + OUTPUT, {"a": layer, OUTPUT: output})


def known() -> Known:
    return {
        (row["lengths"], row["samples"], row["dims"], row["seed"]): (
            row["end"],
            row["num_microbatches"],
        )
        for row in json.loads(KNOWN.read_text(encoding="utf-8"))
    }


def write(ends: Known) -> None:
    names = ("lengths", "samples", "dims", "seed", "end", "num_microbatches")
    rows = [dict(zip(names, (*case, *end), strict=True)) for case, end in sorted(ends.items())]
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    KNOWN.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


class Annealer:
    """anneal.c, compiled."""

    def __init__(self, folder: Path) -> None:
        built = folder / "anneal.so"
        flags = ["-O3", "-march=native", "-shared", "-fPIC"]
        subprocess.run(["cc", *flags, str(HERE / "anneal.c"), "-o", str(built), "-lm"], check=True)
        self._anneal = ctypes.CDLL(str(built)).anneal
        self._anneal.restype = ctypes.c_double

    def __call__(
        self, problem: Problem, step: Candidate, moves: int, hot: float, cold: float, seed: int
    ) -> Candidate:
        """The best step found, with as many micro-batches."""
        dims, count, number = problem.dims, len(step.ranks[0]), problem.num_samples
        (fixed, costs), (last_fixed, last_costs) = (problem.costs_of_stages[i] for i in (0, -1))
        places = (ctypes.c_int * number)()
        for rank, slots in enumerate(step.ranks):
            for slot, samples in enumerate(slots):
                for sample in samples:
                    places[sample] = rank * count + slot
        numbers = ctypes.c_double * number
        end = self._anneal(
            number,
            numbers(*costs),
            numbers(*last_costs),
            numbers(*map(float, problem.tokens)),
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
            None,
            0,
            1,
        )
        ranks: list[list[list[int]]] = [
            [[] for _ in range(count)] for _ in range(dims.data_parallel)
        ]
        for sample, place in enumerate(places):
            ranks[place // count][place % count].append(sample)
        return Candidate(ranks, [end])


def search_long(problem: Problem, anneal: Annealer, moves: int) -> Candidate:
    objective = Objective(problem)
    objective.effort = 10**12
    steps = Steps(objective)
    per_rank = -(-problem.num_samples // problem.dims.data_parallel)

    def quick(counts: set[int]) -> Iterator[Candidate]:
        for count in sorted(counts):
            kinds = [Kind(count, first, gentle) for first in FIRSTS for gentle in (False, True)]
            for kind in kinds:
                steps.make(kind, in_vain=3)
            made = [kind for kind in steps.soonest if kind in kinds]
            if made and count <= per_rank:
                yield anneal(problem, steps.best[made[0]], moves // 10, 3e-3, 3e-5, 1)

    counts = set(steps.counts())
    found = sorted(quick(counts), key=lambda step: step.end)
    near = {len(step.ranks[0]) + more for step in found[:3] for more in range(-2, 3)}
    near = {count for count in near if count >= min(counts)}
    found = sorted([*found, *quick(near - counts)], key=lambda step: step.end)
    found += [
        anneal(problem, step, moves, 4e-3, 1e-5, seed) for step in found[:3] for seed in (1, 2)
    ]
    return min(found, key=lambda step: step.end)


def main() -> int:
    """Print the table, or search for sooner ends."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, default=REPOSITORY.parent / "shared" / "data")
    parser.add_argument("--anneal", type=int, metavar="MOVES", help="search for sooner ends")
    parser.add_argument("--only", default="", metavar="TEXT", help="in the name of the lengths")
    options = parser.parse_args()
    ends, rows = known(), []
    for source, samples, dims in cases(options.data):
        if options.only not in source.name:
            continue
        model = slow_last_stage() if source.name.endswith(SLOW) else MODEL
        ours, bounds, milliseconds, counts = [], [], [], []
        for seed in SEEDS:
            lengths, cap = source.draw(samples, seed)
            config = PlannerConfig(max_tokens_per_gpu=cap)
            problem = Problem.of(lengths, dims, config, model)
            case = (source.name, samples, layout_name(dims), seed)
            if options.anneal:
                with tempfile.TemporaryDirectory() as folder:
                    best = search_long(problem, Annealer(Path(folder)), options.anneal)
                if case not in ends or best.end < ends[case][0]:
                    ends[case] = best.end, len(best.ranks[0])
                    write(ends)
            step, seconds = timed_plan(lengths, dims, config, model)
            ours.append(predicted_step_time(step, lengths) / ends[case][0])
            bounds.append(ends[case][0] / step_time_bound(problem))
            milliseconds.append(1000 * seconds)
            counts.append(f"{step.num_microbatches}/{ends[case][1]}")
        rows.append(
            (
                source.name,
                str(samples),
                layout_name(dims),
                f"{mean(ours):.4f}",
                f"{max(ours):.4f}",
                f"{mean(bounds):.4f}",
                " ".join(counts),
                f"{mean(milliseconds):.0f} ms",
            )
        )
    columns = ("lengths", "samples", "layout", "ours/best known", "worst draw")
    columns += ("best known/bound", "micro-batches ours/best", "planning")
    print(Table(columns=columns, rows=tuple(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
