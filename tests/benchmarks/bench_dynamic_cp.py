"""Predicted end of a step over its pure work: dynamic CP, one size for all, and Megatron's rule.

    python tests/benchmarks/bench_dynamic_cp.py [--data ../shared/data] [--only TEXT]
        [--megatron DIR]

Pure work is three times the cost of all samples over the ranks: no communication, no starts of
micro-batches, no bubble. Costs are the default model's, with 10 % of communication and 64 tokens
for each doubling of a row's context-parallel size. "One size" is the best of 1, 2, 4 and 8 for all
samples, planned by this package on the same GPUs. Megatron's rule is `default_dynamic_cp` of its
dev branch, read from DIR, a checkout. Means are over three draws.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

from benchmark_cases import MODEL, PP1, VPP2, layout_name, mean, parser_of, timed_plan
from best_known import DYNAMIC, SEEDS, Case, cases
from framework_rules import megatron_dynamic_plan

from mcore_batching.planning import PlanningError, Problem, StepPlan
from mcore_batching.planning.costs.cost import ordered_sum
from mcore_batching.planning.plans.statistics import predicted_step_time
from mcore_batching.tools.compare import planners
from mcore_batching.tools.report import Table
from mcore_batching.tools.rules import RuleFailureError


def one_size_plans(problem: Problem) -> dict[int, StepPlan]:
    """The plan of each context-parallel size under which every sample fits."""
    plans = {}
    for planner in planners(problem.dims, problem.config, MODEL, {}):
        if planner.name.startswith("CP "):
            with contextlib.suppress(PlanningError):
                plan = planner.plan(problem.lengths, problem.config)
                plans[planner.dims.context_parallel] = plan
    return plans


def row(case: Case, megatron: Path | None) -> tuple[str, ...]:
    """The cells of one case; "-" where a draw has no plan, or Megatron has no checkout."""
    times: dict[str, list[float]] = {name: [] for name in COLUMNS[1:-2]}
    sizes, milliseconds, dims = set(), [], case.dims
    for problem in map(case.problem, SEEDS):
        lengths, config = problem.lengths, problem.config
        pure = 3 * ordered_sum(map(MODEL.sample, lengths)) / dims.data_context_parallel
        step, took = timed_plan(lengths, dims, config)
        milliseconds.append(took)
        of_size = {
            size: predicted_step_time(plan, lengths) / pure
            for size, plan in one_size_plans(problem).items()
        }
        best = min(of_size, key=of_size.__getitem__)
        sizes.add(best)
        times["dynamic CP"].append(predicted_step_time(step, lengths) / pure)
        times["one size"].append(of_size[best])
        times["size 1"] += [of_size[1]] if 1 in of_size else []
        try:
            if megatron is not None:
                rule = megatron_dynamic_plan(megatron, lengths, dims, config, MODEL)
                times["Megatron's rule"].append(predicted_step_time(rule, lengths) / pure)
        except (AssertionError, RuleFailureError) as error:
            print(f"{case.name}, {layout_name(dims)}: {error}")
    figures = [f"{mean(each):.3f}" if len(each) == len(SEEDS) else "-" for each in times.values()]
    name = f"{case.name.removesuffix(DYNAMIC)}, {case.samples}, {layout_name(dims)}"
    return (name, *figures, ", ".join(map(str, sorted(sizes))), f"{mean(milliseconds):.0f} ms")


COLUMNS = (
    *("lengths, cap, samples, layout", "dynamic CP", "one size", "size 1"),
    *("Megatron's rule", "best sizes", "planning"),
)


def main() -> None:
    """Print the table: the dynamic rows of `best_known`, and two of them on other layouts."""
    parser = parser_of(__doc__)
    parser.add_argument("--megatron", type=Path, metavar="DIR", help="a checkout of its dev branch")
    options = parser.parse_args()
    found = [case for case in cases(options.data) if DYNAMIC in case.name]
    traces = [case for case in found if case.samples == 512 and "conv" in case.name][:2]
    found += [replace(case, dims=dims) for dims in (PP1, VPP2) for case in traces]
    rows = [row(case, options.megatron) for case in found if options.only in case.name]
    print(Table(columns=COLUMNS, rows=tuple(rows)))


if __name__ == "__main__":
    main()
