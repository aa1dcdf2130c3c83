"""Predicted time of a step over its pure work: dynamic CP, one size for all, and Megatron's rule.

    python tests/benchmarks/bench_dynamic_cp.py [--data ../shared/data] [--draws 5] [--json OUT]

Pure work is three times the cost of all samples over the ranks: no communication, no starts of
micro-batches, no bubble. Costs are the default model's, with 10 % of communication and 64 tokens
for each doubling of a row's context-parallel size. "one size" is the best of 1, 2, 4 and 8 for all
samples, each planned by the search without dynamic CP on the same GPUs, of those under which every
sample fits; "dynamic off" is size 1. The bound is `step_bound.py`'s, before which no plan ends.
Megatron's rule is `default_dynamic_cp` of its dev branch (`tools.dynamic_cp_rule`); a test
compares it with the original. Lengths are drawn as in bench_step_time.py; means are over draws,
seconds are processor time of one Python thread.

The exit status is 1 if a target is missed that is not about seconds.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from bench_step_time import (
    MODEL,
    PP1,
    PP4,
    REPOSITORY,
    VPP2,
    Lengths,
    layout_name,
    mean,
    sources,
)
from dynamic_cp_rule import megatron_dynamic_plan
from step_bound import step_time_bound

from mcore_batching.planning import ParallelDims, PlannerConfig, Problem, StepPlan, plan_step
from mcore_batching.planning.costs.cost import ordered_sum
from mcore_batching.planning.dynamic_cp import of_one_size
from mcore_batching.planning.plans.statistics import predicted_step_time
from mcore_batching.tools.report import Table
from mcore_batching.tools.rules import RuleFailureError


@dataclass(frozen=True)
class Check:
    """A figure against its target."""

    what: str
    target: float
    measured: float
    at_least: bool = False
    out_of_reach: bool = False
    """Whether no plan can meet it."""

    @property
    def verdict(self) -> str:
        """As the table has it."""
        if self.measured >= self.target if self.at_least else self.measured <= self.target:
            return "met"
        return "out of reach" if self.out_of_reach else "MISSED"

    @property
    def fails(self) -> bool:
        """Whether it is missed on any machine."""
        return self.verdict == "MISSED" and not self.what.startswith("seconds")


@dataclass(frozen=True)
class Result:
    """Means over draws, as multiples of the pure work."""

    lengths: str
    samples: int
    cap: int | None
    dims: str
    dynamic: float
    one_size: float
    best_size: str
    """Sizes that were best, of any draw."""
    off: float | None
    """None where a sample is over the cap of one rank."""
    megatron: float | None
    """None where the rule raises."""
    bound: float
    num_microbatches: float
    seconds: float


def fixed_plans(
    lengths: Sequence[int], dims: ParallelDims, config: PlannerConfig
) -> Iterator[tuple[int, StepPlan]]:
    """Context-parallel size and plan for each size under which every sample fits."""
    problem = Problem.of(lengths, dims, config, MODEL)
    for size, rows in problem.on_ranks.items():
        if not rows.oversize:
            step = plan_step(lengths, rows.dims, rows.config, rows.cost_model)
            yield size, of_one_size(step, dims, config, MODEL)


def drawn(
    pool: Sequence[int], samples: int, cap: int | None, dims: ParallelDims, seed: int
) -> tuple[list[int], PlannerConfig]:
    """Lengths of a step, and how it is planned."""
    # Not cut at the cap: longer samples take several ranks.
    lengths = random.Random(seed).sample(pool, samples)
    return lengths, PlannerConfig(
        max_tokens_per_gpu=cap or max(lengths) + 64,
        max_context_parallel=dims.data_context_parallel,
    )


def pure_work(lengths: Sequence[int], dims: ParallelDims) -> float:
    """Forward and backward passes of a mean rank's samples, with nothing beside."""
    ranks = dims.data_context_parallel
    return 3 * ordered_sum(MODEL.sample(length) for length in lengths) / ranks


def measure(source: Lengths, samples: int, dims: ParallelDims, draws: int) -> Result:
    """Plan `draws` steps in every way."""
    rows: list[tuple[float, ...]] = []
    off: list[float] = []
    megatron: list[float] = []
    best: set[int] = set()
    for seed in range(draws):
        lengths, config = drawn(source.pool, samples, source.cap, dims, seed)
        pure = pure_work(lengths, dims)
        started = time.process_time()
        step = plan_step(lengths, dims, config, MODEL)
        seconds = time.process_time() - started
        fixed = {
            size: predicted_step_time(plan, lengths) / pure
            for size, plan in fixed_plans(lengths, dims, config)
        }
        fastest = min(fixed, key=fixed.__getitem__)
        best.add(fastest)
        off += [fixed[1]] if 1 in fixed else []
        try:
            rule = megatron_dynamic_plan(lengths, dims, config, MODEL)
            megatron.append(predicted_step_time(rule, lengths) / pure)
        except RuleFailureError as error:
            print(f"{source.name}, {layout_name(dims)}: {error}")
        bound = step_time_bound(Problem.of(lengths, dims, config, MODEL)) / pure
        rows.append(
            (
                predicted_step_time(step, lengths) / pure,
                fixed[fastest],
                bound,
                step.num_microbatches,
                seconds,
            )
        )
    means = [mean(column) for column in zip(*rows, strict=True)]
    return Result(
        lengths=source.name,
        samples=samples,
        cap=source.cap,
        dims=layout_name(dims),
        dynamic=means[0],
        one_size=means[1],
        best_size=", ".join(map(str, sorted(best))),
        off=mean(off) if len(off) == draws else None,
        megatron=mean(megatron) if len(megatron) == draws else None,
        bound=means[2],
        num_microbatches=means[3],
        seconds=means[4],
    )


def results_table(results: Sequence[Result]) -> Table:
    def ratio(value: float | None) -> str:
        return "-" if value is None else f"{value:.3f}"

    return Table(
        columns=(
            "lengths",
            "samples",
            "cap",
            "layout",
            "dynamic CP",
            "bound",
            "one size",
            "which",
            "dynamic off",
            "Megatron's rule",
            "micro-batches",
            "planning",
        ),
        rows=tuple(
            (
                r.lengths,
                str(r.samples),
                "uncut" if r.cap is None else str(r.cap),
                r.dims,
                ratio(r.dynamic),
                ratio(r.bound),
                ratio(r.one_size),
                r.best_size,
                ratio(r.off),
                ratio(r.megatron),
                f"{r.num_microbatches:.1f}",
                f"{1000 * r.seconds:.0f} ms",
            )
            for r in results
        ),
    )


TARGETS = {
    ("azure_conv", 16384, 512): 1.18,
    ("azure_conv", 16384, 128): 1.40,
    ("mooncake_conv", 131072, 512): 1.22,
    ("mooncake_conv", 131072, 128): 1.42,
    ("mooncake_conv", 16384, 512): 1.35,
    ("σ 1.3 uncut", None, 512): 1.25,
}


def checks(results: Sequence[Result]) -> Iterator[Check]:
    """Every figure that has a target."""
    for r in results:
        what = f"{r.lengths}, cap {r.cap or 'uncut'}, {r.samples} samples, {r.dims}"
        target = TARGETS.get((r.lengths, r.cap, r.samples))
        if r.dims == layout_name(PP4) and target is not None:
            yield Check(f"time/pure work, {what}", target, r.dynamic, out_of_reach=r.bound > target)
            yield Check(f"seconds, {what}", 1.0, r.seconds)
        yield Check(f"one size over dynamic, {what}", 1.0, r.one_size / r.dynamic, at_least=True)
        if r.lengths == "mooncake_conv" and r.dims == layout_name(PP4):
            for name, other in (("one size", r.one_size), ("Megatron's rule", r.megatron)):
                if other is not None:
                    yield Check(
                        f"{name} over dynamic, {what}",
                        1.15,
                        other / r.dynamic,
                        at_least=True,
                        out_of_reach=other / r.bound < 1.15,
                    )


def checks_table(found: Sequence[Check]) -> Table:
    return Table(
        columns=("figure", "target", "measured", ""),
        rows=tuple(
            (
                check.what,
                f"{'>=' if check.at_least else '<='} {check.target:g}",
                f"{check.measured:.4g}",
                check.verdict,
            )
            for check in found
        ),
    )


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--data",
        type=Path,
        default=REPOSITORY.parent / "shared" / "data",
        help="folder with azure_conv_lengths.txt and mooncake_conv_lengths.txt",
    )
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write the records here")
    options = parser.parse_args()
    by_name = {source.name: source for source in sources(options.data)}
    cases = [(*each, PP4) for each in TARGETS]
    cases += [
        (*each, dims)
        for dims in (PP1, VPP2)
        for each in (("azure_conv", 16384, 512), ("mooncake_conv", 131072, 512))
    ]
    results = [
        measure(replace(by_name[name], cap=cap), samples, dims, options.draws)
        for name, cap, samples, dims in cases
        if name in by_name
    ]
    found = list(checks(results))
    print(f"Python {platform.python_version()}, {platform.machine()}, {options.draws} draws")
    print(results_table(results))
    print(checks_table(found))
    if options.json:
        records = {"results": [asdict(r) for r in results], "checks": [asdict(c) for c in found]}
        options.json.write_text(json.dumps(records, indent=2) + "\n", encoding="utf-8")
    return int(any(check.fails for check in found))


if __name__ == "__main__":
    sys.exit(main())
