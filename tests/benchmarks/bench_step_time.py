"""Predicted time of a step: this planner, with little effort, and others' rules at both caps.

    python tests/benchmarks/bench_step_time.py [--data ../shared/data] [--draws 3] [--json OUT]
    python tests/benchmarks/bench_step_time.py --layouts [--samples 512]
    python tests/benchmarks/bench_step_time.py --random 1000 [--first 0]

The first plans 512 samples on DP8×PP4 by everyone that `mcore-batching compare` knows: each rule at
the given cap, and at the best cap for it up to that one, both over ours. Lengths are draws without
replacement from five real traces (files in the folder --data; left out where they are not there).
Two are of serving; the turns of an agent and two of grade-school maths are counted as characters
over 4. The second adds log-normal lengths of median 2048 and other layouts, and shows the best rule
alone; "uncut" says that the cap is just above the draws' longest sample. Costs are the default
model's: a sample L + L²/24576, a micro-batch 256 more, backward twice that; layouts with EP run in
lockstep. Means are over draws; times of planning are processor time of one Python thread.

With --random that many random problems are planned instead, of 1 to 600 samples of twelve kinds of
lengths, DP 1 to 32, PP 1 to 16 and VPP 1 to 4. Those in which a rule ends more than 0.2 % sooner at
the given cap are printed, and make the exit status 1.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from other_rules import ALL_RULES

from mcore_batching.planning import CostModel, ParallelDims, PlannerConfig, StepPlan, plan_step
from mcore_batching.planning.plans.statistics import predicted_step_time
from mcore_batching.tools.compare import Outcome, compare
from mcore_batching.tools.lengths_file import read_lengths
from mcore_batching.tools.report import Table
from mcore_batching.tools.rules import RuleFailureError, rule_plan

MODEL = CostModel()
LITTLE_EFFORT = 250
"""About 50 ms for 512 samples on 8 ranks of 4 stages."""
ALLOWED_AHEAD = 0.002
"""Share by which a rule may end a random problem sooner."""
SOLVERS = ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification")
"""Models whose solutions the rollouts of gsm8k are."""
Step = tuple[list[int], int]
"""Lengths, and their cap."""
REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Lengths:
    """Where lengths come from, and the cap; None: just above the longest of a draw."""

    name: str
    pool: list[int]
    cap: int | None

    def draw(self, count: int, seed: int) -> Step:
        """`count` lengths, and their cap."""
        lengths = random.Random(seed).sample(self.pool, count)
        cap = self.cap or max(lengths) + 64
        return [min(length, cap) for length in lengths], cap


def layout_name(dims: ParallelDims) -> str:
    name = f"DP{dims.data_parallel} PP{dims.pipeline_parallel}"
    if dims.virtual_pipeline > 1:
        name += f" VPP{dims.virtual_pipeline}"
    return name + (" EP" if dims.expert_parallel > 1 else "")


PP1 = ParallelDims(data_parallel=8)
PP4 = ParallelDims(data_parallel=8, pipeline_parallel=4)
PP8 = ParallelDims(data_parallel=4, pipeline_parallel=8)
VPP2 = replace(PP4, virtual_pipeline=2)
EXPERTS = replace(PP4, expert_parallel=8)
MANY = ParallelDims(data_parallel=64, pipeline_parallel=8)
LAYOUTS = {128: [PP1, PP4, PP8], 512: [PP1, PP4, PP8, VPP2, EXPERTS], 4096: [MANY]}


def log_normal(median: float, sigma: float, count: int) -> list[int]:
    generator = random.Random(5)
    return [int(median * generator.lognormvariate(0, sigma)) + 1 for _ in range(count)]


def traces(data: Path) -> Iterator[Lengths]:
    """The real ones, of those whose files are there, under the cap that a job would have."""

    def read(name: str) -> list[Any]:
        return [json.loads(line) for line in (data / name).read_text("utf-8").splitlines()]

    def serving(name: str) -> list[int]:
        return list(read_lengths(str(data / name)))

    def turns(name: str) -> list[int]:
        return [sum(turn) for trajectory in read(name) for turn in trajectory]

    def questions(name: str) -> list[int]:
        rows = read(name)
        answers = [
            [row["answer"]] if "answer" in row else [row[model]["solution"] for model in SOLVERS]
            for row in rows
        ]
        both = zip(rows, answers, strict=True)
        return [(len(row["question"]) + len(each)) // 4 for row, own in both for each in own]

    for name, file, pool_of, cap in (
        ("azure_conv", "azure_conv_lengths.txt", serving, 16384),
        ("mooncake_conv", "mooncake_conv_lengths.txt", serving, 131072),
        ("agent's turns", "tau_airline_turns.jsonl", turns, 16384),
        ("gsm8k answers", "gsm8k_test.jsonl", questions, 4096),
        ("gsm8k rollouts", "gsm8k_example_model_solutions.jsonl", questions, 4096),
    ):
        if (data / file).exists():
            yield Lengths(name, pool_of(file), cap)
        else:
            print(f"{name}: left out, there is no {data / file}; set --data to its folder")


def sources(data: Path) -> Iterator[Lengths]:
    """The traces and made-up lengths."""
    yield from traces(data)
    yield Lengths("σ 0.8", log_normal(2048, 0.8, 20_000), 16384)
    yield Lengths("σ 1.1 uncut", log_normal(2048, 1.1, 20_000), None)
    yield Lengths("σ 1.3 uncut", log_normal(2048, 1.3, 20_000), None)
    wide = [min(length, 16384) for length in log_normal(2048, 1.3, 20_000)]
    yield Lengths("σ 1.3", wide, 16384 + 64)


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def timed_plan(
    lengths: Sequence[int], dims: ParallelDims, config: PlannerConfig, model: CostModel = MODEL
) -> tuple[StepPlan, float]:
    started = time.process_time()
    step = plan_step(lengths, dims, config, model)
    return step, time.process_time() - started


def measure(source: Lengths, samples: int, dims: ParallelDims, draws: int) -> list[Outcome]:
    """Draws planned by everyone, ours first; those of no cap under that of the longest sample."""
    drawn = [source.draw(samples, seed) for seed in range(draws)]
    cap = max(cap for _, cap in drawn)
    steps = [lengths for lengths, _ in drawn]
    return compare(steps, dims, PlannerConfig(max_tokens_per_gpu=cap), MODEL, ALL_RULES)


def over_ours(time: float | None, cap: int | None = None) -> str:
    """As the tables have it, with the cap in brackets."""
    return "-" if time is None else f"{time:.2f}" + (f" ({cap})" if cap else "")


def traces_table(by_trace: dict[str, list[Outcome]]) -> Table:
    """A row for each planner, at the given cap and at its own best, over ours."""
    rows = []
    for outcomes in zip(*by_trace.values(), strict=True):
        cells = [
            f"{over_ours(o.time_over_ours)}; {over_ours(o.time_over_ours_at_best_cap, o.best_cap)}"
            for o in outcomes
        ]
        rows.append((outcomes[0].name, *cells))
    return Table(columns=("given cap; own best (which)", *by_trace), rows=tuple(rows))


def layout_row(source: Lengths, samples: int, dims: ParallelDims, draws: int) -> tuple[str, ...]:
    """Ours, ours with little effort, and of all rules the best at each cap."""
    ours, *others = measure(source, samples, dims, draws)
    little, seconds = [], []
    for seed in range(draws):
        lengths, cap = source.draw(samples, seed)
        config = PlannerConfig(max_tokens_per_gpu=cap)
        plan, _ = timed_plan(lengths, dims, config)
        quick, took = timed_plan(lengths, dims, replace(config, plan_effort=LITTLE_EFFORT))
        little.append(predicted_step_time(quick, lengths) / predicted_step_time(plan, lengths))
        seconds.append(took)
    peers = [o for o in others if o.kind == "peer" and o.planned == o.steps]
    best = min(peers, key=lambda o: o.time_over_ours or 0.0, default=None)
    tuned = min(peers, key=lambda o: o.time_over_ours_at_best_cap or 0.0, default=None)
    return (
        source.name,
        str(samples),
        layout_name(dims),
        f"{ours.time_over_floor or 0.0:.3f}",
        f"{1000 * (ours.planning_seconds or 0.0):.0f} ms",
        f"{mean(little):.3f}",
        f"{1000 * mean(seconds):.0f} ms",
        f"{over_ours(best.time_over_ours)} {best.name}" if best else "-",
        f"{over_ours(tuned.time_over_ours_at_best_cap, tuned.best_cap)} {tuned.name}"
        if tuned
        else "-",
    )


LAYOUT_COLUMNS = (
    *("lengths", "samples", "layout", "time/floor", "planning", "little effort/ours", "planning"),
    *("best rule/ours", "best rule at its own cap/ours"),
)


def random_problem(seed: int, traces: Sequence[Lengths]) -> tuple[str, Step, ParallelDims]:
    """The kind of lengths, the lengths with their cap, and a layout."""
    generator = random.Random(seed)
    count = int(600 ** generator.random())
    stages = generator.choice((1, 2, 4, 8, 16))
    dims = ParallelDims(
        data_parallel=generator.choice((1, 2, 3, 4, 8, 16, 32)),
        pipeline_parallel=stages,
        virtual_pipeline=generator.choice((1, 1, 2, 3, 4)) if stages > 1 else 1,
    )
    of_kind: dict[str, Callable[[], float]] = {
        "equal": lambda: 2048,
        "uniform": lambda: generator.uniform(1, 16_000),
        "two sizes": lambda: generator.choice((500, 500, 500, 12_000)),
        "Pareto": lambda: 400 * generator.paretovariate(1.1),
    }
    for sigma in (0.4, 0.8, 1.3):
        of_kind[f"σ {sigma}"] = functools.partial(_scaled, generator, sigma)
    for trace in traces:
        of_kind[trace.name] = functools.partial(generator.choice, trace.pool)
    kind = generator.choice(sorted(of_kind))
    lengths = [max(1, int(of_kind[kind]())) for _ in range(count)]
    cap = generator.choice((8192, 16_384, 65_536, max(lengths) + 64))
    return kind, ([min(length, cap) for length in lengths], cap), dims


def _scaled(generator: random.Random, sigma: float) -> float:
    return 2048 * generator.lognormvariate(0, sigma)


def random_problems(seeds: Sequence[int], pools: Sequence[Lengths]) -> int:
    """Print the problems that a rule wins, and how many there are; 1 if any."""
    lost, worst = 0, 0.0
    for seed in seeds:
        kind, (lengths, cap), dims = random_problem(seed, pools)
        config = PlannerConfig(max_tokens_per_gpu=cap)
        plan, _ = timed_plan(lengths, dims, config)
        end = predicted_step_time(plan, lengths)
        for name, rule in ALL_RULES.items():
            try:
                theirs = predicted_step_time(rule_plan(rule, lengths, dims, config), lengths)
            except RuleFailureError:
                continue
            sooner = 1.0 - theirs / end
            worst = max(worst, sooner)
            if sooner > ALLOWED_AHEAD:
                lost += 1
                print(
                    f"seed {seed}: {len(lengths)} samples, {kind}, cap {cap}, {layout_name(dims)}: "
                    f"{name} ends {sooner:.2%} sooner",
                    flush=True,
                )
    print(
        f"{len(seeds)} random problems: a rule ends more than {ALLOWED_AHEAD:.1%} sooner {lost} "
        f"times, {worst:.2%} at most"
    )
    return int(lost > 0)


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--data",
        type=Path,
        default=REPOSITORY.parent / "shared" / "data",
        help="folder with the files of the traces",
    )
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write the outcomes here")
    parser.add_argument("--layouts", action="store_true", help="all lengths and layouts instead")
    parser.add_argument(
        "--samples", type=int, nargs="+", choices=sorted(LAYOUTS), default=sorted(LAYOUTS)
    )
    parser.add_argument("--random", type=int, metavar="PROBLEMS", help="random problems instead")
    parser.add_argument("--first", type=int, default=0, help="seed of the first random problem")
    options = parser.parse_args()
    if options.random:
        seeds = range(options.first, options.first + options.random)
        return random_problems(seeds, list(traces(options.data)))
    if options.layouts:
        rows = tuple(
            layout_row(source, samples, dims, options.draws)
            for samples in options.samples
            for dims in LAYOUTS[samples]
            for source in sources(options.data)
        )
        print(Table(columns=LAYOUT_COLUMNS, rows=rows))
        return 0
    found = {
        f"{source.name}, cap {source.cap}": measure(source, 512, PP4, options.draws)
        for source in traces(options.data)
    }
    print(traces_table(found))
    for name, outcomes in found.items():
        ours = outcomes[0]
        print(
            f"{name}: ours at {ours.time_over_floor or 0.0:.3f} x the floor, planned in "
            f"{1000 * (ours.planning_seconds or 0.0):.0f} ms"
        )
    if options.json:
        records = {name: list(map(asdict, outcomes)) for name, outcomes in found.items()}
        options.json.write_text(json.dumps(records, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
