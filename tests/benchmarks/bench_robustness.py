"""Regret: how much later a step ends for being planned by a cost model that is not the true one.

    python tests/benchmarks/bench_robustness.py [--data ../shared/data] [--draws 2] [--samples 256]

Each step is planned by the defaults with several costs of a micro-batch (256 is the present one),
and by what is learnt in three steps of the same job from passes
timed with 3 % of noise. Its end is simulated with the true model and set against that of the plan
made with the true model. All on DP8 PP4. A negative regret is chance: the search ends in another
place.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from mcore_batching.planning import CostModel, ParallelDims, PlannerConfig, StepPlan, plan_step
from mcore_batching.planning.learn import LearntCosts, TimedRow
from mcore_batching.planning.plans.statistics import predicted_step_time
from mcore_batching.tools.lengths_file import read_lengths
from mcore_batching.tools.report import Table

DIMS = ParallelDims(data_parallel=8, pipeline_parallel=4)
DEFAULT = CostModel()
OVERHEADS = (256, 512, 1024, 2048)
"""Costs of a micro-batch that could be the default."""
LEARNING_STEPS = 3
NOISE = 0.03
TRUTHS = {
    **{f"micro-batch {n}": replace(DEFAULT, per_micro_batch=float(n)) for n in (64, 256, 1024)},
    **{f"micro-batch {n}": replace(DEFAULT, per_micro_batch=float(n)) for n in (2048, 4096)},
    "no attention": replace(DEFAULT, quadratic=0.0),
    "half of attention": replace(DEFAULT, quadratic=DEFAULT.quadratic / 2),
    "twice attention": replace(DEFAULT, quadratic=DEFAULT.quadratic * 2),
    "backward 1.6": replace(DEFAULT, backward_ratio=1.6),
    "backward 3": replace(DEFAULT, backward_ratio=3.0),
}
REPOSITORY = Path(__file__).resolve().parents[2]


def sources(data: Path) -> Iterator[tuple[str, list[int], int]]:
    """Name, lengths to draw from, and cap."""
    generator = random.Random(5)
    short = [int(220 * generator.lognormvariate(0, 0.4)) + 1 for _ in range(20_000)]
    yield "short questions, cap 4096", short, 4096
    for name, caps in (("azure_conv", (4096, 16384)), ("mooncake_conv", (131072,))):
        path = data / f"{name}_lengths.txt"
        if not path.exists():
            print(f"{name}: left out, there is no {path}; set --data to its folder")
            continue
        pool = list(read_lengths(str(path)))
        for cap in caps:
            yield f"{name}, cap {cap}", [min(length, cap) for length in pool], cap
    wide = [min(16384, int(2048 * generator.lognormvariate(0, 1.3)) + 1) for _ in range(20_000)]
    yield "σ 1.3, cap 16384", wide, 16384


def learnt_model(truth: CostModel, steps: Sequence[Sequence[int]], cap: int) -> CostModel:
    """What a job knows that starts from the default and times these steps."""
    generator = random.Random(9)
    learnt = LearntCosts(shape=DEFAULT, cost_model=DEFAULT)
    for lengths in steps:
        plan = planned(tuple(lengths), cap, learnt.cost_model)
        rows = []
        for samples in (samples for rank in plan.micro_batches for samples in rank):
            held = tuple(lengths[i] for i in samples)
            seconds = 1e-6 * truth.micro_batch(held) * (1 + truth.backward_ratio)
            rows.append(TimedRow(held, seconds * generator.gauss(1, NOISE)))
        learnt = learnt.after(learnt.evidence(rows, DEFAULT))
    return learnt.cost_model


@cache
def planned(lengths: tuple[int, ...], cap: int, model: CostModel) -> StepPlan:
    return plan_step(lengths, DIMS, PlannerConfig(max_tokens_per_gpu=cap), model)


def regrets(pool: list[int], cap: int, samples: int, seed: int) -> dict[str, dict[str, float]]:
    """For each true model, and each that it was planned by, the regret of one draw."""
    generator = random.Random(seed)
    lengths, *earlier = (tuple(generator.sample(pool, samples)) for _ in range(LEARNING_STEPS + 1))
    found: dict[str, dict[str, float]] = {}
    for name, truth in TRUTHS.items():
        models = {str(n): replace(DEFAULT, per_micro_batch=float(n)) for n in OVERHEADS}
        models["learnt"] = learnt_model(truth, earlier, cap)
        best = predicted_step_time(planned(lengths, cap, truth), lengths, truth)
        found[name] = {
            by: predicted_step_time(planned(lengths, cap, model), lengths, truth) / best - 1
            for by, model in models.items()
        }
    return found


def main() -> None:
    """Print one table for each kind of lengths, and one of them all."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, default=REPOSITORY.parent / "shared" / "data")
    parser.add_argument("--draws", type=int, default=2)
    parser.add_argument("--samples", type=int, default=256)
    options = parser.parse_args()
    overall: dict[str, list[float]] = {}
    for name, pool, cap in sources(options.data):
        draws = [regrets(pool, cap, options.samples, seed) for seed in range(options.draws)]
        rows = []
        for truth in TRUTHS:
            means = {
                by: sum(draw[truth][by] for draw in draws) / len(draws) for by in draws[0][truth]
            }
            rows.append((truth, *(f"{mean:+.1%}" for mean in means.values())))
            for by, mean in means.items():
                overall.setdefault(by, []).append(mean)
        planned.cache_clear()
        print(f"\n{name}: regret, mean of {options.draws} draws of {options.samples} samples")
        print(Table(columns=("true model", *overall), rows=tuple(rows)))
        sys.stdout.flush()
    summary = (
        ("mean", *(f"{sum(each) / len(each):+.1%}" for each in overall.values())),
        ("worst", *(f"{max(each):+.1%}" for each in overall.values())),
    )
    print("\nall of them, by the cost of a micro-batch that plans are made with")
    print(Table(columns=("", *overall), rows=summary))


if __name__ == "__main__":
    main()
