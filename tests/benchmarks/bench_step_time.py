"""Predicted end of a step under other frameworks' rules, over that under this planner's plan.

    python tests/benchmarks/bench_step_time.py [--ranks 8] [--stages 4] [--chunks 1]
        [--samples 512] [--draws 3] [--slime DIR] [--nemo-rl DIR] [--skyrl DIR]

Each rule is shown at the given cap, and at the cap in brackets: the best for it of caps each a
tenth below the last. Costs are the default model's: a sample L + L²/24576, a micro-batch 256 more,
backward twice forward. Steps are drawn without replacement; means are over draws. "Ours on verl's
ranks" is what hooked verl plans: its ranks keep the samples that it deals to them. slime's rule,
NeMo-RL's and SkyRL's packer are read from DIR, a checkout each.
"""

from __future__ import annotations

from pathlib import Path

from benchmark_cases import MODEL, parser_of, traces
from framework_rules import STATED_RULES, nemo_rl, ours_on_verls_ranks, skyrl, slime

from mcore_batching.planning import ParallelDims, PlannerConfig
from mcore_batching.tools.compare import Outcome, compare
from mcore_batching.tools.report import Table


def cell(outcome: Outcome) -> str:
    """Time over ours at the given cap; at the rule's own best cap."""
    given, own = outcome.time_over_ours, outcome.time_over_ours_at_best_cap
    if given is None or own is None:
        return "-"
    return f"{given:.2f}; {own:.2f} ({outcome.best_cap})"


def main() -> None:
    """Print a row for each planner, then ours over the floor and its time of planning."""
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--chunks", type=int, default=1, help="of a stage: virtual pipeline")
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--draws", type=int, default=3)
    for name in ("slime", "NeMo-RL", "SkyRL"):
        parser.add_argument(
            f"--{name.lower()}", type=Path, metavar="DIR", help=f"a checkout of {name}"
        )
    options = parser.parse_args()
    rules = STATED_RULES | {"ours on verl's ranks": ours_on_verls_ranks}
    if options.slime:
        rules["slime"] = slime(options.slime)
    if options.nemo_rl:
        rules["NeMo-RL"] = nemo_rl(options.nemo_rl)
    if options.skyrl:
        rules["SkyRL"] = skyrl(options.skyrl)
    dims = ParallelDims(
        data_parallel=options.ranks,
        pipeline_parallel=options.stages,
        virtual_pipeline=options.chunks,
    )
    by_trace = {}
    for name, source in traces(options.data).items():
        if options.only in name and source.cap is not None:
            steps = [source.draw(options.samples, seed)[0] for seed in range(options.draws)]
            config = PlannerConfig(max_tokens_per_gpu=source.cap)
            by_trace[f"{name}, {source.cap}"] = compare(steps, dims, config, MODEL, rules)
    rows = [
        (outcomes[0].name, *map(cell, outcomes))
        for outcomes in zip(*by_trace.values(), strict=True)
        if outcomes[0].is_rule
    ]
    print(Table(columns=("given cap; own best (which)", *by_trace), rows=tuple(rows)))
    for name, (ours, *_) in by_trace.items():
        over, seconds = ours.time_over_floor or 0.0, ours.planning_seconds or 0.0
        print(f"{name}: ours at {over:.3f} x the floor, planned in {1000 * seconds:.0f} ms")


if __name__ == "__main__":
    main()
