"""Planned steps under dynamic CP over the best known ones, and these over a bound.

    python tests/benchmarks/best_known_shared.py [--data ../shared/data] [--only TEXT]
    python tests/benchmarks/best_known_shared.py --anneal 4000000

The cases are those of bench_dynamic_cp.py on DP8×PP4. The second command searches for sooner ends,
which best_known_shared.json then holds; it takes an hour of one core and a C compiler (`cc`).
Simulated annealing (anneal_shared.c) starts from the planner's step with up to eight empty slots
more: a quarter of the moves for each number, twice all of them for the three best. Its moves also
merge and split rows and exchange slots and blocks of ranks; it may leave ranks emptier than a plan
may.
"""

from __future__ import annotations

import ctypes

from annealing import KnownEnds, Slots, compiled, doubles, with_empty_slots
from bench_dynamic_cp import CASES, drawn, pure_work
from benchmark_cases import MODEL, PP4, made_up, mean, parser_of, timed_plan, traces
from step_bound import step_time_bound

from mcore_batching.planning import Problem, StepPlan
from mcore_batching.planning.plans.statistics import predicted_step_time
from mcore_batching.tools.report import Table

SEEDS = range(3)
RANKS = 8
FURTHER = 9
"""Numbers of micro-batches tried; every other one where there are many."""
Shared = tuple[float, Slots, list[list[int]]]
"""End of a step, samples [ranks][slots], and the size of each row."""


def anneal(
    problem: Problem, ranks: Slots, sizes: list[list[int]], moves: int, hot: float, seed: int
) -> Shared:
    """The best step found with as many micro-batches."""
    count, model = len(ranks[0]), problem.cost_model
    places = (ctypes.c_int * problem.num_samples)()
    flat = (ctypes.c_int * (RANKS * count))(*(size for own in sizes for size in own))
    for rank, slots in enumerate(ranks):
        for slot, samples in enumerate(slots):
            for sample in samples:
                places[sample] = rank // sizes[rank][slot] * sizes[rank][slot] * count + slot
    lengths = [max(length, 1) for length in problem.lengths]
    end = compiled("anneal_shared.c")(
        problem.num_samples,
        doubles(problem.on_ranks[1].costs),
        (ctypes.c_long * len(lengths))(*lengths),
        ctypes.c_long(problem.config.max_tokens_per_gpu),
        problem.dims.pipeline_parallel,
        count,
        ctypes.c_double(model.backward_ratio),
        ctypes.c_double(model.per_micro_batch),
        ctypes.c_double(model.context_parallel_overhead),
        ctypes.c_double(model.context_parallel_fixed),
        places,
        flat,
        ctypes.c_long(moves),
        ctypes.c_double(hot),
        ctypes.c_double(2e-5),
        ctypes.c_uint64(seed),
    )
    own_sizes = [list(flat[rank * count : (rank + 1) * count]) for rank in range(RANKS)]
    found: Slots = [[[] for _ in range(count)] for _ in range(RANKS)]
    for sample, place in enumerate(places):
        first, slot = divmod(place, count)
        for rank in range(first, first + own_sizes[first][slot]):
            found[rank][slot].append(sample)
    return end, found, own_sizes


def search_long(problem: Problem, step: StepPlan, moves: int) -> tuple[float, int]:
    """End and number of micro-batches of the best step found."""
    assert step.context_parallel is not None
    found: list[Shared] = []
    for more in range(FURTHER):
        if more % 2 == 0 or step.num_microbatches < 2 * FURTHER:
            ranks = with_empty_slots(step.micro_batches, more)
            at = step.num_microbatches // 4
            sizes = [[*own[:at], *[1] * more, *own[at:]] for own in step.context_parallel]
            found.append(anneal(problem, ranks, sizes, moves // 4, 4e-3, 1))
    for _, ranks, sizes in sorted(found)[:3]:
        for hot, seed in ((6e-3, 2), (4e-3, 3)):
            found.append(anneal(problem, ranks, sizes, moves, hot, seed))
    end, ranks, _ = min(found)
    return end, len(ranks[0])


def main() -> None:
    """Print the table; first search for sooner ends if asked to."""
    parser = parser_of(__doc__)
    parser.add_argument("--anneal", type=int, metavar="MOVES", help="search for sooner ends")
    options = parser.parse_args()
    sources, rows = traces(options.data) | made_up(), []
    ends = KnownEnds("best_known_shared.json", ("lengths", "cap", "samples", "seed"))
    for name, cap, samples in CASES:
        if name not in sources or options.only not in name:
            continue
        ours, best, bounds, counts = [], [], [], []
        for seed in SEEDS:
            lengths, config = drawn(sources[name].pool, samples, cap, PP4, seed)
            problem, case = Problem.of(lengths, PP4, config, MODEL), (name, cap, samples, seed)
            step, _ = timed_plan(lengths, PP4, config)
            if options.anneal:
                ends.note(case, *search_long(problem, step, options.anneal))
            end, count = ends[case]
            pure = pure_work(lengths, PP4)
            ours.append(predicted_step_time(step, lengths) / end)
            best.append(end / pure)
            bounds.append(end / step_time_bound(problem))
            counts.append(f"{step.num_microbatches}/{count}")
        figures = (mean(ours), max(ours), mean(best), mean(bounds))
        case_name = f"{name}, {cap or 'uncut'}, {samples}"
        rows.append((case_name, *(f"{figure:.3f}" for figure in figures), " ".join(counts)))
    columns = ("lengths, cap, samples", "ours/best known", "worst draw", "best known/pure work")
    columns += ("best known/bound", "micro-batches ours/best")
    print(Table(columns=columns, rows=tuple(rows)))


if __name__ == "__main__":
    main()
