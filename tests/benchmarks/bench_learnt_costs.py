"""Training steps planned by costs that are learnt, beside those planned by the model's shape.

    python tests/benchmarks/bench_learnt_costs.py [--steps 12] [--seconds-per-unit 4e-4]
    python tests/benchmarks/bench_learnt_costs.py --simulated 12
    python tests/benchmarks/bench_learnt_costs.py --real ../shared/data --steps 40

Megatron's schedules on 4 gloo processes whose stages sleep what a hidden model says, with
``--dynamic-batch-cost-model`` at auto and at fixed: the same samples in the same steps. Seconds are
those of whole steps from the fifth on, when costs are known, on the slowest rank, added up;
predicted are the passes alone. Stages of a tiny model compute for some milliseconds beside.

``--simulated``: nothing runs. So many jobs of the same layouts and hidden models, each of other
samples, learn from passes with noise, and steps end when the hidden model says. Printed is auto
over fixed, the mean of jobs with its standard error, from the fifth step on.

``--real``: nothing sleeps. A model of 4 layers trains on 2 processes, on each step's samples once
by either kind, in turns: fine-tuning on questions and answers (GSM8K's test set, a byte a token),
policy gradients on rollouts (example solutions, four to a question). Printed is auto over fixed,
the mean of the steps from the fifth on with its standard error: of the slowest rank's seconds, and
of all ranks' own processor time.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "distributed"))

from kit.harness import Job, results, run_jobs

from mcore_batching.planning import CostModel, ParallelDims, PlannerConfig, plan_step
from mcore_batching.planning.learning.fit import WINDOW_STEPS, evidence, relearnt
from mcore_batching.planning.learning.learnt_costs import LearntCosts, Timing
from mcore_batching.planning.plans.statistics import predicted_step_time

HIDDEN: dict[str, dict[str, float]] = {
    "as guessed": {"per_micro_batch": 256.0, "quadratic": 0.03, "backward_ratio": 2.0},
    "cheap micro-batches": {"per_micro_batch": 4.0, "quadratic": 0.002, "backward_ratio": 2.0},
    "attention alone": {"per_micro_batch": 4.0, "quadratic": 0.08, "backward_ratio": 2.5},
}
LAYOUTS: dict[str, dict[str, int]] = {
    "DP2 x PP2": {"data_parallel": 2, "pipeline_parallel": 2},
    "PP4": {"pipeline_parallel": 4},
}
TWO: dict[str, dict[str, int]] = {
    "DP2": {"data_parallel": 2},
    "PP2": {"pipeline_parallel": 2},
}
"""Layouts of 2 processes."""
_KNOWN_FROM = 4
NOISES = (0.0, 0.03, 0.1)
"""Of the time of a pass, as shares of it. Sleeping passes have about the second."""
CAP, SAMPLES = 96, 12
"""Of the sleeping jobs: most tokens of a micro-batch, and samples of a data-parallel rank."""


def main() -> None:
    """Run, compare, print a row for each layout and hidden model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seconds-per-unit", type=float, default=4e-4)
    parser.add_argument("--simulated", type=int, metavar="JOBS")
    parser.add_argument("--real", type=Path, help="folder of the GSM8K files")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--cap", type=int, default=2048)
    parser.add_argument("--hidden-size", type=int, default=64)
    options = parser.parse_args()
    if options.real:
        real(options)
        return
    if options.simulated:
        simulated(options)
        return
    print(
        f"{'layout':<12}{'hidden model':<22}{'fixed s':>9}{'learnt s':>10}{'fixed / learnt':>16}"
        f"{'micro-batches: fixed, learnt':>30}{'measured over predicted':>25}"
    )
    for layout, dims in LAYOUTS.items():
        for name, hidden in HIDDEN.items():
            fixed, learnt = (steps(dims, hidden, options, kind) for kind in ("fixed", "auto"))
            seconds = [sum(step["seconds"] for step in each) for each in (fixed, learnt)]
            counts = [statistics.mean(step["count"] for step in each) for each in (fixed, learnt)]
            off = statistics.median(step["seconds"] / step["predicted"] for step in learnt)
            print(
                f"{layout:<12}{name:<22}{seconds[0]:>9.2f}{seconds[1]:>10.2f}"
                f"{seconds[0] / seconds[1]:>16.3f}{counts[0]:>23.1f},{counts[1]:>6.1f}{off:>25.2f}",
                flush=True,
            )


def simulated(options: argparse.Namespace) -> None:
    """Ends of steps by the hidden model, planned by what passes with noise have told."""
    print(f"{'layout':<12}{'hidden model':<22}{'noise':>6}{'auto / fixed':>14}{'error':>8}")
    for layout, dims in LAYOUTS.items():
        for name, hidden in HIDDEN.items():
            for noise in NOISES:
                jobs = range(options.simulated)
                given = ParallelDims(**dims), CostModel(**hidden), noise, options.steps
                ratios = [one_job(*given, random.Random(seed)) for seed in jobs]
                error = statistics.stdev(ratios) / len(ratios) ** 0.5
                print(
                    f"{layout:<12}{name:<22}{noise:>6.0%}{statistics.mean(ratios):>14.4f}"
                    f"{error:>8.4f}",
                    flush=True,
                )


def one_job(
    dims: ParallelDims, hidden: CostModel, noise: float, num_steps: int, generator: random.Random
) -> float:
    """Seconds of auto's steps over fixed's, from the one on in which costs are known."""
    guess = CostModel(**HIDDEN["as guessed"])
    config = PlannerConfig(max_tokens_per_gpu=CAP, plan_effort=60)
    owners = [rank for rank in range(dims.data_parallel) for _ in range(SAMPLES)]
    learnt = LearntCosts(cost_model=guess)
    timed: list[list[list[Timing]]] = [[] for _ in range(dims.data_parallel)]
    ends = {"auto": 0.0, "fixed": 0.0}
    for step in range(num_steps):
        drawn = [generator.lognormvariate(2.7, 0.8) for _ in owners]
        lengths = [max(2, min(CAP, round(length))) for length in drawn]
        for kind, model in (("fixed", guess), ("auto", learnt.cost_model)):
            plan = plan_step(lengths, dims, config, model, owners=owners)
            if step >= _KNOWN_FROM:
                ends[kind] += predicted_step_time(plan, lengths, hidden)
        # Of all stages of a replica one by one: they run the same rows.
        sums: list[list[float]] = []
        for steps, rank in zip(timed, plan.micro_batches, strict=True):
            rows = [tuple(lengths[i] for i in samples) for samples in rank]
            steps.append(
                [_timed(row, hidden, noise, generator) for row in rows * dims.pipeline_parallel]
            )
            sums.append(evidence(steps[-WINDOW_STEPS:], learnt))
        learnt = relearnt(learnt, [sum(each) for each in zip(*sums, strict=True)])
    return ends["auto"] / ends["fixed"]


def _timed(
    row: tuple[int, ...], hidden: CostModel, noise: float, generator: random.Random
) -> Timing:
    forward, backward = (
        1e-6 * hidden.micro_batch(row) * share * max(0.1, generator.gauss(1.0, noise))
        for share in (1.0, hidden.backward_ratio)
    )
    return Timing(lengths=row, forward_seconds=forward, backward_seconds=backward)


def real(options: argparse.Namespace) -> None:
    """Steps of real passes on real lengths, by either kind in turns."""
    print(
        f"{'job, layout':<20}{'auto / fixed':>14}{'error':>8}{'own time':>10}{'error':>8}"
        f"{'micro-batches: auto, fixed':>28}"
    )
    given = {
        "fine-tuning": ("token-mean", fine_tuning(options)),
        "GRPO": ("token-mean-with-kl", rollouts(options)),
    }
    jobs = [
        Job(
            f"{name} {layout}",
            "kit.learning:in_turns",
            2,
            dims,
            {
                "dims": dims,
                "steps": batches,
                "cap": options.cap,
                "kinds": ["auto", "fixed"],
                "objective": objective,
                "hidden_size": options.hidden_size,
            },
            seconds=3000.0,
        )
        for name, (objective, batches) in given.items()
        for layout, dims in TWO.items()
    ]
    with tempfile.TemporaryDirectory() as scratch:
        outcomes = run_jobs(jobs, Path(scratch))
    for name, outcome in outcomes.items():
        ranks = results(outcome)
        ratios: list[tuple[float, float]] = []
        counts = []
        for each in list(zip(*ranks, strict=True))[_KNOWN_FROM:]:
            auto, fixed = ([step[kind] for step in each] for kind in ("auto", "fixed"))
            wall = max(step[0] for step in auto) / max(step[0] for step in fixed)
            ratios.append((wall, sum(step[1] for step in auto) / sum(step[1] for step in fixed)))
            counts.append((auto[0][2], fixed[0][2]))
        columns = ""
        for of_kind, width in zip(zip(*ratios, strict=True), (14, 10), strict=True):
            error = statistics.stdev(of_kind) / len(of_kind) ** 0.5
            columns += f"{statistics.mean(of_kind):>{width}.3f}{error:>8.3f}"
        means = [f"{statistics.mean(kind):.1f}" for kind in zip(*counts, strict=True)]
        print(f"{name:<20}{columns}{', '.join(means):>28}", flush=True)


def fine_tuning(options: argparse.Namespace) -> list[list[tuple[int, int]]]:
    """Total and response lengths of questions and answers, in batches."""
    rows = _rows(options.real / "gsm8k_test.jsonl")
    return _batches([(row["question"], row["answer"]) for row in rows], options)


def rollouts(options: argparse.Namespace) -> list[list[tuple[int, int]]]:
    """Total and response lengths of solutions that models wrote, in batches."""
    pairs = []
    for row in _rows(options.real / "gsm8k_example_model_solutions.jsonl"):
        written = [value for value in row.values() if isinstance(value, dict)]
        pairs += [(row["question"], value["solution"]) for value in written]
    return _batches(pairs, options)


def _rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def _batches(
    pairs: list[tuple[str, str]], options: argparse.Namespace
) -> list[list[tuple[int, int]]]:
    pool = [(len(first) + len(second), len(second)) for first, second in pairs]
    pool = [(total, response) for total, response in pool if 0 < response < total <= options.cap]
    random.Random(0).shuffle(pool)
    many = options.samples
    return [(pool * 9)[step * many : (step + 1) * many] for step in range(options.steps)]


def steps(
    dims: dict[str, int], hidden: dict[str, float], options: argparse.Namespace, cost_model: str
) -> list[dict[str, Any]]:
    """Of each step from which costs are known, what the slowest rank saw."""
    job = Job(
        f"learnt-{cost_model}",
        "kit.learning:learn",
        4,
        dims,
        {
            "dims": dims,
            "hidden": hidden,
            "sleeps": True,
            "num_steps": options.steps,
            "seconds_per_unit": options.seconds_per_unit,
            "cost_model": cost_model,
        },
        seconds=600.0,
    )
    with tempfile.TemporaryDirectory() as scratch:
        ranks = results(run_jobs([job], Path(scratch))[job.name])
    slowest = [
        {key: max(step[key] for step in each) for key in ("seconds", "predicted")}
        | {"count": len(each[0]["ranks"][0])}
        for each in zip(*ranks, strict=True)
    ]
    return slowest[_KNOWN_FROM:]


if __name__ == "__main__":
    main()
