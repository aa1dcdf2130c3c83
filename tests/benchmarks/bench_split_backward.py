"""Predicted step with split backward passes over the same planner's step without.

    python tests/benchmarks/bench_split_backward.py [--data ../shared/data] [--draws 3]

Lengths, caps and costs are those of bench_step_time.py. "auto" plans as the option does; "split" is
the share of backward passes that it splits, "held" the most tokens that any stage holds, over the
plain plan's; "planning" is processor time over the plain plan's. Then backward passes take 10 and
20 % longer where they are split, as with tensor parallelism: with all of them split, and as "auto"
plans it. Exit status 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench_step_time import PP4, PP8, REPOSITORY, layout_name, mean, sources, timed_plan

from mcore_batching.planning import (
    ParallelDims,
    PlannerConfig,
    StepPlan,
    plan_step,
    step_statistics,
)
from mcore_batching.planning.costs.cost import CostModel
from mcore_batching.planning.plans.statistics import predicted_step_time
from mcore_batching.tools.report import Table

TARGETS = {
    ("azure_conv 128", "DP8 PP4"): 0.83,
    ("azure_conv 128", "DP4 PP8"): 0.81,
    ("azure_conv 512", "DP8 PP4"): 0.94,
    ("azure_conv 512", "DP4 PP8"): 0.92,
}
COLUMNS = ("lengths", "layout", "all", "auto", "split", "held", "planning", "10 %: all", "auto")
COLUMNS += ("20 %: all", "auto")


def measure(lengths: Sequence[int], cap: int, dims: ParallelDims) -> list[float]:
    """What a row shows, of one draw."""
    config = PlannerConfig(max_tokens_per_gpu=cap)
    plain, before = timed_plan(lengths, dims, config)
    plan, seconds = timed_plan(lengths, dims, replace(config, split_backward="auto"))
    now, then = (step_statistics(each, lengths) for each in (plain, plan))
    held = max(then.peak_inflight_tokens, then.last_stage_inflight_tokens)
    ends = [
        predicted_step_time(planned(lengths, dims, config, mode, overhead), lengths)
        for overhead in (0.0, 0.1, 0.2)
        for mode in ("all", "auto")
    ]
    all_split, auto, *exposed = (end / now.step_time for end in ends)
    of_all = [held / now.peak_inflight_tokens, seconds / before]
    return [all_split, auto, share_split(plan), *of_all, *exposed]


def planned(
    lengths: Sequence[int], dims: ParallelDims, config: PlannerConfig, mode: str, overhead: float
) -> StepPlan:
    split = replace(config, split_backward=mode)
    return plan_step(lengths, dims, split, CostModel(split_backward_overhead=overhead))


def share_split(plan: StepPlan) -> float:
    """Of all backward passes."""
    passes = [each for rank in plan.split_backward for stage in rank for each in stage.split]
    return 2 * sum(passes) / len(passes) if passes else 0.0


def main() -> int:
    """Plan and print a row a layout."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=REPOSITORY.parent / "shared" / "data")
    parser.add_argument("--draws", type=int, default=3)
    options = parser.parse_args()
    rows, missed = [], False
    traces = [each for each in sources(options.data) if each.name.endswith("_conv")]
    for source in traces:
        for samples in (128, 512):
            for stages in (PP4, PP8):
                for chunks in (1, 2):
                    dims = replace(stages, virtual_pipeline=chunks)
                    draws = [measure(*source.draw(samples, n), dims) for n in range(options.draws)]
                    found = [mean(each) for each in zip(*draws, strict=True)]
                    name = f"{source.name} {samples}", layout_name(dims)
                    missed |= found[1] > TARGETS.get(name, 1.0)
                    formats = (".3f", ".3f", ".0%", ".2f", ".1f", *[".3f"] * 4)
                    rows.append((*name, *map(format, found, formats)))
                    print(*rows[-1], file=sys.stderr, flush=True)
    print(Table(columns=COLUMNS, rows=tuple(rows)))
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
