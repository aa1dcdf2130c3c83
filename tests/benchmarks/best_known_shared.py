"""Planned steps under dynamic CP over the best known ones, and these over a bound.

    python tests/benchmarks/best_known_shared.py [--data ../shared/data]
    python tests/benchmarks/best_known_shared.py --anneal 4000000

The cases are those of bench_dynamic_cp.py on DP8×PP4. The best known ends in
best_known_shared.json come from the second command, which takes about an hour of one core and a C
compiler (`cc`): simulated annealing (anneal_shared.c) of the planner's own step with as many
micro-batches or a few more, a quarter of the moves for each number and twice all of them for the
three best. Its moves also merge and split rows and exchange slots and blocks of ranks; it may leave
ranks emptier than a plan may. An end is replaced by a sooner one alone.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from bench_dynamic_cp import TARGETS, drawn, pure_work
from bench_step_time import MODEL, PP4, REPOSITORY, mean, sources
from step_bound import step_time_bound

from mcore_batching.planning import Problem, StepPlan, plan_step
from mcore_batching.planning.plans.statistics import predicted_step_time
from mcore_batching.planning.search.objective import Candidate
from mcore_batching.planning.search.shared_rows import SharedObjective
from mcore_batching.tools.report import Table

HERE = Path(__file__).resolve().parent
KNOWN = HERE / "best_known_shared.json"
SEEDS = range(3)
RANKS = 8
FURTHER = 9
"""Numbers of micro-batches tried; every other one where there are many."""
Known = dict[tuple[str, int | None, int, int], tuple[float, int]]
"""End and number of micro-batches of lengths, cap, samples and seed."""


def known() -> Known:
    rows = json.loads(KNOWN.read_text(encoding="utf-8")) if KNOWN.exists() else []
    return {
        (row["lengths"], row["cap"], row["samples"], row["seed"]): (
            row["end"],
            row["num_microbatches"],
        )
        for row in rows
    }


def write(ends: Known) -> None:
    names = ("lengths", "cap", "samples", "seed", "end", "num_microbatches")
    rows = [
        json.dumps(dict(zip(names, (*case, *end), strict=True)), ensure_ascii=False)
        for case, end in ends.items()
    ]
    KNOWN.write_text("[\n" + ",\n".join(rows) + "\n]\n", encoding="utf-8")


class Annealer:
    """anneal_shared.c, compiled."""

    def __init__(self, folder: Path) -> None:
        built = folder / "anneal_shared.so"
        flags = ["-O3", "-march=native", "-shared", "-fPIC"]
        source = str(HERE / "anneal_shared.c")
        subprocess.run(["cc", *flags, source, "-o", str(built), "-lm"], check=True)
        self._anneal = ctypes.CDLL(str(built)).anneal
        self._anneal.restype = ctypes.c_double

    def __call__(
        self, problem: Problem, step: Candidate, moves: int, hot: float, seed: int
    ) -> Candidate:
        """The best step found, with as many micro-batches, simulated."""
        count, number = len(step.ranks[0]), problem.num_samples
        places, sizes = (ctypes.c_int * number)(), (ctypes.c_int * (RANKS * count))()
        assert step.sizes is not None
        for rank, (slots, own) in enumerate(zip(step.ranks, step.sizes, strict=True)):
            for slot, (samples, size) in enumerate(zip(slots, own, strict=True)):
                sizes[rank * count + slot] = size
                for sample in samples:
                    places[sample] = rank // size * size * count + slot
        model = problem.cost_model
        self._anneal(
            number,
            (ctypes.c_double * number)(*problem.on_ranks[1].costs),
            (ctypes.c_long * number)(*(max(length, 1) for length in problem.lengths)),
            ctypes.c_long(problem.config.max_tokens_per_gpu),
            problem.dims.pipeline_parallel,
            count,
            ctypes.c_double(model.backward_ratio),
            ctypes.c_double(model.per_micro_batch),
            ctypes.c_double(model.context_parallel_overhead),
            ctypes.c_double(model.context_parallel_fixed),
            places,
            sizes,
            ctypes.c_long(moves),
            ctypes.c_double(hot),
            ctypes.c_double(2e-5),
            ctypes.c_uint64(seed),
        )
        ranks: list[list[list[int]]] = [[[] for _ in range(count)] for _ in range(RANKS)]
        own_sizes = [list(sizes[rank * count : (rank + 1) * count]) for rank in range(RANKS)]
        for sample, place in enumerate(places):
            first, slot = divmod(place, count)
            for rank in range(first, first + own_sizes[first][slot]):
                ranks[rank][slot].append(sample)
        return SharedObjective(problem).candidate(ranks, own_sizes)


def search_long(problem: Problem, step: StepPlan, anneal: Annealer, moves: int) -> Candidate:
    """Micro-batches are added in the rise of the profile, empty."""
    assert step.context_parallel is not None
    start = Candidate(
        [[list(samples) for samples in rank] for rank in step.micro_batches],
        [],
        [list(sizes) for sizes in step.context_parallel],
    )
    found: list[Candidate] = []
    for number in range(FURTHER):
        if number % 2 == 0 or step.num_microbatches < 2 * FURTHER:
            found.append(anneal(problem, start, moves // 4, 4e-3, 1))
        at = len(start.ranks[0]) // 4
        ranks = [[*rank[:at], [], *rank[at:]] for rank in start.ranks]
        start = Candidate(ranks, [], [[*own[:at], 1, *own[at:]] for own in start.sizes or []])
    for best in sorted(found, key=lambda step: step.end)[:3]:
        found += [anneal(problem, best, moves, hot, seed) for hot, seed in ((6e-3, 2), (4e-3, 3))]
    return min(found, key=lambda step: step.end)


def main() -> int:
    """Print the table, or search for sooner ends."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, default=REPOSITORY.parent / "shared" / "data")
    parser.add_argument("--anneal", type=int, metavar="MOVES", help="search for sooner ends")
    options = parser.parse_args()
    by_name = {source.name: source for source in sources(options.data)}
    ends, rows = known(), []
    for (name, cap, samples), target in TARGETS.items():
        if name not in by_name:
            continue
        ours, best, bounds, counts = [], [], [], []
        for seed in SEEDS:
            lengths, config = drawn(by_name[name].pool, samples, cap, PP4, seed)
            problem, case = Problem.of(lengths, PP4, config, MODEL), (name, cap, samples, seed)
            step = plan_step(lengths, PP4, config, MODEL)
            end = predicted_step_time(step, lengths)
            if options.anneal:
                with tempfile.TemporaryDirectory() as folder:
                    found = search_long(problem, step, Annealer(Path(folder)), options.anneal)
                if case not in ends or found.end < ends[case][0]:
                    ends[case] = found.end, len(found.ranks[0])
                    write(ends)
            pure = pure_work(lengths, PP4)
            ours.append(end / ends[case][0])
            best.append(ends[case][0] / pure)
            bounds.append(step_time_bound(problem) / pure)
            counts.append(f"{step.num_microbatches}/{ends[case][1]}")
        figures = (mean(ours), max(ours), target, mean(best), mean(bounds))
        case_name = f"{name}, {cap or 'uncut'}, {samples}"
        rows.append((case_name, *(f"{figure:.3f}" for figure in figures), " ".join(counts)))
    columns = ("lengths, cap, samples", "ours/best known", "worst draw", "target/pure work")
    columns += ("best known/pure work", "bound/pure work", "micro-batches ours/best")
    print(Table(columns=columns, rows=tuple(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
