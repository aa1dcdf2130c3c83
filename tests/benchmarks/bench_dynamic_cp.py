"""Predicted end of a step over its pure work: dynamic CP, one size for all, and Megatron's rule.

    python tests/benchmarks/bench_dynamic_cp.py [--data ../shared/data] [--draws 3] [--only TEXT]
        [--megatron DIR]

Pure work is three times the cost of all samples over the ranks: no communication, no starts of
micro-batches, no bubble. Costs are the default model's, with 10 % of communication and 64 tokens
for each doubling of a row's context-parallel size. "One size" is the best of 1, 2, 4 and 8 for all
samples, planned by this package on the same GPUs. Megatron's rule is `default_dynamic_cp` of its
dev branch, read from DIR, a checkout. Means are over draws.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmark_cases import (
    MODEL,
    PP1,
    PP4,
    VPP2,
    Lengths,
    layout_name,
    made_up,
    mean,
    parser_of,
    timed_plan,
    traces,
)
from framework_rules import megatron_dynamic_plan
from step_bound import step_time_bound

from mcore_batching.planning import ParallelDims, PlannerConfig, PlanningError, Problem, StepPlan
from mcore_batching.planning.costs.cost import ordered_sum
from mcore_batching.planning.plans.statistics import predicted_step_time
from mcore_batching.tools.compare import planners
from mcore_batching.tools.report import Table
from mcore_batching.tools.rules import RuleFailureError

CASES: tuple[tuple[str, int | None, int], ...] = (
    ("azure_conv", 16384, 512),
    ("azure_conv", 16384, 128),
    ("mooncake_conv", 131072, 512),
    ("mooncake_conv", 131072, 128),
    ("mooncake_conv", 16384, 512),
    ("σ 1.3 uncut", None, 512),
)
"""Lengths, cap a GPU, and samples."""


def one_size_plans(
    lengths: Sequence[int], dims: ParallelDims, config: PlannerConfig
) -> dict[int, StepPlan]:
    """The plan of each context-parallel size under which every sample fits."""
    plans = {}
    for planner in planners(dims, config, MODEL, {}):
        if planner.name.startswith("CP "):
            with contextlib.suppress(PlanningError):
                plans[planner.dims.context_parallel] = planner.plan(lengths, config)
    return plans


def row(
    case: tuple[Lengths, int | None, int, ParallelDims], draws: int, megatron: Path | None
) -> list[str]:
    """The cells of one case; "-" where a draw has no plan, or Megatron has no checkout."""
    source, cap, samples, dims = case
    times: dict[str, list[float]] = {name: [] for name in COLUMNS[1:-2]}
    sizes, milliseconds = set(), []
    for seed in range(draws):
        # Not cut at the cap, as longer samples take several ranks.
        lengths, longest = replace(source, cap=cap).draw(samples, seed, cut=False)
        ranks = dims.data_context_parallel
        config = PlannerConfig(max_tokens_per_gpu=longest, max_context_parallel=ranks)
        pure = 3 * ordered_sum(map(MODEL.sample, lengths)) / dims.data_context_parallel
        step, took = timed_plan(lengths, dims, config)
        milliseconds.append(took)
        of_size = {
            size: predicted_step_time(plan, lengths) / pure
            for size, plan in one_size_plans(lengths, dims, config).items()
        }
        best = min(of_size, key=of_size.__getitem__)
        sizes.add(best)
        times["dynamic CP"].append(predicted_step_time(step, lengths) / pure)
        times["bound"].append(step_time_bound(Problem.of(lengths, dims, config, MODEL)) / pure)
        times["one size"].append(of_size[best])
        times["size 1"] += [of_size[1]] if 1 in of_size else []
        try:
            if megatron is not None:
                rule = megatron_dynamic_plan(megatron, lengths, dims, config, MODEL)
                times["Megatron's rule"].append(predicted_step_time(rule, lengths) / pure)
        except (AssertionError, RuleFailureError) as error:
            print(f"{source.name}, {layout_name(dims)}: {error}")
    figures = [f"{mean(each):.3f}" if len(each) == draws else "-" for each in times.values()]
    name = f"{source.name}, {cap or 'uncut'}, {samples}, {layout_name(dims)}"
    return [name, *figures, ", ".join(map(str, sorted(sizes))), f"{mean(milliseconds):.0f} ms"]


COLUMNS = (
    *("lengths, cap, samples, layout", "dynamic CP", "bound", "one size", "size 1"),
    *("Megatron's rule", "best sizes", "planning"),
)


def main() -> None:
    """Print the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--megatron", type=Path, metavar="DIR", help="a checkout of its dev branch")
    options = parser.parse_args()
    sources = traces(options.data) | made_up()
    cases = [(*each, PP4) for each in CASES]
    cases += [(*CASES[i], dims) for dims in (PP1, VPP2) for i in (0, 2)]
    rows = [
        tuple(row((sources[name], cap, samples, dims), options.draws, options.megatron))
        for name, cap, samples, dims in cases
        if name in sources and options.only in name
    ]
    print(Table(columns=COLUMNS, rows=tuple(rows)))


if __name__ == "__main__":
    main()
